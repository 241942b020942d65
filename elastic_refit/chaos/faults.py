"""Which faults there are, whom they strike, and where in a refit: values that a driver sends to those who strike.

What must never happen here: a fault accepted that cannot strike where it says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from elastic_refit.core.ids import Member, ProcessId, ShardId, TrainerId
from elastic_refit.errors import ConfigError

__all__ = ["OF_ENGINES", "PHASES", "Fault", "FaultKind", "FaultRecord", "Victim", "parse_fault", "phases_of"]

FaultKind = Literal[
    "kill",
    "freeze",
    "wedge",
    "gil",
    "raise",
    "slow",
    "corrupt",
    "corrupt_link",
    "partition",
    "control_partition",
    "abort_stuck",
    "engine_kill",
    "engine_freeze",
    "worker_kill",
]
"""``kill`` and ``freeze``: every recorded process of the victim, or the one of ``rank_in_shard``. ``engine_kill``,
``engine_freeze``, ``worker_kill``: child processes of its engine. ``wedge``: its working thread sleeps outside the
collective. ``gil``: a C call holds the interpreter. ``raise``: it raises while applying. ``slow``: it is late, within
its limits. ``corrupt``: a byte of its own copy of a bucket. ``corrupt_link``: a byte on its way in, so it is passed on.
``partition``: no byte between it and ``peer``. ``control_partition``: no beacon of it, no order to it on the control
channel. ``abort_stuck``: it never answers the abort order."""

Victim = Member | Literal["ledger", "coordinator"]

PHASES = (
    "idle",
    "loaded",
    "joining:prepare",
    "joining:connect",
    "packing",
    "before",
    "bucket:K",
    "bucket:*",
    "finalizing",
    "ack",
    "settle",
    "rebuild",
    "retry",
)
"""Where a fault strikes. ``idle``, ``loaded``: the driver says when. ``joining:prepare``: it has answered, and does
nothing of the join; ``joining:connect``: it has begun to connect. ``packing``: a trainer. ``before``: told to move
bytes, and none has moved. ``bucket:K``: in the middle of bucket K. ``finalizing``: about to finish the update.
``ack``: everything moved, nothing answered. ``settle``: inside the settling of an aborted epoch. ``rebuild`` and
``retry`` (``retry:K``): the join, and a bucket, of a recovery; all others strike before one, and ``bucket:*`` always.
"""

_BUCKETS = frozenset({"bucket", "retry"})
_ALL = frozenset(phase.partition(":")[0] if phase[-1] in "K*" else phase for phase in PHASES)
_WORKING = _ALL - {"idle", "loaded", "joining:connect", "settle"}
_PHASES_OF: dict[FaultKind, frozenset[str]] = {
    "wedge": _WORKING,
    "slow": _WORKING,
    "raise": _WORKING - {"joining:prepare", "rebuild"},
    "corrupt": _BUCKETS,
    "corrupt_link": _BUCKETS,
    "partition": _BUCKETS,
    "abort_stuck": frozenset({"settle"}),
}
_NOT_OF_TRAINERS = frozenset({"finalizing", "loaded"})
_NOT_OF_SHARDS = frozenset({"packing"})
_SIGNALS_ONLY = ("kill", "freeze")
OF_ENGINES: tuple[FaultKind, ...] = ("engine_kill", "engine_freeze", "worker_kill")
_FAMILIES = re.compile(r"(?P<family>bucket|retry):(?:\d+|\*)|retry")
_FAULT = re.compile(r"(?P<shard>\d+)@(?P<step>\d+):(?P<phase>idle|before|finalizing|ack|bucket:\d+)")
_CLI_PHASES = "idle, before, bucket:K, finalizing, ack"


def phases_of(kind: FaultKind, striker: Member) -> frozenset[str]:
    """The phases in which ``striker`` can strike ``kind``; ``bucket`` and ``retry`` stand for all their buckets."""
    phases = _PHASES_OF.get(kind, _ALL)
    if isinstance(striker, ShardId):
        return phases - _NOT_OF_SHARDS
    if kind in ("wedge", "slow", "raise"):
        phases -= _BUCKETS  # a trainer does nothing of its own in a bucket but pack the next one
    return phases - _NOT_OF_TRAINERS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Details:
    """What only some faults need."""

    rank_in_shard: int | None = None
    """The one process, of several, that is killed or frozen; None: all of them."""
    peer: Member | None = None
    """Of a partition: the neighbour at the other end."""
    seconds: float | None = None
    """How long one delay of ``slow`` takes, and at most a ``wedge`` or a held ``gil``; None: as long as it is armed."""
    times: int = 1
    """Delays of ``slow``, each followed by a tick."""
    by: Member | None = None
    """Who strikes it when it reaches the phase; None: a member itself, and trainer 0 the ledger and the coordinator."""
    targets: tuple[ProcessId, ...] = ()
    """The processes to signal; none: the striker's own. The driver fills it in."""


