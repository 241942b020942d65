"""Ranks in real processes of their own, driven by verbs: what the conformance suite and the benchmark are made of.

A rank has two ends. ``call`` runs a verb on its main thread, where it may block in a collective; ``aside`` runs one on
a second thread meanwhile, as the control channel does in production. A rank can be killed, frozen and thawed. Verbs
travel by pickle between a process and the children it started, never further.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

from elastic_refit.communicators.base import Communicator, CommunicatorBackend, GroupSpec, PendingCommunicator
from elastic_refit.communicators.nccl import NcclBackend
from elastic_refit.communicators.tcp import TcpBackend

__all__ = ["BACKENDS", "RankProcess", "Seat", "content", "digest", "form_group", "make_specs"]

BACKENDS: dict[str, Callable[..., CommunicatorBackend]] = {"nccl": NcclBackend, "tcp": TcpBackend}
_ANSWER_S = 60.0
_PERIOD_BYTES = 100_003

Form = Literal["B", "h", "f", "d"]
"""A ``memoryview`` format: what the caller's buffer consists of."""

Message = tuple[str, int, int]
"""One transfer of ``Seat.exchange``: ``send`` or ``recv``, the peer, and the size in bytes."""


def content(size: int, seed: int) -> bytearray:
    """Bytes that differ at every offset a chunk could be put by mistake."""
    period = random.Random(seed).randbytes(min(size, _PERIOD_BYTES))
    return bytearray(period * (size // _PERIOD_BYTES + 1))[:size]


def digest(data: bytes | bytearray) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class Seat:
    """The verbs, in the rank's process. Verbs act on the group that was joined last, or on the part split off it."""

    def __init__(self, backend: CommunicatorBackend) -> None:
        self._backend = backend
        self._pending: PendingCommunicator | None = None
        self._groups: list[Communicator] = []
        self._kept = bytearray()

    def bind(self) -> str:
        self._pending = self._backend.bind()
        self._groups = []
        return self._pending.address

    def join(self, group: GroupSpec, timeout_s: float) -> None:
        assert self._pending is not None
        self._groups = [self._pending.join(group, timeout_s=timeout_s)]

    def broadcast(self, size: int, root: int, seed: int, *, repeat: int = 1, form: Form = "B") -> str:
        """The digest of what this rank has at the end."""
        buffer = content(size, seed) if self._group.rank == root else bytearray(size)
        view: Any = memoryview(buffer).cast(form)
        for _ in range(repeat):
            self._group.broadcast(view, root)
        return digest(buffer)

    def timed_broadcast(self, size: int, root: int) -> float:
        """Seconds of one broadcast after everybody has arrived at it."""
        buffer = memoryview(self.scratch(size))
        self._group.broadcast(buffer[:1], root)
        self._group.broadcast(buffer[:1], (root - 1) % self._group.world_size)
        start = time.perf_counter()
        self._group.broadcast(buffer, root)
        return time.perf_counter() - start

    def broadcast_progress(self, size: int, root: int, *, fail_at: int | None = None) -> list[tuple[int, int]]:
        """The reports of one broadcast; ``fail_at`` raises from the report of as many bytes."""
        reports: list[tuple[int, int]] = []

        def note(done: int, total: int) -> None:
            reports.append((done, total))
            if done == fail_at:
                raise ZeroDivisionError("an error of the reporter's own")

        self._group.broadcast(memoryview(bytearray(size)), root, progress=note)
        return reports

    def exchange(self, messages: Sequence[Message], *, is_grouped: bool = True) -> list[str]:
        """Move the messages; the digests of those received. A message's content is seeded by its sender and size."""
        rank = self._group.rank
        received = []
        buffers = [content(size, rank + size) if verb == "send" else bytearray(size) for verb, _, size in messages]

        def issue() -> None:
            for (verb, peer, _), buffer in zip(messages, buffers, strict=True):
                getattr(self._group, verb)(memoryview(buffer), peer)

        if is_grouped:
            with self._group.group():
                issue()
        else:
            issue()
        for (verb, _, _), buffer in zip(messages, buffers, strict=True):
            if verb == "recv":
                received.append(digest(buffer))
        return received

    def split(self, color: int | None, key: int) -> tuple[int, int] | None:
        """Rank and size in the part, on which the verbs act from now on; None if this rank is in none."""
        part = self._group.split(color, key)
        if part is None:
            return None
        self._groups.append(part)
        return part.rank, part.world_size

    def wait(self) -> None:
        self._group.wait()

    def abort(self, reason: str, *, threads: int = 1, depth: int = 0) -> None:
        """Abort from ``threads`` threads at once; ``depth`` counts from the whole group. Before a join: the pending."""
        target = self._groups[depth] if self._groups else self._pending
        assert target is not None
        barrier = threading.Barrier(threads)

        def pull(number: int) -> None:
            barrier.wait()
            target.abort(reason if threads == 1 else f"{reason} {number}")

        pullers = [threading.Thread(target=pull, args=(number,)) for number in range(threads)]
        for puller in pullers:
            puller.start()
        for puller in pullers:
            puller.join()

    def close(self) -> bool:
        """Close what was joined or split last; the verbs then act on the group around it. Whether there was any."""
        if not self._groups:
            if self._pending is not None:
                self._pending.close()
            return False
        self._groups.pop().close()
        return True

    def close_twice(self) -> None:
        """Close the group, twice, and keep it."""
        self._group.close()
        self._group.close()

    def status(self) -> dict[str, Any]:
        group = self._group
        times = {"released_s": group.released_s, "reclaimed_s": group.reclaimed_s}
        return {"waiting_on": group.waiting_on, "aborted": group.aborted, **times}

    def resources(self) -> dict[str, int]:
        """What this process holds: threads, file descriptors, and resident bytes."""
        with open("/proc/self/statm", encoding="ascii") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        fds = len(os.listdir("/proc/self/fd"))
        return {"threads": len(os.listdir("/proc/self/task")), "fds": fds, "resident_bytes": resident}

    @property
    def _group(self) -> Communicator:
        return self._groups[-1]

    def scratch(self, size: int) -> bytearray:
        """A buffer that stays, so that a timing does not pay for fresh pages."""
        if len(self._kept) != size:
            self._kept = content(size, seed=size)
        return self._kept


class RankProcess:
    """One rank. The process lives until ``stop``; a new group is a new ``bind`` in the same process."""

    def __init__(self, backend: str = "tcp", *, seat: type[Seat] = Seat, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._main, main = context.Pipe()
        self._side, side = context.Pipe()
        self._process = context.Process(target=_serve, args=(seat, backend, options, main, side), daemon=True)
        self._process.start()
        self.is_busy = False
        """A verb was begun on the main thread and its outcome was not taken."""
        main.close()
        side.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def start(self, verb: str, *arguments: Any, **options: Any) -> None:
        """Begin a verb on the main thread; ``finish`` has its outcome."""
        self.is_busy = True
        self._main.send((verb, arguments, options))

    def is_finished(self, timeout_s: float = 0.0) -> bool:
        return self._main.poll(timeout_s)

    def finish(self, timeout_s: float = _ANSWER_S) -> Any:
        """The result of the verb begun last; raises what it raised."""
        if not self.is_finished(timeout_s):
            raise TimeoutError(f"a rank did not finish within {timeout_s} s")
        self.is_busy = False
        return _outcome(self._main, timeout_s)

    def call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        self.start(verb, *arguments, **options)
        return self.finish()

    def aside(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """Run a verb on the second thread, while the first may be blocked."""
        self._side.send((verb, arguments, options))
        return _outcome(self._side, _ANSWER_S)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the process, in whatever state it is."""
        if self._process.is_alive():
            self.kill()
        self._main.close()
        self._side.close()
        self._process.close()


def form_group(
    ranks: Sequence[RankProcess], *, epoch: int = 1, secret: bytes | None = None, timeout_s: float = 30.0
) -> list[GroupSpec]:
    """Bind every rank and join them, as the coordinator would; the specification that each of them got."""
    specs = make_specs([rank.call("bind") for rank in ranks], epoch=epoch, secret=secret)
    for rank, spec in zip(ranks, specs, strict=True):
        rank.start("join", spec, timeout_s)
    for rank in ranks:
        rank.finish()
    return specs


def make_specs(addresses: Sequence[str], *, epoch: int = 1, secret: bytes | None = None) -> list[GroupSpec]:
    """One specification per rank, under a fresh secret unless one is given."""
    identities = tuple(f"shard[{index}]/0" for index in range(len(addresses)))
    shared = secret or os.urandom(32)
    return [GroupSpec(epoch, rank, tuple(addresses), identities, shared) for rank in range(len(addresses))]


def _outcome(end: Connection, timeout_s: float) -> Any:
    if not end.poll(timeout_s):
        raise TimeoutError(f"a rank did not answer within {timeout_s} s")
    is_result, value = end.recv()
    if not is_result:
        raise value
    return value


def _serve(kind: type[Seat], backend: str, options: dict[str, Any], main: Connection, side: Connection) -> None:
    seat = kind(BACKENDS[backend](**options))
    threading.Thread(target=_answer, args=(seat, side), daemon=True).start()
    _answer(seat, main)


def _answer(seat: Seat, end: Connection) -> None:
    while True:
        try:
            verb, arguments, options = end.recv()
        except EOFError:
            return
        try:
            end.send((True, getattr(seat, verb)(*arguments, **options)))
        except Exception as error:  # noqa: BLE001 - whatever a verb raises is its outcome
            end.send((False, error))
