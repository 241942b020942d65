"""What must hold of every cell, one small function each; the cell passes if none of them has anything to say.

What must never happen here: a check that could not be made and counts as held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from elastic_refit.chaos import Fault, FaultRecord
from elastic_refit.core.deadlines import MAX_ASKS, Deadlines
from elastic_refit.core.ids import ShardId
from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.observation import Observation, Served

__all__ = ["CHECKS", "MAX_GAP", "MIN_GAP_PREVIOUS", "judge"]

T = TypeVar("T")

MAX_GAP = 1e-3
"""Float32 on two implementations differs by some 1e-5; wrong weights by more than this."""
MIN_GAP_PREVIOUS = 1e-2
"""The control: the same comparison with the version before must fail, or it would prove nothing."""

_CONDEMN_NOBODY = frozenset(
    {"UnattributedHang", "RefitRejected", "DigestMismatch", "TrainerLost", "LedgerLost", "CoordinatorLost"}
)
_GONE = ("DEAD", "RESTARTING", "RETIRED")

Complaints = Iterator[str]


def judge(cell: Cell, seen: Observation) -> list[str]:
    """Everything that did not hold, one sentence each."""
    wrong = []
    for check in CHECKS:
        try:
            wrong += list(check(cell, seen))
        except Exception as error:  # noqa: BLE001 - a check that cannot be made is a failure, whatever stops it
            wrong.append(f"{check.__name__.strip('_')} could not be checked: {type(error).__name__}: {error}")
    return wrong


# -- the fault


def _fault_landed(cell: Cell, seen: Observation) -> Complaints:
    """By its own record, kept before it struck."""
    if bool(cell.blows()) != bool(seen.planned):
        yield "its fault was not armed"
    for fault in seen.planned:
        if not any(_is_of(record, fault) for record in seen.records):
            struck = ", ".join(f"{record.fault} in {record.phase}" for record in seen.records) or "nothing"
            yield f"{fault} did not strike there; what struck: {struck}"


def _is_of(record: FaultRecord, fault: Fault) -> bool:
    struck = record.fault
    same = (struck.kind, struck.victim, struck.version, struck.phase)
    return same == (fault.kind, fault.victim, fault.version, fault.phase) and _is_in(record.phase, fault)


def _is_in(phase: str, fault: Fault) -> bool:
    """Whether it is the phase of ``fault``, which may leave the bucket open."""
    is_open = fault.phase in ("retry", f"{fault.family}:*")
    return phase == fault.phase or (is_open and phase.partition(":")[0] == fault.family)


# -- the verdict


def _outcome(cell: Cell, seen: Observation) -> Complaints:
    if seen.outcome != cell.outcome:
        why = f": {seen.error}" if seen.error is not None else ""
        yield f"the outcome is {seen.outcome}, expected {cell.outcome}{why}"


def _error(cell: Cell, seen: Observation) -> Complaints:
    kind = type(seen.error).__name__ if seen.error is not None else None
    if kind != cell.error:
        yield f"the driver saw {kind}, expected {cell.error}"
    if seen.error is not None and not str(seen.error).strip():
        yield "the error says nothing"


def _names(cell: Cell, seen: Observation) -> Complaints:
    if cell.names is not None and list(seen.shard_names) != sorted({*cell.names, *cell.collateral}):
        yield f"the verdict names {list(seen.names)}, expected shards {cell.names} and collateral {cell.collateral}"
    if cell.names is None and cell.outcome == "continues" and seen.names:
        yield f"the verdict names {list(seen.names)}, and no refit should have failed"


def _trainer_named(cell: Cell, seen: Observation) -> Complaints:
    trainer = f"trainer[{cell.trainer_victim}]"
    if cell.trainer_victim is not None and cell.error == "TrainerLost" and trainer not in str(seen.error):
        yield f"the error does not name {trainer}: {seen.error}"


def _rule(cell: Cell, seen: Observation) -> Complaints:
    if cell.rules is not None and seen.rules != cell.rules:
        yield f"rules {list(seen.rules)} named them, expected {list(cell.rules)}"


def _edge(cell: Cell, seen: Observation) -> Complaints:
    """A partition that ends the run says between whom."""
    if cell.between is not None and cell.outcome == "ends":
        missing = [index for index in cell.between if f"shard[{index}]" not in str(seen.error)]
        if missing:
            yield f"the error does not name the edge {cell.between}: {seen.error}"


def _rebuilds(cell: Cell, seen: Observation) -> Complaints:
    opened = _known(seen.epochs_opened, "the number of epochs")
    if cell.rebuilds is not None and opened != cell.rebuilds:
        yield f"{opened} groups were built, expected {cell.rebuilds}"


def _landed(cell: Cell, seen: Observation) -> Complaints:
    if cell.outcome != "ends" and (len(seen.landed) != cell.refits or seen.landed[-1:] != [seen.version]):
        yield f"versions {seen.landed} landed, expected {cell.refits} up to {seen.version}"


def _resent(cell: Cell, seen: Observation) -> Complaints:
    """When everybody has every bucket, a recovery moves none."""
    if cell.phase == "ack" and cell.outcome == "recovers":
        resent = [incident.resent_buckets for incident in seen.incidents]
        if any(resent):
            yield f"{resent} buckets were resent, and everybody had them all"


def _stacks(cell: Cell, seen: Observation) -> Complaints:
    """Who holds the interpreter is asked for its stacks before it is killed."""
    if cell.fault != "gil":
        return
    if not _known(seen.stacks, "its stacks"):
        yield "whoever held the interpreter left no stacks"
    if seen.incidents and not any(incident.stacks for incident in seen.incidents):
        yield "no stacks of the condemned are in the incident"


# -- time


def _within(cell: Cell, seen: Observation) -> Complaints:
    if cell.within_s is not None:
        took_s = _known(seen.recover_s, "how long it took")
        if took_s > cell.within_s:
            yield f"it took {took_s:.2f} s from the fault, more than {cell.within_s:g} s"


def _deadlines(cell: Cell, seen: Observation) -> Complaints:
    times = 1 + cell.max_recoveries
    for incident in seen.incidents:
        for stage, limit_s in _stage_limits(seen.limits).items():
            if incident.seconds[stage] > times * limit_s:
                yield f"{stage} took {incident.seconds[stage]:.2f} s, its limits allow {times * limit_s:.2f} s"


def _stage_limits(limits: Deadlines) -> dict[str, float]:
    """The longest that one attempt may spend in each stage of an incident."""
    asking_s = MAX_ASKS * (limits.evidence_s + limits.order_s)
    attempt_s = max(limits.prepare_s, limits.join_s, limits.pause_s + limits.pack_s, limits.hard_s, limits.finalize_s)
    return {
        "detect": attempt_s + limits.ping_s,
        "attribute": limits.ping_s + 2 * asking_s,
        "fence": 2 * (limits.fence_s + limits.order_s),
        "abort": MAX_ASKS * limits.settle_s + limits.order_s,
        "settle": MAX_ASKS * limits.settle_s + limits.order_s,
        "rebuild": limits.prepare_s + limits.join_s + 2 * limits.order_s,
        "resend": limits.pause_s + limits.pack_s + limits.hard_s + limits.finalize_s + 3 * limits.order_s,
    }


# -- the ledger afterwards


def _condemned(cell: Cell, seen: Observation) -> Complaints:
    """Exactly who was named, and nobody where nobody should be."""
    found = sorted({shard.index for shard in _known(seen.condemned, "who was condemned")})
    if cell.names is not None and cell.outcome != "continues":
        if found != sorted({*cell.names, *cell.collateral}):
            yield f"shards {found} were condemned, expected {cell.names} and collateral {cell.collateral}"
        return
    spared = cell.error in _CONDEMN_NOBODY or cell.rebuilds == 0
    allowed = set() if spared else set(cell.struck)
    if not set(found) <= allowed:
        yield f"shards {found} were condemned, allowed are {sorted(allowed)}"


def _states(cell: Cell, seen: Observation) -> Complaints:
    """After a refit that landed: who is gone, who is suspected still, and everybody else serves."""
    if cell.outcome == "ends":
        return
    for index, view in _known(seen.shards, "the ledger").items():
        wanted = _wanted_state(cell, seen, index)
        if view.state not in wanted:
            yield f"shard {index} is {view.state}, expected {' or '.join(wanted)}"
        if "SUSPECT" in wanted and not view.request_failures:
            yield f"shard {index} lost its request streak"


def _wanted_state(cell: Cell, seen: Observation, index: int) -> tuple[str, ...]:
    condemned = {shard.index for shard in seen.condemned or ()}
    is_victim = index == cell.victim
    if is_victim and cell.state in _GONE:
        return (cell.state,)
    died = cell.fault in ("kill", "gil") and cell.outcome == "continues" and index in cell.struck
    if index in condemned or died:
        return ("DEAD",)
    return ("SUSPECT",) if index in cell.suspects or (is_victim and cell.state == "SUSPECT") else ("HEALTHY",)


def _replayed(cell: Cell, seen: Observation) -> Complaints:
    is_lost = cell.actor == "ledger" and (cell.fault, cell.phase) == ("kill", "idle")
    if is_lost and not _known(seen.is_replayed, "the ledger that came back"):
        yield "the ledger that came back is not the one that was lost"


def _refused(cell: Cell, seen: Observation) -> Complaints:
    for event in _known(seen.refused, "what the ledger refused"):
        yield f"the ledger refused what the coordinator told it: {event}"


def _left_serving(cell: Cell, seen: Observation) -> Complaints:
    """A refit that is staged takes no survivor out of the serving set. Killed between refits, nobody is condemned."""
    if cell.commit == "staged":
        killed = {fault.victim for fault in seen.planned if fault.kind == "kill"}
        left = [shard for shard in _known(seen.left_serving, "who left the serving set") if shard not in killed]
        if left:
            yield f"{', '.join(map(str, left))} left the serving set, and the commit is staged"


# -- the shards afterwards


def _weights(cell: Cell, seen: Observation) -> Complaints:
    """Whoever serves after a refit that landed holds the trainer's weights, and not those of the version before."""
    if cell.outcome == "ends":
        return
    served, version = _known(seen.served, "what the shards serve"), seen.version
    serving = [view.id for view in _known(seen.shards, "the ledger").values() if view.state in ("HEALTHY", "SUSPECT")]
    if not serving:
        yield "nobody serves"
    for shard in serving:
        found = served.get(shard)
        if found is None or (found.holds, found.label) != (version, version):
            yield f"{shard} should serve version {version} and does not: {found}"
        else:
            yield from _gaps(shard, found)


