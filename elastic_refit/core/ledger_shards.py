"""The rules for events about one shard: each reads streaks, windows, leases and incarnations, and names an input.

What must never happen here: a liveness answer that touches the request streak; a lease that hides an error answer; a
word about one incarnation that is taken for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from elastic_refit.core import events as ev
from elastic_refit.core.ledger_draft import Draft, Refusal, Step
from elastic_refit.core.ledger_state import LedgerPolicy, ShardRecord
from elastic_refit.core.ledger_table import Input, ShardState

__all__ = ["obey", "restarts_left", "streak_input"]

_OBSERVED: Final = Step(Input.OBSERVED, None)
"""What most events come to: it is made once."""

Rule = Callable[[Draft, ShardRecord, Any], Step | Refusal]

_OBSERVATIONS: Final = (ev.ProbeOk, ev.ProbeFailed, ev.RequestSucceeded, ev.RequestFailed, ev.ActorDied)
"""What is seen from outside may come late without anybody having done wrong."""


def obey(draft: Draft, event: ev.ShardEvent) -> Refusal | None:
    """Apply ``event`` to ``draft``, or say why not."""
    shard = event.shard
    known = draft.shards.get(shard.index)
    if isinstance(event, ev.Registered):
        return _registered(draft, known, event)
    if known is None:
        return Refusal(f"{shard} was never registered", is_illegal=True)
    if not isinstance(event, ev.Restarting):
        if shard.incarnation > known.id.incarnation:
            return Refusal(f"{shard} is yet to come: {known.id} holds the seat", is_illegal=True)
        if shard.incarnation < known.id.incarnation:
            reason = f"{shard} is gone: {known.id} holds the seat"
            return Refusal(reason, is_illegal=not isinstance(event, _OBSERVATIONS))
    step = _RULES[type(event)](draft, known, event)
    return step if isinstance(step, Refusal) else draft.take(known, step)


def streak_input(policy: LedgerPolicy, record: ShardRecord) -> Input:
    """What the two streaks say together, short of death."""
    in_doubt = (
        record.request_failures >= policy.suspect_after_requests or record.probe_failures >= policy.suspect_after_probes
    )
    return Input.DOUBTED if in_doubt else Input.CLEARED


def restarts_left(policy: LedgerPolicy, record: ShardRecord, now_s: float) -> int:
    """Charged restarts that are left to this seat; a long HEALTHY stretch gives all of them back."""
    is_refilled = record.state is ShardState.HEALTHY and now_s - record.since_s >= policy.restart_refill_s
    return policy.restart_budget - (0 if is_refilled else record.restarts_charged)


def _registered(draft: Draft, known: ShardRecord | None, event: ev.Registered) -> Refusal | None:
    if known is not None and known.id == event.shard and known.state is not ShardState.RETIRED:
        return Refusal(f"{event.shard} is registered already", is_illegal=False)
    if known is not None:
        return Refusal(f"the seat of {event.shard} is taken by {known.id}, {known.state.name}", is_illegal=True)
    if event.shard.index < 0 or event.shard.incarnation < 0 or event.width < 1:
        return Refusal(f"{event.shard} with width {event.width} is no shard", is_illegal=True)
    record = ShardRecord(event.shard, ShardState.STALE, draft.now_s, "Registered", width=event.width, node=event.node)
    draft.admit(record, "Registered")
    return None


def _probe_ok(draft: Draft, known: ShardRecord, event: ev.ProbeOk) -> Step:
    if not known.probe_failures and known.lease_since_s is None:
        return _OBSERVED
    record = known._replace(probe_failures=0, lease_since_s=None)
    return Step(streak_input(draft.policy, record), record, "ProbeOk")


def _probe_failed(draft: Draft, known: ShardRecord, event: ev.ProbeFailed) -> Step | Refusal:
    if event.kind == "timeout" and draft.now_s < known.lease_until_s:
        return Refusal(f"{known.id} holds a lease", is_illegal=False)
    failures = known.probe_failures + 1
    record = known._replace(probe_failures=failures, failed_at_s=draft.now_s)
    evidence = f"{failures} liveness probes failed in a row, last: {event.kind} {event.error}".rstrip()
    if failures >= draft.policy.dead_after_probes and not draft.refit_holds_deaths:
        return Step(Input.GIVEN_UP, record._replace(is_death_charged=True), "ProbeFailed", evidence)
    return Step(streak_input(draft.policy, record), record, "ProbeFailed", evidence)


def _request_succeeded(draft: Draft, known: ShardRecord, event: ev.RequestSucceeded) -> Step:
    if not known.request_failures and known.lease_since_s is None:
        return _OBSERVED
    record = known._replace(request_failures=0, lease_since_s=None)
    return Step(streak_input(draft.policy, record), record, "RequestSucceeded")


def _request_failed(draft: Draft, known: ShardRecord, event: ev.RequestFailed) -> Step | Refusal:
    if event.fault == "request":
        return Refusal(f"the request was at fault, not {known.id}", is_illegal=False)
    if known.request_failures and draft.now_s - known.request_window_s < draft.policy.window_s:
        return Refusal(f"one outage of {known.id} is one observation in {draft.policy.window_s} s", is_illegal=False)
    failures = known.request_failures + 1
    record = known._replace(request_failures=failures, request_window_s=draft.now_s, failed_at_s=draft.now_s)
    evidence = f"requests failed in {failures} windows without one that succeeded, last: {event.error}"
    if failures >= draft.policy.dead_after_requests and not draft.refit_holds_deaths:
        return Step(Input.GIVEN_UP, record._replace(is_death_charged=True), "RequestFailed", evidence)
    return Step(streak_input(draft.policy, record), record, "RequestFailed", evidence)


def _actor_died(draft: Draft, known: ShardRecord, event: ev.ActorDied) -> Step:
    record = known._replace(failed_at_s=draft.now_s, is_death_charged=event.charged)
    return Step(Input.DIED, record, "ActorDied", event.reason)


def _condemned(draft: Draft, known: ShardRecord, event: ev.Condemned) -> Step | Refusal:
    if not event.rule.strip() or not event.evidence.strip():
        return Refusal(f"{known.id} cannot be condemned without a rule and evidence", is_illegal=True)
    record = known
    if known.state is not ShardState.DEAD:
        record = known._replace(failed_at_s=draft.now_s, is_death_charged=True)
    return Step(Input.CONDEMNED, record, f"Condemned by rule {event.rule}", event.evidence)


def _restarting(draft: Draft, known: ShardRecord, event: ev.Restarting) -> Step | Refusal:
    if event.shard.incarnation != known.id.incarnation + 1:
        return Refusal(f"{event.shard} does not succeed {known.id}", is_illegal=True)
    if known.is_draining:
        return Refusal(f"{known.id} was drained and is not replaced", is_illegal=True)
    charge = int(known.is_death_charged)
    if charge > restarts_left(draft.policy, known, draft.now_s):
        return Refusal(f"the {draft.policy.restart_budget} restarts of {known.id} are spent", is_illegal=True)
    successor = ShardRecord(
        event.shard,
        known.state,
        draft.now_s,
        width=known.width,
        node=event.node,
        failed_at_s=known.failed_at_s,
        restarts_charged=known.restarts_charged + charge,
    )
    return Step(Input.RESTART_BEGUN, successor, "Restarting")


def _loaded(draft: Draft, known: ShardRecord, event: ev.Loaded) -> Step:
    return Step(Input.LOADED, known._replace(lease_since_s=None, lease_until_s=0.0), "Loaded")


def _restart_failed(draft: Draft, known: ShardRecord, event: ev.RestartFailed) -> Step:
    record = known._replace(failed_at_s=draft.now_s, is_death_charged=True)
    return Step(Input.RESTART_FAILED, record, "RestartFailed", event.reason)


def _leased(draft: Draft, known: ShardRecord, event: ev.Leased) -> Step | Refusal:
    if not (math.isfinite(event.duration_s) and event.duration_s > 0):
        return Refusal(f"a lease of {event.duration_s} s is none", is_illegal=True)
    since_s = draft.now_s if known.lease_since_s is None else known.lease_since_s
    until_s = min(draft.now_s + event.duration_s, since_s + draft.policy.lease_cap_s)
    if until_s <= draft.now_s:
        return Refusal(
            f"{known.id} has not answered for the {draft.policy.lease_cap_s} s of all leases", is_illegal=True
        )
    record = known._replace(lease_since_s=since_s, lease_until_s=max(until_s, known.lease_until_s))
    return Step(Input.LEASED, record, "Leased", event.reason)


def _drained(draft: Draft, known: ShardRecord, event: ev.Drained) -> Step:
    return Step(Input.DRAINED, known._replace(is_draining=True), "Drained", event.reason)


def _retired(draft: Draft, known: ShardRecord, event: ev.Retired) -> Step:
    return Step(Input.RETIRED, known, "Retired", event.reason)


def _committed(draft: Draft, known: ShardRecord, event: ev.ShardCommitted) -> Step | Refusal:
    refit = draft.refits.open
    if refit is None or (event.epoch, event.version) != (refit.epoch, refit.version):
        return Refusal(f"no refit of version {event.version} is open in epoch {event.epoch}", is_illegal=True)
    if draft.refits.epoch != refit.epoch:
        return Refusal(f"epoch {event.epoch} is over: epoch {draft.refits.epoch} was opened", is_illegal=True)
    if known.id not in refit.participants:
        return Refusal(f"{known.id} is no participant of version {event.version}", is_illegal=True)
    if known.version is None and known.weights_epoch >= event.epoch:
        return Refusal(f"{known.id} holds a part of what was sent in epoch {known.weights_epoch}", is_illegal=True)
    return Step(Input.COMMITTED, known._replace(version=event.version, weights_epoch=event.epoch), "ShardCommitted")


def _partial(draft: Draft, known: ShardRecord, event: ev.WeightsPartial) -> Step | Refusal:
    if event.epoch > draft.refits.epoch:
        return Refusal(f"epoch {event.epoch} was never opened", is_illegal=True)
    if event.epoch < known.weights_epoch:
        return Refusal(f"{known.id} has taken weights in epoch {known.weights_epoch} since", is_illegal=True)
    evidence = f"applied through bucket {event.applied_through} of version {event.version}"
    return Step(Input.PARTIAL, known._replace(version=None, weights_epoch=event.epoch), "WeightsPartial", evidence)


_RULES: Final[dict[type[ev.ShardEvent], Rule]] = {
    ev.ProbeOk: _probe_ok,
    ev.ProbeFailed: _probe_failed,
    ev.RequestSucceeded: _request_succeeded,
    ev.RequestFailed: _request_failed,
    ev.ActorDied: _actor_died,
    ev.Condemned: _condemned,
    ev.Restarting: _restarting,
    ev.Loaded: _loaded,
    ev.RestartFailed: _restart_failed,
    ev.Leased: _leased,
    ev.Drained: _drained,
    ev.Retired: _retired,
    ev.ShardCommitted: _committed,
    ev.WeightsPartial: _partial,
}
