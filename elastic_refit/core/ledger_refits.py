"""The rules for events about the whole group: epochs and refits.

What must never happen here: an epoch or a version that goes down; a landed refit that promotes anybody who was not in
its frozen set or did not commit.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_refit.core.events import EpochOpened, FleetEvent, RefitEnded, RefitLanded, RefitOpened
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_draft import Draft, Refusal, Step
from elastic_refit.core.ledger_shards import streak_input
from elastic_refit.core.ledger_state import OpenRefit, ShardRecord
from elastic_refit.core.ledger_table import ABSENT, Input

__all__ = ["obey"]


def obey(draft: Draft, event: FleetEvent) -> Refusal | None:
    """Apply ``event`` to ``draft``, or say why not. Every refusal here is of something illegal."""
    match event:
        case EpochOpened():
            problem = _open_epoch(draft, event)
        case RefitOpened():
            problem = _open_refit(draft, event)
        case RefitLanded():
            problem = _land(draft, event)
        case RefitEnded():
            problem = _end(draft, event)
    return Refusal(problem, is_illegal=True) if problem else None


def _open_epoch(draft: Draft, event: EpochOpened) -> str | None:
    book = draft.refits
    if event.coordinator_incarnation < book.coordinator_incarnation:
        return f"coordinator {event.coordinator_incarnation} was replaced by {book.coordinator_incarnation}"
    if event.epoch <= book.epoch:
        return f"epochs only rise: {book.epoch} was opened"
    draft.refits = replace(book, epoch=event.epoch, coordinator_incarnation=event.coordinator_incarnation)
    return None


def _open_refit(draft: Draft, event: RefitOpened) -> str | None:
    book, running = draft.refits, draft.refits.open
    if event.epoch != book.epoch:
        return f"the open epoch is {book.epoch}, not {event.epoch}"
    if running is not None and running.epoch == event.epoch:
        return f"the refit of version {running.version} is still open in epoch {running.epoch}"
    if book.highest_version is not None and event.version < book.highest_version:
        return f"versions only rise: version {book.highest_version} was opened"
    problem = _unknown(draft, event.participants)
    if problem:
        return problem
    attempt = OpenRefit(
        event.epoch,
        event.version,
        frozenset(event.participants),
        event.commit,
        opened_s=draft.now_s,
    )
    if running is not None and running.version == event.version:
        attempt = replace(attempt, opened_s=running.opened_s, attempts=running.attempts + 1)
    draft.refits = replace(book, open=attempt, highest_version=event.version, unlanded_since_s=attempt.opened_s)
    return None


def _unknown(draft: Draft, participants: tuple[ShardId, ...]) -> str | None:
    """A participant may have died since it was planned, which the refit will find out; it must have existed."""
    if not participants:
        return "a refit has participants"
    for shard in sorted(participants):
        known = draft.shards.get(shard.index)
        if known is None or shard.incarnation > known.id.incarnation:
            return f"{shard} was never registered"
    return None


def _land(draft: Draft, event: RefitLanded) -> str | None:
    book, refit = draft.refits, draft.refits.open
    if refit is None or (event.epoch, event.version) != (refit.epoch, refit.version):
        return f"no refit of version {event.version} is open in epoch {event.epoch}"
    if book.epoch != refit.epoch:
        return f"epoch {event.epoch} is over: epoch {book.epoch} was opened"
    if not any(_holds(record, refit) and record.state not in ABSENT for record in draft.shards.values()):
        return f"nobody that is left has committed version {event.version}"
    for record in sorted(draft.shards.values(), key=_index):
        draft.take(record, _landing(draft, record, is_in=_holds(record, refit)))
    draft.refits = replace(book, open=None, landed_version=event.version, unlanded_since_s=None)
    return None


def _index(record: ShardRecord) -> int:
    return record.id.index


def _holds(record: ShardRecord, refit: OpenRefit) -> bool:
    return record.id in refit.participants and record.version == refit.version and not record.is_draining


def _landing(draft: Draft, record: ShardRecord, *, is_in: bool) -> Step:
    if not is_in:
        return Step(Input.LEFT_OUT, record, "RefitLanded", "it was not in the refit that landed, or did not commit it")
    in_doubt = streak_input(draft.policy, record) is Input.DOUBTED
    return Step(Input.LANDED_IN_DOUBT if in_doubt else Input.LANDED, record, "RefitLanded", f"version {record.version}")


def _end(draft: Draft, event: RefitEnded) -> str | None:
    book, refit = draft.refits, draft.refits.open
    if refit is None or event.version != refit.version or not refit.epoch <= event.epoch <= book.epoch:
        return f"no refit of version {event.version} is open in epoch {event.epoch}"
    draft.refits = replace(book, open=None, unlanded_since_s=draft.now_s)
    return None
