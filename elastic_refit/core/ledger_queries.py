"""What can be asked of a ledger state. Every answer is plain, and in the order of shard indices."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_shards import restarts_left
from elastic_refit.core.ledger_state import Change, LedgerState, OpenRefit, Rejection, ShardRecord
from elastic_refit.core.ledger_table import ABSENT, SERVING, ShardState
from elastic_refit.core.membership import Membership
from elastic_refit.errors import FleetExhausted, NoSurvivingShards

__all__ = [
    "CorrelatedFailure",
    "absent",
    "correlated_failure",
    "exhaustion",
    "joinable",
    "next_incarnation",
    "next_index",
    "participants",
    "raise_if_exhausted",
    "record_of",
    "remaining_restarts",
    "serving",
    "snapshot",
    "stale",
    "suspected",
]

_NAMES = tuple(state.name for state in ShardState)


@dataclass(frozen=True, slots=True)
class CorrelatedFailure:
    """Too much of the fleet failed within one window for separate causes: one incident, and maybe one cause."""

    shards: tuple[ShardId, ...]
    num_shards: int
    """Of how many that are not retired."""
    window_s: float


def record_of(state: LedgerState, index: int) -> ShardRecord | None:
    return state.shards.get(index)


def serving(state: LedgerState) -> tuple[ShardId, ...]:
    """Who may take traffic: HEALTHY and SUSPECT."""
    return _in_states(state, SERVING)


def absent(state: LedgerState) -> tuple[ShardId, ...]:
    """Who is no member of a refit: DEAD, RESTARTING and RETIRED. Not the complement of :func:`serving`."""
    return _in_states(state, ABSENT)


def stale(state: LedgerState) -> tuple[ShardId, ...]:
    """Who joins refits and takes no traffic."""
    return _in_states(state, (ShardState.STALE,))


def suspected(state: LedgerState) -> tuple[ShardId, ...]:
    """Whose real requests fail, whatever its state says: the request streak is at the threshold of suspicion."""
    least = state.policy.suspect_after_requests
    return _where(state, lambda record: record.request_failures >= least and record.state not in ABSENT)


def joinable(state: LedgerState) -> tuple[ShardId, ...]:
    """Who belongs into the next membership: everybody who is not absent and does not leave."""
    return _where(state, lambda record: record.state not in ABSENT and not record.is_draining)


def participants(state: LedgerState, membership: Membership) -> tuple[ShardId, ...]:
    """The members that are there, as the incarnation that was planned: whom a refit over ``membership`` can reach."""
    planned = (state.shards.get(shard.index) for shard in membership.shard_ids)
    there = {record.id for record in planned if record is not None and record.state not in ABSENT}
    return tuple(shard for shard in membership.shard_ids if shard in there)


def next_incarnation(state: LedgerState, index: int) -> int:
    """The incarnation that a successor in seat ``index`` has."""
    record = state.shards.get(index)
    return 0 if record is None else record.id.incarnation + 1


def next_index(state: LedgerState) -> int:
    """The lowest index above every one that was ever used: retired seats are not used again."""
    return 1 + max((record.id.index for record in state.shards.values()), default=-1)


def remaining_restarts(state: LedgerState, index: int, *, now_s: float | None = None) -> int:
    """Charged restarts left to seat ``index``; zero for one that does not exist."""
    record = state.shards.get(index)
    return 0 if record is None else restarts_left(state.policy, record, _now(state, now_s))


def raise_if_exhausted(state: LedgerState, *, now_s: float | None = None) -> None:
    """Raise what :func:`exhaustion` finds: NoSurvivingShards or FleetExhausted."""
    error = exhaustion(state, now_s=now_s)
    if error is not None:
        raise error


def exhaustion(state: LedgerState, *, now_s: float | None = None) -> NoSurvivingShards | FleetExhausted | None:
    """The error that ends the run because too few are left, or None; costs the same for any number of shards.

    Suspended while a refit is open, and for FleetExhausted also until a refit lands: before the first one, and after
    one that failed. Each of these suspensions ends by itself ``coordinator_s`` after it began.
    """
    num_shards = sum(state.counts)
    refits = state.refits
    if not num_shards or (refits.open is not None and _is_recent(state, refits.open.opened_s, now_s)):
        return None
    num_absent = sum(state.counts[each] for each in ABSENT)
    if num_absent == num_shards:
        return NoSurvivingShards(f"none of {num_shards} shards is left: {_census(state)}", num_shards=num_shards)
    if refits.landed_version is None and refits.unlanded_since_s is None:
        return None
    if refits.unlanded_since_s is not None and _is_recent(state, refits.unlanded_since_s, now_s):
        return None
    num_serving, least = sum(state.counts[each] for each in SERVING), state.policy.min_healthy
    if num_serving >= least:
        return None
    return FleetExhausted(
        f"{num_serving} of {num_shards} shards serve and min_healthy is {least}: {_census(state)}",
        num_serving=num_serving,
        min_healthy=least,
    )


def correlated_failure(state: LedgerState, *, now_s: float | None = None) -> CorrelatedFailure | None:
    """Whether at least three shards and half the fleet failed within the last ``window_s`` and still fail."""
    since_s = _now(state, now_s) - state.policy.window_s
    failed = _where(state, lambda record: _fails(record) and (record.failed_at_s or 0.0) >= since_s)
    num_shards = sum(state.counts) - state.counts[ShardState.RETIRED]
    if len(failed) < 3 or 2 * len(failed) < num_shards:
        return None
    return CorrelatedFailure(failed, num_shards, state.policy.window_s)


def snapshot(state: LedgerState) -> dict[str, Any]:
    """Everything an operator may want to see, as plain data that goes into JSON."""
    refits = state.refits
    return {
        "time_s": state.now_s,
        "epoch": refits.epoch,
        "coordinator_incarnation": refits.coordinator_incarnation,
        "landed_version": refits.landed_version,
        "refit": None if refits.open is None else _refit_view(refits.open),
        "counts": dict(zip(_NAMES, state.counts, strict=True)),
        "shards": [_shard_view(record) for record in sorted(state.shards.values(), key=_index)],
        "history": [_change_view(change) for change in state.history],
        "rejections": [_rejection_view(rejection) for rejection in state.rejections],
        "num_rejected": state.rejections.total,
    }


def _where(state: LedgerState, wanted: Callable[[ShardRecord], bool]) -> tuple[ShardId, ...]:
    return tuple(sorted((record.id for record in state.shards.values() if wanted(record)), key=_seat))


def _in_states(state: LedgerState, states: Collection[ShardState]) -> tuple[ShardId, ...]:
    return _where(state, lambda record: record.state in states)


def _seat(shard: ShardId) -> int:
    return shard.index


def _index(record: ShardRecord) -> int:
    return record.id.index


def _now(state: LedgerState, now_s: float | None) -> float:
    return state.now_s if now_s is None else max(now_s, state.now_s)


def _is_recent(state: LedgerState, since_s: float, now_s: float | None) -> bool:
    return _now(state, now_s) - since_s <= state.policy.coordinator_s


def _fails(record: ShardRecord) -> bool:
    if record.state is ShardState.RETIRED or record.failed_at_s is None:
        return False
    return record.state in ABSENT or record.probe_failures > 0 or record.request_failures > 0


def _census(state: LedgerState) -> str:
    return ", ".join(f"{count} {name}" for name, count in zip(_NAMES, state.counts, strict=True) if count)


def _refit_view(refit: OpenRefit) -> dict[str, Any]:
    return {
        "epoch": refit.epoch,
        "version": refit.version,
        "attempts": refit.attempts,
        "commit": refit.commit,
        "opened_s": refit.opened_s,
        "participants": [str(shard) for shard in sorted(refit.participants, key=_seat)],
    }


def _shard_view(record: ShardRecord) -> dict[str, Any]:
    """Unpacked at once: a fleet has thousands, and a look into a named tuple costs as much as an entry here."""
    (shard, state, since_s, reason, width, node, version, _, probes, requests, _, _, _,
     lease_until_s, is_draining, restarts_charged, _) = record  # fmt: skip
    return {
        "index": shard.index,
        "incarnation": shard.incarnation,
        "state": _NAMES[state],
        "since_s": since_s,
        "reason": reason,
        "version": version,
        "width": width,
        "node": node,
        "probe_failures": probes,
        "request_failures": requests,
        "lease_until_s": lease_until_s,
        "is_draining": is_draining,
        "restarts_charged": restarts_charged,
    }


def _change_view(change: Change) -> dict[str, Any]:
    return {
        "time_s": change.time_s,
        "shard": str(change.shard),
        "before": None if change.before is None else _NAMES[change.before],
        "after": _NAMES[change.after],
        "cause": change.cause,
        "evidence": change.evidence,
        "writer": change.writer,
    }


def _rejection_view(rejection: Rejection) -> dict[str, Any]:
    return {
        "time_s": rejection.time_s,
        "event": rejection.event,
        "subject": rejection.subject,
        "reason": rejection.reason,
        "writer": rejection.writer,
    }
