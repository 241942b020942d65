"""Carries out the refit protocol with Ray: takes an event, steps, does what the commands say, waits for the next.

Everything is waited for in one place: answers, deaths and deadlines, so that none hides behind another. No decision
is made here. What must never happen: a command skipped, an answer processed after the deadline that it had met.
"""

from __future__ import annotations

import heapq
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from elastic_refit.actors.node_agent import Fences
from elastic_refit.control.host import ControlHost
from elastic_refit.control.stall import StallWatch
from elastic_refit.core.events import EpochOpened
from elastic_refit.core.events import Event as LedgerEvent
from elastic_refit.core.ids import Member
from elastic_refit.core.messages import Fault, FenceOrder, Op, Pong, Settled, SettleOrder
from elastic_refit.core.refit import step
from elastic_refit.core.refit_state import (
    Answered,
    Call,
    Command,
    Died,
    Ended,
    Event,
    Finish,
    Ignored,
    Landed,
    Record,
    RefitState,
    RoundTimedOut,
    StartTimer,
)
from elastic_refit.incident import IncidentClock

__all__ = ["RefitShell"]

logger = logging.getLogger(__name__)

_ATTENDED = frozenset({Op.PROBE, Op.PING, Op.SETTLE})
"""Answered by control threads, whatever the refit's own thread is stuck in."""
_DRAIN = 64


@dataclass(frozen=True, slots=True)
class _Pending:
    op: Op
    epoch: int
    member: Member


class RefitShell:
    """One refit's loop. ``record`` tells the ledger and returns when it has it."""

    def __init__(
        self,
        state: RefitState,
        members: Mapping[Member, ray.actor.ActorHandle],
        *,
        record: Callable[[LedgerEvent], None],
        fences: Fences,
        channel: ControlHost,
    ) -> None:
        self.state = state
        self.fences = fences
        self.clock = IncidentClock()
        self._members = members
        self._record = record
        self._channel = channel
        self._stall = StallWatch(channel.heard, state.policy.deadlines)
        self._pending: dict[ray.ObjectRef, _Pending] = {}
        self._timers: list[tuple[float, int]] = []
        self._events: deque[Event] = deque()
        self._secrets: dict[int, bytes] = {}
        self._outcome: Landed | Ended | None = None

    def run(self, event: Event) -> Landed | Ended:
        """Take the protocol from ``event`` to its end. Bounded by the protocol's own deadlines."""
        self._events.append(event)
        while self._outcome is None:
            while self._events and self._outcome is None:
                self._step(self._events.popleft())
            if self._outcome is None:
                self._wait()
        return self._outcome

    def _step(self, event: Event) -> None:
        before = self.state.running
        self.state, commands = step(self.state, event)
        now = time.monotonic()
        self.clock.observe(before, self.state.running, now)
        self._stall.follow(self.state.running, now)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Call(order=FenceOrder()):
                self._fence(command)
            case Call(order=SettleOrder() as order):
                self._channel.order_abort(order.epoch, order.reason)
                self._call(command)
            case Call():
                self._call(command)
            case StartTimer():
                heapq.heappush(self._timers, (time.monotonic() + command.seconds, command.token))
            case Record():
                self._record(command.event)
                if isinstance(command.event, EpochOpened):
                    self._channel.open_epoch(command.event.epoch)
            case Finish():
                self._outcome = command.outcome
            case Ignored():
                logger.debug("event_ignored", extra={"reason": command.reason})

    def _call(self, call: Call) -> None:
        handle = self._members[call.member]
        name = f"{call.op}[e{call.epoch}] {call.member}"
        if call.op in _ATTENDED:
            ref = handle.attend.options(name=name).remote(call.order)
        else:
            secret = self._secrets.setdefault(call.epoch, secrets.token_bytes(32)) if call.op is Op.JOIN else b""
            ref = handle.work.options(name=name).remote(call.order, secret)
        self._pending[ref] = _Pending(call.op, call.epoch, call.member)

    def _fence(self, call: Call) -> None:
        assert isinstance(call.order, FenceOrder)
        limit_s = self.state.policy.round_s(Op.FENCE) / 2
        calls = self.fences.begin(call.member, call.order, timeout_s=limit_s)
        self._pending.update(dict.fromkeys(calls, _Pending(Op.FENCE, call.epoch, call.member)))
        if not calls:
            self._events.append(Answered(Op.FENCE, call.epoch, call.member, self.fences.result(call.member)))

    def _wait(self) -> None:
        """Add the next events: every answer that is there comes before a deadline that may have passed meanwhile."""
        now = time.monotonic()
        due = self._timers[0][0] if self._timers else now
        look_at = self._stall.due(self.state.epoch)
        refs = list(self._pending)
        patience_s = max(0.0, (due if look_at is None else min(due, look_at)) - now)
        ready, _ = ray.wait(refs, num_returns=1, timeout=patience_s) if refs else ([], refs)
        if ready:
            ready, _ = ray.wait(refs, num_returns=min(len(refs), _DRAIN), timeout=0)
            self._events.extend(event for ref in ready if (event := self._event_of(ref)) is not None)
        elif self._timers and time.monotonic() >= due:
            _, token = heapq.heappop(self._timers)
            now = time.monotonic()
            still_s = self._stall.still_s(self.state.epoch, now)
            self._events.append(RoundTimedOut(token, now - due, self._stall.beacons(self._widths(), now), still_s))
        elif look_at is not None and look_at <= now:
            self._events.append(self._stall.look(self.state.epoch, now))

    def _widths(self) -> dict[Member, int]:
        running = self.state.running
        group = None if running is None else running.membership
        return {} if group is None else {member: len(group.ranks(member)) for member in group.members}

    def _event_of(self, ref: ray.ObjectRef) -> Event | None:
        call = self._pending.pop(ref)
        if call.op is Op.FENCE:
            fenced = self.fences.take(call.member, ref)
            return None if fenced is None else Answered(call.op, call.epoch, call.member, fenced)
        try:
            answer = ray.get(ref)
        except ActorDiedError:
            return Died(call.member, "Ray reported its process gone")
        except RayTaskError as error:
            sentence = str(error).strip().splitlines()[-1]
            return Answered(call.op, call.epoch, call.member, Fault(type(error).__name__, sentence))
        except RayError as error:
            return Died(call.member, f"Ray cannot reach it: {type(error).__name__}")
        self._measure(answer)
        return Answered(call.op, call.epoch, call.member, answer)

    def _measure(self, answer: object) -> None:
        if isinstance(answer, Pong):
            seen = time.monotonic() - answer.beacon.tick_age_s
            self.clock.last_progress = max(seen, self.clock.last_progress or seen)
        elif isinstance(answer, Settled):
            self.clock.released_s = max(self.clock.released_s, answer.released_s)
