"""The refit's side of one process: the transport it was handed, the watchdog over it, and the gate before serving.

Lives in a trainer, or in the process that holds a shard's weights. Two kinds of threads call it: the *working* thread
carries out orders that may block in a collective (join, send, receive, commit); *control* threads ask and abort (ping,
prepare, settle) and never wait for the working thread longer than they say.

What must never happen here: an order of an epoch that is over carried out, a neighbour's death reported as one's own
fault, ``serving_version`` naming weights that are not whole.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from elastic_refit.beacon import ProgressRecorder
from elastic_refit.chaos.moment import Moment
from elastic_refit.communicators.base import GroupSpec
from elastic_refit.control.end import ControlEnd
from elastic_refit.control.setup import EndSetup
from elastic_refit.core.deadlines import Deadlines
from elastic_refit.core.evidence import Beacon, Testimony
from elastic_refit.core.ids import Member, ProcessId
from elastic_refit.core.manifest import differing_buckets
from elastic_refit.core.messages import (
    Answer,
    CommitOrder,
    Committed,
    Done,
    Fault,
    JoinOrder,
    PingOrder,
    Pong,
    Prepared,
    PrepareOrder,
    Ready,
    ReadyOrder,
    Received,
    Sent,
    Settled,
    SettleOrder,
    TransferOrder,
)
from elastic_refit.engines.base import WeightReceiver
from elastic_refit.errors import (
    CommunicatorAborted,
    CommunicatorError,
    DigestMismatch,
    PeerLost,
    PlanMismatch,
    StaleEpoch,
)
from elastic_refit.ranks import identities_in
from elastic_refit.stacks import asked_path, rung_path
from elastic_refit.transports.base import (
    Feed,
    ManifestKeeper,
    NamedTensors,
    OpenUpdate,
    Packing,
    PinnedVersion,
    RankContext,
    WeightSource,
    WeightTransport,
)
from elastic_refit.transports.packing import BucketUnpacker
from elastic_refit.watchdog import Armed, RefitAbortWatchdog, register_stack_dump_signal

__all__ = ["RefitParticipant"]

InWorker = Callable[[Callable[[WeightReceiver], None]], None]
"""Runs a function with the receiver where the weights are, as ``ShardEngine.in_worker`` does."""


class RefitParticipant:
    """One rank's part in refits, one refit at a time. A shard may have several, each in a process of its own."""

    def __init__(
        self,
        member: Member,
        transport: WeightTransport,
        *,
        deadlines: Deadlines,
        processes: Sequence[ProcessId] = (),
        reach: Callable[[Moment], None] | None = None,
        rank: int = 0,
    ) -> None:
        """``reach`` is called with every phase that a refit comes to in this process, on the thread that does.

        ``rank`` is this process' number among the member's ranks.
        """
        self.member = member
        self.serving_version: int | None = None
        """The version that this process holds whole; None before its first commit and inside an update."""
        self._rank = rank
        self._transport = transport
        self._deadlines = deadlines
        self._processes = tuple(processes)
        self._reach = reach
        self._watchdog = RefitAbortWatchdog()
        self._progress = ProgressRecorder()
        self._epoch = -1
        self._coordinator = -1
        self._manifests = ManifestKeeper()
        self._pinned: PinnedVersion | None = None
        self._update: OpenUpdate | None = None
        self._idle = threading.Condition()
        self._working = 0
        self._end: ControlEnd | None = None
        self._has_reported = True
        self._rung_path: Path | None = None

    def open_channel(self, setup: EndSetup) -> None:
        """Report to the control channel, and obey it, until ``close``."""
        self._end = ControlEnd(setup, read_beacon=self._report, obey=self._watchdog.order_abort)

    def cut_channel(self, is_cut: bool) -> None:
        """Let nothing through on the control channel, or everything again."""
        if self._end is not None:
            self._end.is_cut = is_cut

    def leave_stacks(self, folder: str | Path) -> None:
        """From now on this process leaves its stacks in ``folder``: when it is asked, and when it cannot be freed.

        For one participant of a process, once: the native timer and the signal are the process' own.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        register_stack_dump_signal(asked_path(folder, self.member, self._rank))
        self._rung_path = rung_path(folder, self.member, self._rank)

    # -- control threads

    def ping(self, order: PingOrder) -> Pong:
        """Answers at once, whatever the working thread does."""
        return Pong(self._progress.beacon(), self._processes)

    def settle(self, order: SettleOrder, in_worker: InWorker | None = None) -> Settled | Fault:
        """Break every call up to ``order.epoch``, wait until the working thread has left it, and say how far it came.

        Blocks at most ``settle_s``, and the time of a roll-back, which runs by ``in_worker`` where there is an engine.
        """
        began = time.monotonic()
        self._watchdog.order_abort(order.epoch, order.reason)
        self.abort(order.reason)
        self._reached("settle", order)
        with self._idle:
            left = self._idle.wait_for(lambda: self._working == 0, timeout=self._deadlines.settle_s * 0.9)
        if not left:
            sentence = f"{self.member} is still {self._progress.phase}, {self._deadlines.settle_s:g} s after the abort"
            return Fault("StillBusy", sentence)
        released_s = time.monotonic() - began
        update = self._update
        through = update.applied_through if update is not None and update.version == order.version else -1
        is_beside = update is not None and not update.is_open
        if order.roll_back and in_worker is not None:
            in_worker(self.roll_back)
        return Settled(through, released_s, self.serving_version, is_beside)

    def abort(self, reason: str) -> None:
        """Free the working thread from whatever it waits for, and keep what that was."""
        if self._working:
            self._progress.hold()
        self._transport.abort(reason)
        if self._pinned is not None:
            self._pinned.source.abort(reason)

    def close(self) -> None:
        if self._end is not None:
            self._end.close()
        self._watchdog.close()
        self._transport.close()

    # -- the working thread

    def prepare(self, order: PrepareOrder) -> Answer:
        """Bind a listener for the epoch. From here on, orders of lower epochs are refused."""
        return self._carry_out("preparing", lambda: self._prepare(order))

    def join(self, order: JoinOrder, secret: bytes) -> Answer:
        """Connect to the group; blocks at most ``join_s``."""
        return self._carry_out("joining", lambda: self._join(order, secret))

    def pin(self, order: ReadyOrder, source: WeightSource, packing: Packing) -> Answer:
        """Trainers: hold the version still and pack the first bucket."""
        return self._carry_out("packing", lambda: self._pin(order, source, packing))

    def pause(self, order: ReadyOrder, pause: Callable[[], None]) -> Answer:
        """Shards: return when nothing is scheduled on the engine any more."""
        return self._carry_out("pausing", lambda: self._pause(order, pause))

    def send(self, order: TransferOrder) -> Answer:
        """Trainers: send every bucket from ``start_bucket`` on."""
        return self._carry_out("in_collective", lambda: self._send(order))

    def receive(self, order: TransferOrder, receiver: WeightReceiver) -> Answer:
        """Shards: receive every bucket from ``start_bucket`` on, and apply it unless the commit is staged.

        Nothing may be scheduled on the engine.
        """
        return self._carry_out("in_collective", lambda: self._receive(order, receiver))

    def commit(self, order: CommitOrder, receiver: WeightReceiver) -> Answer:
        """Shards: compare the digests, apply what was staged, close the update, and serve it.

        Nothing may be scheduled on the engine. Committing a version twice is no error.
        """
        return self._carry_out("finalizing", lambda: self._commit(order, receiver))

    def roll_back(self, receiver: WeightReceiver) -> None:
        """Make the engine runnable after an update that will not be finished; it serves nothing until the next one."""
        update, self._update = self._update, None
        if update is not None and update.is_open:
            receiver.rollback()

    # -- what the orders do

    def _prepare(self, order: PrepareOrder) -> Answer:
        if order.epoch <= self._epoch or order.coordinator < self._coordinator:
            raise StaleEpoch(f"epoch {order.epoch} was asked of {self.member} after epoch {self._epoch}")
        self._epoch, self._coordinator = order.epoch, order.coordinator
        self._progress = ProgressRecorder(order.epoch)
        return Prepared((self._transport.listen(),), (), self._processes)

    def _join(self, order: JoinOrder, secret: bytes) -> Answer:
        self._require(order.epoch)
        group = GroupSpec(
            epoch=order.epoch,
            rank=order.membership.rank_of(self.member) + self._rank,
            addresses=order.addresses,
            identities=identities_in(order.membership),
            secret=secret,
        )
        limit = self._deadlines.join_s
        with self._armed(order.epoch, abort_s=limit, hard_s=limit) as armed:
            armed.hand_over(self)
            self._reached("joining:prepare", order)
            self._progress.entered = -1
            self._transport.reconcile_communicator(order.membership, group, timeout_s=limit)
        self._progress.communicator = self._transport.communicator
        self._progress.completed = -1
        return Done()

    def _pin(self, order: ReadyOrder, source: WeightSource, packing: Packing) -> Answer:
        self._require(order.epoch)
        self._progress.begin_refit()
        self._reached("packing", order)
        if self._pinned is None or self._pinned.version != order.version:
            manifest = self._manifests.manifest_of(source.specs(), packing)
            self._pinned = PinnedVersion(order.version, source, manifest)
        self._pinned.source.restart()
        self._require(order.epoch)  # again: an abort that came before the restart must not be lost
        self._transport.prepare(self._pinned, order.start_bucket)
        return Ready(self._pinned.manifest)

    def _pause(self, order: ReadyOrder, pause: Callable[[], None]) -> Answer:
        self._require(order.epoch)
        self._progress.begin_refit()
        self._reached("pausing", order)
        pause()
        return Done()

    def _send(self, order: TransferOrder) -> Answer:
        pinned = self._pinned
        if pinned is None or pinned.version != order.version or pinned.manifest != order.manifest:
            raise PlanMismatch(f"{self.member} was told to send v{order.version}, which it has not pinned")
        self._reached("before", order)
        with self._guarded(order) as context:
            digests = self._transport.send(context, order, pinned)
        self._reached("ack", order)
        return Sent(digests)

    def _receive(self, order: TransferOrder, receiver: WeightReceiver) -> Answer:
        self._reached("before", order)
        update = self._open_update(order)
        self._progress.applied = update.applied_through
        if update.applied_through + 1 < order.start_bucket:
            raise PlanMismatch(
                f"{self.member} holds {update.applied_through + 1} buckets; the retry begins at {order.start_bucket}"
            )
        with self._guarded(order) as context:
            feed = update.staged.append if order.commit == "staged" else self._gate(update, receiver)
            digests = self._transport.receive(context, order, update, feed)
        self._reached("ack", order)
        return Received(digests)

    def _commit(self, order: CommitOrder, receiver: WeightReceiver) -> Answer:
        self._require(order.epoch)
        if self.serving_version != order.version:
            self._finish(order, receiver)
        self._progress.applied = len(order.digests)
        return Committed(order.version)

    # -- inside

    def _report(self) -> Beacon | None:
        """For the control channel: the cursors while this member works, and once more when it has done so."""
        is_working = self._working > 0
        if not is_working and self._has_reported:
            return None
        self._has_reported = not is_working
        return self._progress.beacon()

    def _finish(self, order: CommitOrder, receiver: WeightReceiver) -> None:
        update = self._update
        if update is None or update.version != order.version:
            raise PlanMismatch(f"{self.member} was told to commit v{order.version}, which it has not received")
        differing = differing_buckets(order.digests, update.digests)
        if differing or len(update.digests) != len(order.digests):
            raise DigestMismatch(
                f"{self.member} holds {len(update.digests)} of {len(order.digests)} buckets of v{order.version}; "
                f"differing: {differing}",
                buckets=differing,
            )
        self._reached("finalizing", order)
        feed = self._gate(update, receiver)
        while update.staged:
            feed(update.staged.popleft())
            self._progress.tick()
        receiver.finish(order.version)
        update.is_open = False
        self.serving_version = order.version

    def _open_update(self, order: TransferOrder) -> OpenUpdate:
        update = self._update
        if update is None or update.version != order.version or update.manifest != order.manifest:
            if update is not None and update.is_open:
                raise PlanMismatch(f"{self.member} holds an open update of v{update.version} and got v{order.version}")
            update = OpenUpdate(order.version, order.manifest, BucketUnpacker(order.manifest))
            self._update = update
        return update

    def _gate(self, update: OpenUpdate, receiver: WeightReceiver) -> Feed:
        """Closes the shard before the first tensor touches the engine: from here until its commit it serves nothing.

        Buckets that complete no tensor change nothing yet: what the shard held before, it still holds whole.
        """

        def feed(tensors: NamedTensors) -> None:
            if not tensors:
                return
            if not update.is_open:
                self.serving_version = None
                update.is_open = True
                receiver.begin(update.manifest)
            receiver.feed(tensors)

        return feed

    @contextmanager
    def _guarded(self, order: TransferOrder) -> Iterator[RankContext]:
        self._require(order.epoch)
        limits = self._deadlines
        with self._armed(order.epoch, abort_s=limits.abort_s, hard_s=limits.hard_s) as armed:
            armed.hand_over(self)
            yield self._context(order, self._ticker(armed))

    def _context(self, order: TransferOrder, tick: Callable[[], None]) -> RankContext:
        def reach(phase: str) -> None:
            self._reached(phase, order, tick)

        def received(bucket: int, buffer: memoryview) -> None:
            self._reached(f"applying:{bucket}", order, tick, buffer)

        return RankContext(self._progress, tick, reach, None if self._reach is None else received)

    def _armed(self, epoch: int, *, abort_s: float, hard_s: float) -> AbstractContextManager[Armed]:
        """The watchdog over one call; with its native rung where the process leaves its stacks."""
        path = self._rung_path
        rung_s = None if path is None else abort_s + self._deadlines.abort_grace_s
        return self._watchdog.armed(epoch=epoch, abort_s=abort_s, hard_s=hard_s, rung_s=rung_s, dump_path=path)

    def _ticker(self, armed: Armed) -> Callable[[], None]:
        progress = self._progress

        def tick() -> None:
            progress.tick()
            armed.tick()

        return tick

    def _carry_out(self, phase: str, action: Callable[[], Answer]) -> Answer:
        """Turn what ``action`` raises into an answer; whoever fails leaves the group, so that its peers learn of it."""
        with self._idle:
            self._working += 1
        self._progress.enter(phase)
        try:
            answer = action()
            self._progress.enter("done")
            return answer
        except (CommunicatorError, StaleEpoch) as error:
            self.abort(str(error))
            return _testimony(error)
        except Exception as error:  # noqa: BLE001 - whatever a member's own fault is, it is evidence
            self.abort(str(error))
            return self._fault(error)
        finally:
            with self._idle:
                self._working -= 1
                self._idle.notify_all()

    def _fault(self, error: Exception) -> Fault:
        """Equal causes have equal signatures on every shard, so neither its name nor its numbers are in them."""
        kind = type(error).__name__
        cause = re.sub(r"\d+", "#", str(error).replace(str(self.member), "?"))
        return Fault(f"{kind}: {cause}", f"{kind}: {error}")

    def _require(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(f"an order of epoch {epoch} reached {self.member} in epoch {self._epoch}")
        if epoch <= self._watchdog.aborted_through:
            raise CommunicatorAborted(f"epoch {epoch} was aborted", reason="ordered")

    def _reached(
        self,
        phase: str,
        order: JoinOrder | ReadyOrder | TransferOrder | CommitOrder | SettleOrder,
        tick: Callable[[], None] | None = None,
        buffer: memoryview | None = None,
    ) -> None:
        if self._reach is not None:
            self._reach(Moment(order.version, phase, order.epoch, tick or self._progress.tick, buffer))


def _testimony(error: CommunicatorError | StaleEpoch) -> Testimony:
    """An order that is too late, or a group that broke, is nobody's own fault."""
    if isinstance(error, PeerLost):
        return Testimony("peer_lost", error.fields.get("peer"), str(error))
    return Testimony("aborted", None, str(error))
