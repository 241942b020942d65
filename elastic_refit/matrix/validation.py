"""Cells that cannot be, found before anything starts; and cells that this version cannot run, which it says and counts.

What must never happen here: a cell that is impossible and runs, or one that is not run and passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from elastic_refit import errors
from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.errors import ConfigError
from elastic_refit.matrix.cells import Blow, Cell
from elastic_refit.matrix.shape import NUM_BUCKETS

__all__ = ["check_cells", "why_not_run"]

_RECOVERY = ("settle", "rebuild", "retry")
_OF_ENGINES = ("engine_kill", "engine_freeze", "worker_kill")
_KNOWN_TRANSPORTS = ("broadcast", "reshard", "object_store", "checkpoint")

Complaint = tuple[str, str]
"""The key, and what is wrong with it."""


def check_cells(cells: Sequence[Cell]) -> None:
    """Raises ConfigError for the first cell that cannot be: one sentence with its id and the key."""
    for cell in cells:
        for key, what in _complaints(cell):
            raise ConfigError(f"cell {cell.id}: {key} {what}", cell=cell.id, key=key)


def why_not_run(cell: Cell) -> str | None:
    """The part that the cell needs and this version lacks; None if it can be run."""
    if cell.transport != "broadcast":
        return f"the {cell.transport} transport is not built yet"
    needs = {
        "restart": cell.restart,
        "repeat": cell.repeat,
        "scale_to": cell.scale_to is not None,
        "drain": cell.drain is not None,
        "node": cell.node is not None,
        "setup": bool(cell.setup),
        "phase loaded": cell.phase == "loaded",
    }
    missing = [key for key, is_needed in needs.items() if is_needed]
    return f"nobody restarts, adds or drains shards yet ({', '.join(missing)})" if missing else None


def _complaints(cell: Cell) -> Iterator[Complaint]:
    rules: tuple[Callable[[Cell], Iterator[Complaint]], ...] = (
        _fleet,
        _victims,
        _faults,
        _state,
        _partition,
        _extras,
        _expectation,
    )
    for rule in rules:
        yield from rule(cell)


def _fleet(cell: Cell) -> Iterator[Complaint]:
    if cell.transport not in _KNOWN_TRANSPORTS:
        yield "transport", f"{cell.transport!r} is unknown; there are {', '.join(_KNOWN_TRANSPORTS)}"
    if cell.widths is not None and "shards" in cell.model_fields_set and len(cell.widths) != cell.shards:
        yield "widths", f"has {len(cell.widths)} entries and shards is {cell.shards}"
    if cell.min_healthy > cell.num_shards:
        yield "min_healthy", f"is {cell.min_healthy} and there are {cell.num_shards} shards"
    if cell.gathering and cell.trainers < 2:
        yield "gathering", "needs at least two trainers"


def _victims(cell: Cell) -> Iterator[Complaint]:
    indices = {
        "victim": [cell.victim],
        "victims": cell.victims or [],
        "suspects": cell.suspects,
        "between": cell.between or [],
        "names": cell.names or [],
        "collateral": cell.collateral,
        "drain": cell.drain or [],
    }
    for key, given in indices.items():
        for index in given:
            if index >= cell.num_shards:
                yield key, f"names shard {index}; shards are 0 to {cell.num_shards - 1}"
        if len(set(given)) != len(given):
            yield key, f"names a shard twice: {given}"
    if cell.victims == []:
        yield "victims", "is empty"
    if (cell.trainer_victim or 0) >= cell.trainers:
        yield "trainer_victim", f"is {cell.trainer_victim}; trainers are 0 to {cell.trainers - 1}"
    if cell.trainer_victim is not None and cell.actor is not None:
        yield "actor", "and trainer_victim are given; a fault has one victim"
    yield from _rank_in_shard(cell)


def _rank_in_shard(cell: Cell) -> Iterator[Complaint]:
    if not cell.rank_in_shard:
        return
    for index in cell.struck:
        width = 1 if cell.widths is None else cell.widths[index]
        if cell.rank_in_shard >= width:
            yield "rank_in_shard", f"is {cell.rank_in_shard}; shard {index} has {width} ranks"


def _faults(cell: Cell) -> Iterator[Complaint]:
    if cell.fault == "none":
        for key in ("phase", "thaw", "also", "then", "fence"):
            if getattr(cell, key) is not None:
                yield key, "is given without a fault"
        return
    if cell.phase is None:
        yield "phase", "is required: when does the fault strike?"
    for number, blow in enumerate(cell.blows()):
        second = None if number < len(cell.struck) or number == 0 else "then" if blow.is_then else "also"
        for key, what in _blow(cell, blow):
            yield (key, what) if second is None else (second, f"({key}) {what}")


def _blow(cell: Cell, blow: Blow) -> Iterator[Complaint]:
    target = blow.target
    if isinstance(target, ShardId) and target.index >= cell.num_shards:
        yield "victim", f"is shard {target.index}; shards are 0 to {cell.num_shards - 1}"
    if isinstance(target, TrainerId) and target.index >= cell.trainers:
        yield "trainer_victim", f"is {target.index}; trainers are 0 to {cell.trainers - 1}"
    if blow.fault in _OF_ENGINES and cell.engine != "vllm":
        yield "fault", f"is {blow.fault}, and the {cell.engine} engine has no processes of its own"
    if blow.is_then and blow.phase not in _RECOVERY:
        yield "phase", f"is {blow.phase!r}; a failure of the recovery strikes in {', '.join(_RECOVERY)}"
    try:
        fault = blow.fault_against(blow.target, version=1, peer=ShardId(0), seconds=1.0)
    except ConfigError as error:
        yield error.fields.get("field") or "fault", f"cannot be: {error}"
        return
    if cell.bucket_bytes is None and (fault.bucket or 0) >= NUM_BUCKETS:
        yield "phase", f"is {blow.phase!r}; there are {NUM_BUCKETS} buckets, 0 to {NUM_BUCKETS - 1}"


def _state(cell: Cell) -> Iterator[Complaint]:
    strikes_a_shard = cell.fault not in ("none", "partition") and cell.struck
    if cell.state in ("DEAD", "RESTARTING", "RETIRED") and strikes_a_shard:
        yield "state", f"is {cell.state}: such a shard takes no part, so nothing can strike it there"
    if cell.suspects and cell.state == "SUSPECT":
        yield "suspects", "and state SUSPECT are given; one of them is enough"
    if cell.cold and cell.state != "HEALTHY":
        yield "state", f"is {cell.state}, and cold says that there was no refit yet"


def _partition(cell: Cell) -> Iterator[Complaint]:
    if (cell.fault == "partition") != (cell.between is not None):
        yield "between", "belongs to a partition, and a partition needs it"
    elif cell.between is not None and (len(cell.between) != 2 or abs(cell.between[0] - cell.between[1]) != 1):
        yield "between", f"is {cell.between}; bytes travel between neighbours, such as [1, 2]"


def _extras(cell: Cell) -> Iterator[Complaint]:
    frozen = any(blow.fault == "freeze" for blow in cell.blows())
    if cell.thaw is not None and not frozen:
        yield "thaw", "needs a freeze"
    if cell.fence is not None and not cell.struck:
        yield "fence", "needs a shard that is condemned"
    if cell.drain is not None and cell.fault != "none":
        yield "drain", "is no cell of a fault"


def _expectation(cell: Cell) -> Iterator[Complaint]:
    if cell.outcome == "ends":
        kind = getattr(errors, cell.error, None) if cell.error is not None else None
        if kind is None or not issubclass(kind, errors.ElasticRefitError):
            yield "error", f"is {cell.error!r}; an outcome 'ends' names an error of elastic_refit.errors"
    elif cell.error is not None:
        yield "error", f"is given, and the outcome is {cell.outcome}"
    if cell.outcome == "recovers" and cell.names is None:
        yield "names", "is required where the outcome is recovers"
    for rule in cell.rules or ():
        if not 1 <= rule <= 5:
            yield "rule", f"{rule} is none of 1 to 5"
