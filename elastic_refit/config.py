"""What a user may set: one frozen tree, its defaults, and how a file and ``--set`` fill it.

Defaults live here and nowhere else; they protect from the first refit. What must never happen here: a key that is
ignored, a limit that contradicts another one, or a traceback where one sentence would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from elastic_refit.config_source import apply_override, describe, read_mapping
from elastic_refit.core.deadlines import BandwidthEstimate, Deadlines, check
from elastic_refit.core.events import CommitMode
from elastic_refit.core.manifest import ALIGNMENT_BYTES
from elastic_refit.errors import ConfigError
from elastic_refit.transports.registry import require_transport

__all__ = [
    "ChaosConfig",
    "DeadlinesConfig",
    "EngineConfig",
    "FleetConfig",
    "LedgerConfig",
    "RayConfig",
    "RefitConfig",
    "RunConfig",
    "Section",
    "export_schema",
    "load_config",
]

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, Field(ge=1)]


def _known_transport(name: str) -> str:
    require_transport(name)
    return name


class Section(BaseModel):
    """Base of every part of the tree: frozen, strict about types, and deaf to no key.

    A section that a file names without giving it anything (all its keys commented out) has its defaults.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_are_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or not cls._is_section(key)}

    @classmethod
    def _is_section(cls, key: str) -> bool:
        kind = cls.model_fields[key].annotation if key in cls.model_fields else None
        return isinstance(kind, type) and issubclass(kind, Section)


class FleetConfig(Section):
    """Who takes part."""

    trainers: Count = 1
    """Trainer processes. They hold the first ranks of every refit group; the run ends when one is lost."""
    shards: Count = 3
    """Generation shards to begin with; the fleet may grow and shrink later."""
    widths: list[Count] | None = None
    """Ranks (TP x PP) of each shard, one number per shard; null: one rank each."""
    min_healthy: Annotated[int, Field(ge=0)] = 1
    """The run ends when fewer shards than this can serve. High: never train on few samples; low: ride out more."""

    @model_validator(mode="after")
    def _numbers_agree(self) -> FleetConfig:
        if self.widths is not None and len(self.widths) != self.shards:
            raise ValueError(f"widths has {len(self.widths)} entries and shards is {self.shards}; they must be equal")
        if self.min_healthy > self.shards:
            raise ValueError(f"min_healthy ({self.min_healthy}) must not be above shards ({self.shards})")
        return self


class RefitConfig(Section):
    """How weights are pushed."""

    bucket_bytes: Annotated[int, Field(gt=0, multiple_of=ALIGNMENT_BYTES)] = 64 << 20
    """Size of one packed buffer, in bytes, a multiple of 16. Each rank holds two. Large: fewer steps; small: less to
    resend after a fault, and progress is seen sooner."""
    commit: CommitMode = "streamed"
    """`streamed` applies buckets as they arrive and needs no memory; `staged` receives everything beside the old
    weights, so that an aborted refit leaves a shard serving its old version, for the price of one copy."""
    max_recoveries_per_refit: Annotated[int, Field(ge=0)] = 1
    """How often one refit may rebuild its group and go on; the next failure ends the run."""
    digest: Literal["xxh3", "sum64"] = "xxh3"
    """Proof of each bucket: `xxh3` is the fastest on CPUs; `sum64` has the same value computed on a GPU."""
    transport: Annotated[str, AfterValidator(_known_transport)] = "broadcast"
    """How the bytes travel: `broadcast` sends packed buckets from trainer 0 down the group. Other distributions may
    offer more, by an entry point in `elastic_refit.transports`."""


