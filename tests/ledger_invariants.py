"""What holds for every ledger after every entry, whatever was sent; the search and the property tests share it."""

from __future__ import annotations

from elastic_refit.core.events import Condemned, Entry, ProbeFailed, ProbeOk, RefitLanded
from elastic_refit.core.ledger import Ack, fold
from elastic_refit.core.ledger_state import LedgerState, ShardRecord
from elastic_refit.core.ledger_table import ABSENT, SERVING, ShardState

__all__ = ["checked_fold"]


def checked_fold(before: LedgerState, entry: Entry) -> tuple[LedgerState, Ack]:
    """``fold``, and an AssertionError if the step or the state that it leads to breaks an invariant."""
    after, ack = fold(before, entry)
    again, second = fold(after, entry)
    assert again is after and second.status == "duplicate", "an entry applied twice"
    if ack.status == "duplicate":
        assert after is before, "a duplicate changed something"
        return after, ack
    records = tuple(after.shards.values())
    _check_fleet(before, after, records, ack)
    if isinstance(entry.event, Condemned) and ack.status == "applied":
        assert entry.event.rule.strip() and entry.event.evidence.strip(), "condemned without evidence"
    for record in records:
        _check_record(record, after)
        known = before.shards.get(record.id.index)
        if known is not None and known is not record:
            _check_step(known, record, before, entry)
    return after, ack


def _check_fleet(before: LedgerState, after: LedgerState, records: tuple[ShardRecord, ...], ack: Ack) -> None:
    assert after.now_s >= before.now_s, "time ran backwards"
    assert after.refits.epoch >= before.refits.epoch, "an epoch went down"
    assert after.refits.coordinator_incarnation >= before.refits.coordinator_incarnation
    for name in ("highest_version", "landed_version"):
        old, new = getattr(before.refits, name), getattr(after.refits, name)
        assert old is None or new >= old, f"{name} went backwards"
    states = [record.state for record in records]
    assert after.counts == tuple(states.count(state) for state in ShardState), "the counts are wrong"
    if ack.status != "applied":
        assert after.shards is before.shards and after.refits is before.refits, f"{ack.status} changed something"
    if ack.status == "rejected":
        assert ack.reason and after.rejections.total == before.rejections.total + 1


def _check_record(record: ShardRecord, state: LedgerState) -> None:
    policy = state.policy
    in_doubt = (
        record.probe_failures >= policy.suspect_after_probes or record.request_failures >= policy.suspect_after_requests
    )
    if record.state in SERVING:
        assert record.version is not None, "serving without a version of its own incarnation"
        assert state.refits.landed_version is not None, "serving before any refit landed"
        assert in_doubt == (record.state is ShardState.SUSPECT), "the state contradicts the streaks"
        assert not record.is_draining, "a drained shard serves"
    if record.state is ShardState.RESTARTING:
        assert record.version is None, "a successor holds weights before it has loaded"
    assert record.lease_until_s <= state.now_s + policy.lease_cap_s, "a lease beyond its cap"
    assert 0 <= record.restarts_charged <= policy.restart_budget


def _check_step(known: ShardRecord, record: ShardRecord, before: LedgerState, entry: Entry) -> None:
    event = entry.event
    assert record.id >= known.id, "an older incarnation took the seat"
    assert known.state is not ShardState.RETIRED, "something resurrected RETIRED"
    if record.state in SERVING and known.state not in SERVING:
        assert isinstance(event, RefitLanded), "promoted by something else than a landed refit"
        refit = before.refits.open
        assert refit is not None and refit.epoch == before.refits.epoch
        assert record.id in refit.participants, "a non-participant was promoted"
        assert record.version == refit.version == event.version, "promoted without its commit"
    if record.id != known.id:
        assert known.state is ShardState.DEAD and record.state is ShardState.RESTARTING
        assert record.probe_failures == record.request_failures == 0, "a successor inherited a streak"
    elif isinstance(event, ProbeOk | ProbeFailed):
        assert record.request_failures == known.request_failures, "liveness touched the request streak"
    if record.id == known.id and record.version is not None and known.version is not None:
        assert record.version >= known.version, "a version went backwards"
    if record.state is ShardState.DEAD and known.state is not ShardState.DEAD:
        assert record.reason, "a death without its evidence"
    if known.state in ABSENT and record.id == known.id:
        assert record.state in (*ABSENT, ShardState.STALE), "absent shards come back as STALE"