def _gaps(shard: ShardId, found: Served) -> Complaints:
    if not _known(found.gap, "the weights") < MAX_GAP:
        yield f"{shard} does not hold the trainer's weights: log-probabilities differ by {found.gap:.1e}"
    if not _known(found.gap_previous, "the control") > MIN_GAP_PREVIOUS:
        yield f"{shard}: the control did not fail: the version before differs by {found.gap_previous:.1e}"


def _labels(cell: Cell, seen: Observation) -> Complaints:
    """Samples are labelled with what the shard holds whole, and made from it; a mixture gives none."""
    for shard, found in _known(seen.served, "what the shards serve").items():
        if found.label is None:
            continue
        if found.label != found.holds:
            yield f"{shard} labels its samples {found.label} and holds {found.holds}"
        gap = {seen.version: found.gap, seen.version - 1: found.gap_previous}.get(found.label)
        if cell.trainer_victim != 0 and not _known(gap, f"version {found.label} of {shard}") < MAX_GAP:
            yield f"{shard} labels its samples {found.label}, and they differ from that version's by {gap:.1e}"


def _old_version(cell: Cell, seen: Observation) -> Complaints:
    """A staged refit that ended left the old version whole."""
    if cell.commit != "staged" or cell.outcome != "ends":
        return
    for shard, found in _known(seen.served, "what the shards serve").items():
        if (found.holds, found.label) != (seen.version - 1, seen.version - 1):
            yield f"{shard} should still serve version {seen.version - 1}: {found}"


def _gone(cell: Cell, seen: Observation) -> Complaints:
    living = _known(seen.living, "whether the condemned are gone")
    if cell.fence is None:
        yield from (f"{process} was condemned and lives" for process in living)


def _intruders(cell: Cell, seen: Observation) -> Complaints:
    """Who was condemned and could not be killed can neither join nor serve when it wakes."""
    if cell.fence is not None:
        yield from _known(seen.intruders, "what the thawed process could do")


def _known(value: T | None, what: str) -> T:
    if value is None:
        raise LookupError(f"{what} was not looked at")
    return value


CHECKS: tuple[Callable[[Cell, Observation], Complaints], ...] = (
    _fault_landed,
    _outcome,
    _error,
    _names,
    _trainer_named,
    _rule,
    _edge,
    _rebuilds,
    _landed,
    _resent,
    _stacks,
    _within,
    _deadlines,
    _condemned,
    _states,
    _replayed,
    _refused,
    _left_serving,
    _weights,
    _labels,
    _old_version,
    _gone,
    _intruders,
)