class DeadlinesConfig(Section):
    """Every limit, in seconds, and the bandwidth that stretches some of them. None may run out before what runs inside
    it, and values that would are rejected.

    The limits are floors: for a large model `stall_s`, `abort_s` and `hard_s` are stretched by its bytes over the
    measured bandwidth. The phase limits `pack_s apply_s finalize_s` count from the last sign of progress.
    """

    ping_s: Seconds = 2.0
    """A ping's answer. Too short condemns a process that only waited for a busy core."""
    stall_s: Seconds = 3.0
    """Time without progress anywhere after which evidence is gathered. Gathering it disturbs nobody."""
    evidence_s: Seconds = 3.0
    """The evidence round, from the first testimony to the verdict; covers `ping_s`."""
    fence_s: Seconds = 2.0
    """From a verdict to the proof that all processes of a culprit are gone."""
    order_s: Seconds = 0.5
    """From the abort order to its arrival at every survivor."""
    abort_s: Seconds = 25.0
    """Time without a tick after which a rank aborts by itself, should the coordinator be silent too. Covers
    evidence_s + fence_s + order_s and the longest of `stall_s pack_s apply_s finalize_s`."""
    abort_grace_s: Seconds = 5.0
    """Time that an aborted rank has to leave the blocked call before its native timer dumps all stacks and ends it."""
    prepare_s: Seconds = 20.0
    """Every rank binds a listener and says who it is."""
    join_s: Seconds = 20.0
    """The group connects."""
    pause_s: Seconds = 30.0
    """Engines pause; running requests may have to finish."""
    pack_s: Seconds = 10.0
    """A trainer packs one bucket."""
    apply_s: Seconds = 10.0
    """A shard applies one bucket."""
    finalize_s: Seconds = 15.0
    """A shard commits after its last bucket; with `commit: staged` this is when it applies all of them."""
    hard_s: Seconds = 60.0
    """The whole transfer: every bucket moved and applied."""
    settle_s: Seconds = 12.0
    """Survivors answer the abort order; covers order_s and the longer of `pack_s apply_s`, since trainers finish the
    bucket that they pack and shards the one that they apply."""
    ledger_s: Seconds = 10.0
    """One call to the ledger; covers its restart."""
    coordinator_restart_s: Seconds = 20.0
    """A coordinator that died is back and has read the journal."""
    bandwidth_floor_bytes_per_s: Annotated[float, Field(gt=0)] = 100e6
    """Bytes per second that a refit reaches at the very least: assumed before the first measurement."""
    bandwidth_cap_bytes_per_s: Annotated[float, Field(gt=0)] = 100e9
    """Bytes per second that no limit may count on, whatever was measured."""
    slack: Annotated[float, Field(ge=1)] = 4.0
    """How many times its expected duration a transfer may take."""
    hard_cap_s: Seconds = 1800.0
    """`stall_s` and `hard_s` are never stretched beyond this, however large the model."""

    @model_validator(mode="after")
    def _limits_agree(self) -> DeadlinesConfig:
        check(self.limits)
        floor, cap = self.bandwidth_floor_bytes_per_s, self.bandwidth_cap_bytes_per_s
        if cap < floor:
            raise ValueError(
                f"bandwidth_cap_bytes_per_s ({cap:g}) must be at least bandwidth_floor_bytes_per_s ({floor:g})"
            )
        return self

    @property
    def limits(self) -> Deadlines:
        """The limits as configured, before any transfer stretches them."""
        return Deadlines(**{each.name: getattr(self, each.name) for each in fields(Deadlines)})

    @property
    def bandwidth(self) -> BandwidthEstimate:
        """The estimate before anything was measured."""
        return BandwidthEstimate(
            floor_bytes_per_s=self.bandwidth_floor_bytes_per_s, cap_bytes_per_s=self.bandwidth_cap_bytes_per_s
        )