@dataclass(frozen=True, slots=True)
class Fault(_Details):
    """``kind`` strikes ``victim`` in ``phase`` of the refit that pushes ``version``: once, or each time for ``*``.

    Raises:
        ConfigError: it could not strike so; the message says what can be.
    """

    kind: FaultKind
    victim: Victim
    version: int
    phase: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ConfigError(f"fault: there is no {self.kind!r}; there are {', '.join(get_args(FaultKind))}")
        if not isinstance(self.victim, ShardId | TrainerId) and self.kind not in _SIGNALS_ONLY:
            raise ConfigError(f"{self}: the {self.victim} can be killed or frozen", field="kind")
        if self.by is not None and self.kind not in _SIGNALS_ONLY:
            raise ConfigError(f"{self}: {self.by} can do no more than kill or freeze it", field="by")
        possible = phases_of(self.kind, self.striker)
        if self.phase == "bucket" or self.family not in possible:
            raise ConfigError(
                f"{self}: {self.kind} by {self.striker} can strike in {', '.join(sorted(possible))}", field="phase"
            )
        if (self.peer is not None) != (self.kind == "partition"):
            raise ConfigError(f"{self}: a partition, and nothing else, needs a peer", field="peer")
        if isinstance(self.victim, TrainerId) and self.kind in ("corrupt", *OF_ENGINES):
            raise ConfigError(f"{self}: a trainer has neither an engine nor a copy to corrupt", field="kind")
        if self.kind == "corrupt_link" and self.victim == TrainerId(0):
            raise ConfigError(f"{self}: nothing comes in at the root", field="victim")
        if self.kind == "slow" and self.seconds is None:
            raise ConfigError(f"{self}: say how many seconds", field="seconds")

    @property
    def striker(self) -> Member:
        """The member that strikes when it reaches the phase."""
        if self.by is not None:
            return self.by
        return self.victim if isinstance(self.victim, ShardId | TrainerId) else TrainerId(0)

    @property
    def family(self) -> str:
        """The phase without its bucket."""
        match = _FAMILIES.fullmatch(self.phase)
        return self.phase if match is None else match["family"] or "retry"

    @property
    def bucket(self) -> int | None:
        """The bucket of a phase that names one."""
        number = self.phase.rpartition(":")[2]
        return int(number) if self.family in _BUCKETS and number.isdecimal() else None

    @property
    def strikes_buckets(self) -> bool:
        return self.family in _BUCKETS

    @property
    def repeats(self) -> bool:
        return self.phase.endswith("*")

    def is_at(self, phase: str) -> bool:
        """Whether it strikes in ``phase``, which names its bucket; ``bucket:*`` strikes resent ones too."""
        if not self.strikes_buckets or self.bucket is not None:
            return self.phase == phase
        family = phase.partition(":")[0]
        return family == self.family or (self.family == "bucket" and family in _BUCKETS)

    def __str__(self) -> str:
        return f"{self.kind} of {self.victim} in refit v{self.version}, {self.phase}"


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """Kept before the fault strikes: which, in which process, and the phase that was reached.

    ``epoch`` is that of the order being carried out, -1 between refits. ``at_s`` is when the log had it, in monotonic
    seconds of the driver's node; None before.
    """

    fault: Fault
    pid: int
    phase: str
    epoch: int = -1
    at_s: float | None = None


def parse_fault(kind: Literal["kill", "freeze"], text: str) -> Fault:
    """Read ``SHARD@STEP:PHASE``; step ``n`` pushes version ``n``.

    Raises:
        ConfigError: the text is not of that form; the message says which phases there are.
    """
    match = _FAULT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"--{kind} {text!r}: write SHARD@STEP:PHASE, for example 0@3:bucket:2; PHASE is one of {_CLI_PHASES}",
            field=kind,
        )
    return Fault(kind, ShardId(int(match["shard"])), int(match["step"]), match["phase"])
