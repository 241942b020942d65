"""A joined ``nccl`` group, or a part of one: NCCL moves the bytes, the ring of links says who is still there.

NCCL waits for ever for a peer that is gone, and after an abort it reports success whatever is in the buffer. So no
thread ever blocks in it: a call is issued, and then looked after until its event is done, its ring neighbour hangs up,
or somebody aborts. Nothing here has been measured on a GPU.

What must never happen here: a call that returns, well or not, while work of it may still write into its buffer.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elastic_refit.communicators.base import Progress
from elastic_refit.communicators.exchange import ExchangeLate, Lane
from elastic_refit.communicators.frames import HEADER_BYTES, Frame, FrameKind, check_frame, encode_frame
from elastic_refit.communicators.links import Link, LinkEnded, first_hung_up
from elastic_refit.communicators.nccl_library import Claimed, Handle, NcclFailure
from elastic_refit.communicators.nccl_reclaim import Reclaim
from elastic_refit.communicators.nccl_settings import Settings
from elastic_refit.communicators.nccl_stream import Event, Region, Stream
from elastic_refit.communicators.nccl_terms import Terms, check_terms
from elastic_refit.communicators.nccl_watch import Late, watch_until
from elastic_refit.communicators.ports import Wire
from elastic_refit.communicators.ring import RingCommunicator, longest
from elastic_refit.communicators.wiring import Wiring
from elastic_refit.core.evidence import WaitingOn
from elastic_refit.errors import CommunicatorError, ContextLost, RendezvousFailed

__all__ = ["NcclCommunicator"]

T = TypeVar("T")

_LOOK_S = 1e-3
_CHUNKS_AHEAD = 2
"""Chunks of a broadcast that are under way at once: the next one begins before the host has seen the last one end."""
_MOMENT_S = 0.5
"""For what should come right after something else, and need not come."""
_CORROBORATE_S = 0.2
_NO_COLOR = -1
_claims = threading.RLock()
_orphans: list[object] = []
"""Buffers that work on a lost device may still write to: they stay for as long as the process does."""


@dataclass(frozen=True, slots=True)
class _Message:
    lane: Lane
    peer: int
    region: Region
    progress: Progress | None


class NcclCommunicator(RingCommunicator[_Message]):
    """A group whose ring is open is formed by ``form``; a part of it by its parent's ``split``.

    Broadcasts move in chunks, each reported when it is there. A message is reported once. The size of a message is not
    compared with its peer's: NCCL would wait for ever, or write less than was expected.
    """

    def __init__(
        self, wiring: Wiring, ranks: tuple[int, ...], *, settings: Settings, parent: NcclCommunicator | None = None
    ) -> None:
        super().__init__(wiring, ranks, chunk_bytes=settings.terms.chunk_bytes, parent=parent)
        self._settings = settings
        self._handle = Handle()
        self._stream: Stream | None = None
        self._in_flight: Sequence[Region] = ()
        self._in_use: Stream | None = None
        self._reclaim: Reclaim | None = None
        self._none = Handle()
        """What NCCL fills with nothing, for a rank that takes no part in a split; it must outlive that."""
        self._num_broadcasts = 0

    # How it begins

    def _form(self, deadline: float) -> None:
        super()._form(deadline)
        group = self._wiring.group

        def share(mine: bytes) -> list[bytes]:
            return self._gather(mine, deadline)

        try:
            check_terms(group, [Terms.unpack(raw) for raw in share(self._settings.terms.pack())])
            with self._settings.device.current():
                self._settings.membership.form(self._handle, group, share)
            self._until(self._handle.is_ready, self._neighbours(), deadline)
        except (ExchangeLate, Late) as late:
            raise RendezvousFailed(
                f"rank {group.rank} of epoch {self.epoch} found its neighbours, but the whole group did not come "
                f"together within {self._wiring.patience_s:.1f} s",
                epoch=self.epoch,
                missing=(),
            ) from late
        self._open_stream()

    def _open_stream(self) -> None:
        self._stream = self._life.keep(self._settings.device.open_stream())

    def _part(self, wiring: Wiring, ranks: tuple[int, ...]) -> NcclCommunicator:
        return NcclCommunicator(wiring, ranks, settings=self._settings, parent=self)

    def _split(self, color: int | None, key: int) -> NcclCommunicator | None:
        """The links first: they tell who is in which part, and NCCL then asks only for numbers that it can express."""
        part = super()._split(color, key)
        if part is None:
            self._none = Handle()
            self._handle.split(self._none, color=_NO_COLOR, key=0)
            self._until(self._handle.is_ready, self._neighbours())
            return None
        try:
            self._handle.split(part._handle, color=min(map(self._ranks.index, part._ranks)), key=part.rank)
            self._until(self._handle.is_ready, self._neighbours())
            self._until(part._handle.is_ready, self._neighbours())
            part._run(part._open_stream)
        except BaseException:
            self._let_go(self, part)  # together: until this handle is ready, NCCL may still fill the part's
            part._end(is_faulty=True)
            raise
        return part

    # What moves bytes

    def _broadcasting(self, buffer: memoryview, root: int, progress: Progress | None) -> Callable[[], None]:
        region = self._settings.device.locate(buffer, is_written=root != self.rank)
        return lambda: self._broadcast(region, root, progress)

    def _broadcast(self, region: Region, root: int, progress: Progress | None) -> None:
        self._agree_on_step(region.size_bytes, root)
        is_root = root == self.rank
        stream = self._begin([region], waiting_on="send" if is_root else "recv", peer=None)
        neighbours = self._neighbours()[:: -1 if is_root else 1]
        under_way: deque[tuple[int, Event]] = deque()

        def complete_first() -> None:
            done, event = under_way.popleft()
            self._until(event.is_done, neighbours)
            if progress is not None:
                progress(done, region.size_bytes)

        for start in range(0, region.size_bytes, self._chunk_bytes):
            if len(under_way) == _CHUNKS_AHEAD:
                complete_first()
            size = min(self._chunk_bytes, region.size_bytes - start)
            self._handle.broadcast(region.pointer + start, size, root=root, stream=stream.handle)
            self._until(self._handle.is_ready, neighbours)
            under_way.append((start + size, stream.record()))
        while under_way:
            complete_first()

    def _agree_on_step(self, size: int, root: int) -> None:
        """Compare notes with the neighbours in the direction from the root: NCCL would not notice a difference."""
        self._num_broadcasts += 1
        if self.world_size == 1:
            return
        frame = Frame(FrameKind.BROADCAST, root, self._num_broadcasts, size)
        previous, following = self._neighbours()
        if (self.rank + 1) % self.world_size != root:
            Wire(self._to_next, following, self._watch).send(encode_frame(frame))
        if self.rank != root:
            header = memoryview(bytearray(HEADER_BYTES))
            Wire(self._from_previous, previous, self._watch, guards=(following,)).receive(header)
            check_frame(header, frame, previous.peer)

    def _message(self, lane: Lane, peer: int, buffer: memoryview, progress: Progress | None) -> _Message:
        return _Message(lane, peer, self._settings.device.locate(buffer, is_written=not lane.is_send), progress)

    def _exchange(self, messages: list[_Message]) -> None:
        """A link to each peer tells when it goes; the peer that is named first is the one accused if several do."""
        lanes = dict.fromkeys(Lane(message.lane.peer, is_send=True) for message in messages)
        self._wiring.open(lanes, time.monotonic() + self._wiring.patience_s)
        peers = [self._link(lane) for lane in lanes]
        if sizeable := [message for message in messages if message.region.size_bytes]:
            first = sizeable[0].lane
            regions = [message.region for message in sizeable]
            stream = self._begin(regions, waiting_on="send" if first.is_send else "recv", peer=first.peer)
            parts = [(each.lane.is_send, each.peer, each.region.pointer, each.region.size_bytes) for each in sizeable]
            self._handle.exchange(parts, stream=stream.handle)
            self._until(self._handle.is_ready, peers, corroborate_s=_CORROBORATE_S)
            self._until(stream.record().is_done, peers, corroborate_s=_CORROBORATE_S)
        for message in messages:
            if message.progress is not None:
                message.progress(message.region.size_bytes, message.region.size_bytes)

    def sync_stream_within(self, timeout_s: float, stream: Stream) -> None:
        """Return when all that was enqueued on ``stream`` so far is done: work with this group's peers, by the caller.

        Raises:
            CommunicatorError: it was not done in time; this rank has left the group.
            PeerLost, CommunicatorAborted, ContextLost: as any call.
        """

        def sync() -> None:
            self._in_use = stream
            self._waiting_on = ("recv", None)
            try:
                self._until(stream.record().is_done, self._neighbours(), time.monotonic() + timeout_s)
            except Late as late:
                raise CommunicatorError(f"work on a stream was not done within {timeout_s:.1f} s") from late

        self._run(sync)

    def _begin(self, regions: Sequence[Region], *, waiting_on: WaitingOn, peer: int | None) -> Stream:
        assert self._stream is not None, "it is open since the group was formed"
        self._in_flight = regions
        self._in_use = self._stream
        self._waiting_on = (waiting_on, peer)
        self._stream.follow_caller()
        return self._stream

    def _until(
        self,
        is_met: Callable[[], bool],
        peers: Sequence[Link],
        deadline: float = math.inf,
        *,
        corroborate_s: float = 0.0,
    ) -> None:
        watch_until(
            is_met, handle=self._handle, life=self._life, peers=peers, deadline=deadline, corroborate_s=corroborate_s
        )

    # How it ends

    def _run(self, call: Callable[[], T]) -> T:
        try:
            return super()._run(lambda: self._guarded(call))
        finally:
            self._in_flight, self._in_use = (), None

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return self._explained(call)
        except BaseException:
            self._break_off()
            raise

    def _explained(self, call: Callable[[], T]) -> T:
        """A failure of NCCL's is as a rule the loss of a peer, which the ring can name a moment later at the latest."""
        try:
            return call()
        except (NcclFailure, Claimed) as failure:
            self._life.check()
            if lost := first_hung_up(self._neighbours(), self._life.bell, _MOMENT_S):
                raise LinkEnded(lost.peer, "hung up") from failure
            self._life.check()
            raise CommunicatorError(f"NCCL failed in epoch {self.epoch}: {failure}") from failure

    def _break_off(self) -> None:
        """Tell the peers, and return when the device has let go of the buffers of the call that failed.

        Raises:
            ContextLost: it has not in time; they are kept for ever.
        """
        self._wiring.turn_away()
        for link in self._life.links():
            link.shutdown()
        self._let_go(self)
        if self._in_use is None:
            return
        drain_s = self._settings.patience.drain_s
        deadline = time.monotonic() + drain_s
        assert self._reclaim is not None, "it was let go"
        is_flagged = self._reclaim.flagged.wait(drain_s)
        last = self._in_use.record()  # nothing of ours is enqueued any more
        while not (is_flagged and last.is_done()):
            if time.monotonic() >= deadline:
                _orphans.extend(self._in_flight)
                raise ContextLost(
                    f"work of epoch {self.epoch} is still on the device {drain_s:.1f} s after it was aborted; "
                    "this process cannot go on",
                    epoch=self.epoch,
                )
            time.sleep(_LOOK_S / 20)

    def abort(self, reason: str) -> None:
        """As everywhere; children and parent go in one group call. Never waits for NCCL."""
        together = self._claim(self._family())  # before anybody is woken: who wakes would go alone
        self._mark_aborted(reason)
        late = self._claim(self._family())  # a part that was listed meanwhile
        for reclaim in (together, late):
            if reclaim is not None:
                reclaim.start()

    def _end(self, *, is_faulty: bool) -> None:
        """Without a fault, the group is flushed in the background, and peers see us go after that.

        A process that exits meanwhile takes with it what it had not flushed.
        """
        if not is_faulty and self._life.retire():
            for part in self._children:
                part.close()
            if leaving := self._claim([self], self._leave):
                leaving.start()
                return
        elif self._life.is_retired:
            return
        reclaim = self._claim([self])
        super()._end(is_faulty=True)  # first: what ends because the flags are raised must find that it was closed
        if reclaim is not None:
            reclaim.start()

    def _leave(self, flagged: Callable[[], None]) -> None:
        is_flushed = self._is_flushed(time.monotonic() + self._settings.patience.close_s)
        super()._end(is_faulty=False)
        if is_flushed:
            self._handle.destroy()
        else:
            self._settings.membership.let_go([self._handle], flagged)

    def _is_flushed(self, deadline: float) -> bool:
        """Finalize is a collective: when somebody has left without it, what is under way gets a moment, and no more."""
        peers = self._life.links()
        try:
            self._handle.finalize()
            while not self._handle.is_ready():
                if time.monotonic() >= deadline:
                    return False
                if not peers:
                    time.sleep(_LOOK_S)
                elif first_hung_up(peers, self._life.bell, _LOOK_S):
                    peers, deadline = (), min(deadline, time.monotonic() + _MOMENT_S)
        except NcclFailure:
            return False
        return True

    def _let_go(self, *family: NcclCommunicator) -> None:
        if reclaim := self._claim(family):
            reclaim.start()

    def _claim(
        self, family: Sequence[NcclCommunicator], work: Callable[[Callable[[], None]], None] | None = None
    ) -> Reclaim | None:
        """The one reclaim of those that have none yet, to be started by the caller; None if all have."""
        with _claims:
            fresh = [each for each in family if each._reclaim is None]
            if not fresh:
                return None
            handles = [each._handle for each in fresh]
            let_go = self._settings.membership.let_go
            reclaim = Reclaim(
                work or (lambda flagged: let_go(handles, flagged)), deadline_s=self._settings.patience.reclaim_s
            )
            for each in fresh:
                each._reclaim = reclaim
            return reclaim

    def _family(self) -> list[NcclCommunicator]:
        """This one and all its parts, parents first."""
        return [self, *(each for part in self._children for each in part._family())]

    @property
    def reclaimed_s(self) -> float | None:
        if self.aborted is None:
            return None
        reclaims = [each._reclaim for each in self._family()]
        return longest([None if each is None else each.reclaimed_s for each in reclaims])

    @property
    def is_reclaim_overdue(self) -> bool:
        """``Patience.reclaim_s`` is over and NCCL has not given everything back: a peer on this node may hold it."""
        return any(each._reclaim is not None and each._reclaim.is_overdue for each in self._family())