class LedgerConfig(Section):
    """When the ledger doubts a shard, gives it up, and lets it be restarted. Fixed for one run."""

    suspect_after_probes: Count = 1
    """Failed liveness probes in a row that make a shard suspect."""
    dead_after_probes: Count = 3
    """Failed liveness probes in a row that make it dead."""
    suspect_after_requests: Count = 1
    """Windows in a row in which its requests failed and none succeeded that make it suspect."""
    dead_after_requests: Count = 3
    """The same, to make it dead."""
    window_s: Annotated[float, Field(ge=0)] = 10.0
    """Failures within this many seconds are one observation: one outage fails many requests at once."""
    lease_cap_s: Seconds = 600.0
    """Seconds that leases (compiling, loading) may keep a shard from answering probes."""
    restart_budget: Annotated[int, Field(ge=0)] = 3
    """Restarts of one shard before it is retired."""
    restart_refill_s: Seconds = 1800.0
    """A shard that was healthy this many seconds in one stretch has its whole restart budget back."""

    @model_validator(mode="after")
    def _death_comes_after_suspicion(self) -> LedgerConfig:
        for what in ("probes", "requests"):
            suspect, dead = getattr(self, f"suspect_after_{what}"), getattr(self, f"dead_after_{what}")
            if dead < suspect:
                raise ValueError(f"dead_after_{what} ({dead}) must be at least suspect_after_{what} ({suspect})")
        return self


class EngineConfig(Section):
    """What generates."""

    kind: Literal["vllm", "torch"] = "vllm"
    """`vllm`, or `torch`: the plain engine for tests and small models."""
    process: Literal["inline", "own"] | None = None
    """`own`: the engine has processes of its own, and vLLM batches the requests of all callers. `inline`: in the
    shard's actor, for small engines of one rank. null: `own` for vLLM, and for shards of several ranks."""
    pause: Literal["wait", "abort", "keep"] = "wait"
    """What becomes of requests that run when a refit begins. `wait`: they finish; `abort`: they start again under the
    new weights; `keep`: they go on under them, and their tokens carry different versions. Engines in the shard's
    actor, and torch, always wait."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the engine as they are, under its own names (`max_model_len`, `enforce_eager`, ...)."""


class RayConfig(Section):
    """Where the actors run."""

    address: str | None = None
    """A running cluster, `auto` for the one of this machine, null to start one here."""
    dashboard_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of the dashboard of a cluster that is started here; null: the first free one from 8265 on."""
    num_cpus: Count | None = None
    """CPUs that a cluster started here says it has; null: those of the machine, and what the fleet needs at least."""
    cpus_per_trainer: Annotated[float, Field(ge=0)] = 1.0
    """CPUs that the cluster reserves for each trainer; they place actors and limit nothing."""
    cpus_per_shard: Annotated[float, Field(ge=0)] = 1.0
    """CPUs that the cluster reserves for each shard."""


class ChaosConfig(Section):
    """Faults on purpose, for tests of a run. docs/chaos.md says which there are."""

    enabled: bool = False
    """Let the driver kill, freeze and disturb members of this run in the middle of refits. Never in production: off,
    no fault can be armed and a refit's code path asks nothing."""


class RunConfig(Section):
    """Everything about one run."""

    fleet: FleetConfig = FleetConfig()
    refit: RefitConfig = RefitConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    ledger: LedgerConfig = LedgerConfig()
    engine: EngineConfig = EngineConfig()
    ray: RayConfig = RayConfig()
    chaos: ChaosConfig = ChaosConfig()

    @model_validator(mode="after")
    def _wide_shards_have_processes(self) -> RunConfig:
        if self.engine.process == "inline" and any(width > 1 for width in self.fleet.widths or ()):
            raise ValueError(f"engine.process is inline, and fleet.widths ({self.fleet.widths}) needs own")
        return self


C = TypeVar("C", bound=Section)


def load_config(path: str | Path | None, overrides: Sequence[str] = (), *, model: type[C]) -> C:
    """Defaults, then the YAML file at ``path``, then ``overrides`` (``"fleet.shards=4"``; later ones win).

    Raises:
        ConfigError: one sentence that names the file or the override, the field, its value and what is allowed.
    """
    data = {} if path is None else read_mapping(Path(path))
    for override in overrides:
        apply_override(data, override)
    try:
        return model.model_validate(data)
    except ValidationError as failure:
        raise ConfigError(describe(failure, model, path=path, overrides=overrides)) from None


def export_schema(model: type[Section]) -> dict[str, Any]:
    """The JSON schema of a config file, for editors and for checks outside Python."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
