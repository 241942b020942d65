"""A fleet that answers the refit protocol as it is told, and a ledger that hears what the protocol records.

Nothing here waits: an answer that can be given is given, in the order in which it was asked for; when all that is left
is silence, the deadline of the round passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from elastic_refit.core import events as ev
from elastic_refit.core import ledger_queries
from elastic_refit.core.events import CommitMode
from elastic_refit.core.evidence import Beacon, Testimony
from elastic_refit.core.ids import Member, ProcessId, ShardId, TrainerId
from elastic_refit.core.ledger import fold, new_ledger
from elastic_refit.core.ledger_state import LedgerPolicy, LedgerState
from elastic_refit.core.manifest import TensorSpec, build_manifest
from elastic_refit.core.messages import (
    Answer,
    Committed,
    Done,
    Fault,
    Fenced,
    Op,
    Pong,
    Prepared,
    Ready,
    Received,
    Sent,
    Settled,
    SettleOrder,
    TransferOrder,
)
from elastic_refit.core.refit import step
from elastic_refit.core.refit_state import (
    Answered,
    Call,
    Command,
    Died,
    Ended,
    Event,
    Finish,
    Fleet,
    Ignored,
    Landed,
    Record,
    RefitPolicy,
    RefitRequested,
    RefitState,
    RoundTimedOut,
    StartTimer,
)
from elastic_refit.core.refit_turn import ATTEMPT
from tests.chains import LIMITS

NUM_BUCKETS = 6
MANIFEST = build_manifest([TensorSpec("w", (96,), "uint8", 96)], bucket_bytes=16)
DIGESTS = tuple(range(100, 100 + NUM_BUCKETS))
T0, T1, S0, S1, S2, S3 = TrainerId(0), TrainerId(1), ShardId(0), ShardId(1), ShardId(2), ShardId(3)

Kind = Literal["kill", "kill after all", "freeze", "wedge", "raise", "corrupt"]
IN_COLLECTIVE = (Op.JOIN, Op.TRANSFER)
OVERDUE_S = LIMITS.pause_s + 1


@dataclass
class Strike:
    """``kind`` strikes ``member`` when it is asked to ``op``, for the ``nth`` time since it was planned."""

    kind: Kind
    member: Member
    op: Op
    nth: int = 1


@dataclass
class FakeFleet:
    """``reached``: the highest bucket that everybody has when the chain stops, or, in the slowest rank of each member,
    ``slowest_rank``."""

    num_trainers: int = 2
    num_shards: int = 3
    max_recoveries: int = 1
    min_healthy: int = 1
    reached: int = 1
    slowest_rank: int | None = None
    suspects: frozenset[ShardId] = frozenset()
    late_s: float = 0.0
    """How late the observer is whenever a deadline passes."""
    hung_s: float = OVERDUE_S
    """How long a wedged member says that it has not moved."""
    cut: tuple[int, int] | None = None
    """Two neighbouring ranks between which no bytes pass, until the group is built anew."""
    commit: CommitMode = "streamed"
    """``staged``: a shard keeps what it serves until it commits."""
    corrupted_from: dict[int, ShardId] = field(default_factory=dict)
    """By number of the transfer, the first shard behind a link that alters bytes."""

    def __post_init__(self) -> None:
        policy = RefitPolicy(LIMITS, self.max_recoveries, self.min_healthy, commit=self.commit)
        self.state = RefitState(policy)
        self.ledger: LedgerState = new_ledger(LedgerPolicy())
        self.commands: list[Command] = []
        self.outcome: Landed | Ended | None = None
        self.dead: set[Member] = set()
        self.frozen: set[Member] = set()
        self.wedged: set[Member] = set()
        self.raised: set[Member] = set()
        self.corrupt: set[Member] = set()
        self.unreachable: set[Member] = set()
        self.through: dict[Member, int] = {}
        self.serving: dict[Member, int | None] = {}
        self.num_transfers = self._num_told = 0
        self._faults: list[Strike] = []
        self._calls: list[Call] = []
        self.timer = StartTimer(-1, Op.PROBE, 0.0)
        self._attempt = Op.PREPARE
        self._after_all: Member | None = None
        for index in range(self.num_shards):
            self.tell(ev.Registered(ShardId(index)))

    # -- what a test says

    def plan(self, kind: Kind, member: Member, op: Op, *, nth: int = 1) -> None:
        self._faults.append(Strike(kind, member, op, nth))

    def refit(self, version: int) -> Landed | Ended:
        self.begin(version)
        return self.finish()

    def begin(self, version: int) -> None:
        """Ask for a refit over everybody whom the ledger does not hold for absent."""
        present = frozenset(ledger_queries.joinable(self.ledger))
        self.commands.clear()
        self._calls.clear()
        self.through.clear()
        self.outcome, self.num_transfers = None, 0
        fleet = Fleet(self.num_trainers, (1,) * self.num_shards, present, self.suspects)
        self.send(RefitRequested(version, fleet))

    def finish(self) -> Landed | Ended:
        while self.outcome is None:
            self.advance()
        return self.outcome

    def advance(self) -> bool:
        """Let the next thing happen; True if it is a deadline."""
        event = self._next_event()
        self.send(event)
        return isinstance(event, RoundTimedOut)

    def answer(self, member: Member) -> None:
        """Let ``member`` answer next."""
        call = next(call for call in self._calls if call.member == member)
        event = self._answer(call)
        assert event is not None, f"{member} does not answer"
        self._calls.remove(call)
        self.send(event)

    def send(self, event: Event) -> tuple[Command, ...]:
        self.state, commands = step(self.state, event)
        for command in commands:
            self._obey(command)
        self.commands += commands
        return commands

    # -- what a test asks

    def recorded(self, kind: type[ev.Event]) -> list[ev.Event]:
        return [each.event for each in self.commands if isinstance(each, Record) and isinstance(each.event, kind)]

    def called(self, op: Op) -> list[Member]:
        return [each.member for each in self.commands if isinstance(each, Call) and each.op is op]

    @property
    def op(self) -> Op:
        """The round that is going on."""
        assert self.state.running is not None, "no refit is in progress"
        return self.state.running.round.op

    @property
    def rebuilds(self) -> int:
        return len(self.recorded(ev.EpochOpened))

    @property
    def start_buckets(self) -> list[int]:
        """Where each attempt began."""
        orders = [each.order for each in self.commands if isinstance(each, Call) and each.member == T0]
        return [order.start_bucket for order in orders if isinstance(order, TransferOrder)]

    # -- what the fleet does

    def _obey(self, command: Command) -> None:
        match command:
            case Record():
                self.tell(command.event)
            case Call():
                self._receive(command)
            case StartTimer():
                self.timer = command
            case Finish():
                self.outcome = command.outcome
            case Ignored():
                pass

    def tell(self, event: ev.Event) -> None:
        """Tell the ledger; it accepts whatever a correct protocol tells it."""
        self._num_told += 1
        self.ledger, ack = fold(self.ledger, ev.Entry("test", 0, self._num_told, 0.0, event))
        assert ack.status in ("applied", "ignored"), f"{event}: {ack}"

    def _receive(self, call: Call) -> None:
        self._calls.append(call)
        if call.op in ATTEMPT and call.op is not self._attempt:
            self._attempt = call.op
            self.raised.clear()
        if call.op is Op.TRANSFER and call.member == T0:
            self.num_transfers += 1
        if call.op is Op.PREPARE:
            self.cut = None
        for fault in self._faults:
            if (fault.member, fault.op) == (call.member, call.op):
                fault.nth -= 1
                if fault.nth == 0:
                    self._strike(fault)

    def _strike(self, fault: Strike) -> None:
        struck = {
            "kill": self.dead,
            "kill after all": self.dead,
            "freeze": self.frozen,
            "wedge": self.wedged,
            "raise": self.raised,
            "corrupt": self.corrupt,
        }[fault.kind]
        struck.add(fault.member)
        if fault.kind == "kill after all":
            self._after_all = fault.member

    def _next_event(self) -> Event:
        for is_dead in (False, True):  # the victims of a death report before it is noticed
            for call in self._calls:
                event = self._answer(call) if (call.member in self.dead) is is_dead else None
                if event is not None:
                    self._calls.remove(call)
                    return event
        return RoundTimedOut(self.timer.token, self.late_s)

    def _answer(self, call: Call) -> Event | None:
        member, op = call.member, call.op
        if op is Op.FENCE:
            if member in self.unreachable:
                return None
            self.dead.add(member)
            return self._says(call, Fenced("gone"))
        if member in self.dead:
            return Died(member, "SIGKILL")
        if member in self.frozen or (member in self.wedged and op in (*ATTEMPT, Op.SETTLE)):
            return None
        if op in ATTEMPT:
            answer = self._work(call)
        elif op is Op.SETTLE:
            answer = self._settle(call)
        else:
            answer = Pong(self._beacon(member), (ProcessId("node", _pid(member), 7, _pid(member)),))
        return None if answer is None else self._says(call, answer)

    @staticmethod
    def _says(call: Call, answer: Answer) -> Answered:
        return Answered(call.op, call.epoch, call.member, answer, call.token)

    def _work(self, call: Call) -> Answer | None:
        member, op = call.member, call.op
        if member in self.raised:
            return Fault("ValueError/1", "ValueError: no such tensor")
        group = self._group()
        if op in IN_COLLECTIVE:
            gone = [each for each in group if each in self.dead | self.raised and each != self._after_all]
            if gone:
                return Testimony("peer_lost", group.index(gone[0]), "the connection ended")
            if self.frozen & set(group) or self.wedged & set(group) or (self.cut and op is Op.TRANSFER):
                return None
        match op:
            case Op.PREPARE:
                return Prepared((f"{member}",), (), (ProcessId("node", _pid(member), 7, _pid(member)),))
            case Op.READY if isinstance(member, TrainerId):
                return Ready(MANIFEST if member == T0 else None)
            case Op.TRANSFER:
                return self._transfer(member)
            case Op.COMMIT:
                self.serving[member] = self._version
                return Committed(self._version)
            case _:
                return Done()

    def _transfer(self, member: Member) -> Answer:
        if isinstance(member, TrainerId):
            return Sent(DIGESTS if member == T0 else ())
        self._apply(member, NUM_BUCKETS - 1)
        behind = self.corrupted_from.get(self.num_transfers)
        is_wrong = member in self.corrupt or (behind is not None and member.index >= behind.index)
        return Received((*DIGESTS[:-1], 0) if is_wrong else DIGESTS)

    def _apply(self, member: Member, through: int) -> None:
        self.through[member] = max(through, self.through.get(member, -1))
        if through >= 0 and self.commit == "streamed":
            self.serving[member] = None

    def _settle(self, call: Call) -> Answer:
        member, order = call.member, call.order
        assert isinstance(order, SettleOrder)
        if self._attempt is Op.TRANSFER and isinstance(member, ShardId) and self.serving.get(member) != self._version:
            self._apply(member, self.reached)
        through, is_beside = self.through.get(member, -1), self.commit == "staged"
        slowest = through if self.slowest_rank is None else self.slowest_rank
        settled = Settled(slowest, 0.01, self.serving.get(member), is_beside, furthest=through)
        if order.roll_back:
            self.through[member] = -1
        return settled

    def _beacon(self, member: Member) -> Beacon:
        """As a chain shows it that stopped with bucket ``reached`` + 1 under way; before it, all is done so far."""
        epoch, last = self.state.epoch, NUM_BUCKETS - 1
        begun, stopped = {
            Op.TRANSFER: (self.reached + 1, self.reached),
            Op.COMMIT: (last, last),
            Op.PREPARE: (-2, -2),
        }.get(self._attempt, (-1, -1))
        if member in self.wedged:
            phase = {Op.TRANSFER: "applying", Op.COMMIT: "finalizing", Op.PREPARE: "preparing"}.get(self._attempt)
            pause = "packing" if isinstance(member, TrainerId) else "pausing"
            return Beacon(epoch, stopped, stopped, stopped, "engine", None, phase or pause, self.hung_s)
        if self._attempt is not Op.TRANSFER:
            return Beacon(epoch, begun, stopped, stopped, phase="done")
        is_upstream = self.cut is not None and self._group().index(member) <= self.cut[0]
        waiting: Literal["send", "recv"] = "send" if is_upstream else "recv"
        return Beacon(epoch, begun, stopped, stopped, waiting, None, "in_collective", 4.0)

    def _group(self) -> tuple[Member, ...]:
        run = self.state.running
        return run.membership.members if run is not None and run.membership is not None else ()

    @property
    def _version(self) -> int:
        assert self.state.running is not None, "no refit is in progress"
        return self.state.running.version


def _pid(member: Member) -> int:
    return 1000 * isinstance(member, ShardId) + member.index


def names(outcome: Landed | Ended) -> dict[str, int]:
    """Who is named, by which rule."""
    return {str(finding.member): finding.rule for finding in outcome.findings}
