"""Weights that no trainer rank holds whole: for cells in which trainers really wait for each other.

Each rank keeps one part of every tensor. To materialize a tensor each gives its part to all others, and waits for
theirs: nobody comes through before everybody has come. What a rank was given ahead of its need is kept, so a broken
attempt leaves nobody out of step.

What must never happen here: a wait that neither ``abort`` nor ``patience_s`` ends; a part of one version in another.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue

import torch

from elastic_refit.core.manifest import TensorSpec
from elastic_refit.errors import CommunicatorAborted, PeerLost
from elastic_refit.transports.base import WeightSource
from elastic_refit.transports.packing import byte_view, tensor_specs

__all__ = ["Address", "Exchange", "GatheredWeights"]

Address = tuple[str, int]
Key = tuple[int, int, tuple[str, ...]]
"""Rank, version, names."""


class Exchange:
    """One trainer rank's end: gives its parts to the other ranks, and has theirs. Every rank needs the same ``secret``.

    Links go one way and have a thread at each end, so that a rank that does not read stops nobody. Threads are daemons.
    """

    def __init__(self, rank: int, *, secret: bytes, patience_s: float) -> None:
        self.rank = rank
        self.world_size = 1
        self._secret = secret
        self._patience_s = patience_s
        self._listener = Listener(("127.0.0.1", 0), authkey=secret)
        self._outboxes: dict[int, SimpleQueue[bytes | None]] = {}
        self._parts: dict[Key, deque[bytes]] = {}
        """A tensor that lies in several buckets is gathered for each: who is ahead has given it more than once."""
        self._version = -1
        self._gone: set[int] = set()
        self._aborted: str | None = None
        self._changed = threading.Condition()

    @property
    def address(self) -> Address:
        host, port = self._listener.address
        return str(host), int(port)

    def meet(self, addresses: Sequence[Address]) -> None:
        """Link up with the ranks at ``addresses``, in their order, this one among them; all must do so."""
        self.world_size = len(addresses)
        threading.Thread(target=self._admit, name="gather-admit", daemon=True).start()
        for rank, address in enumerate(addresses):
            if rank != self.rank:
                self._outboxes[rank] = SimpleQueue()
                link = Client((address[0], address[1]), authkey=self._secret)
                link.send_bytes(bytes([self.rank]))
                arguments = (link, self._outboxes[rank])
                threading.Thread(target=_send, args=arguments, name=f"gather-to-{rank}", daemon=True).start()

    def gather(self, version: int, names: tuple[str, ...], own: bytes) -> list[bytes]:
        """The parts of every rank, by rank; blocks until all have come to the same call.

        Raises:
            CommunicatorAborted: ``abort`` was called, or somebody did not come within ``patience_s``.
            PeerLost: a rank is gone.
        """
        head = json.dumps([version, names]).encode()
        for outbox in self._outboxes.values():
            outbox.put(len(head).to_bytes(4, "little") + head + own)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        keys: dict[int, Key] = {rank: (rank, version, names) for rank in others}
        with self._changed:
            self._forget_before(version)
            self._changed.wait_for(lambda: self._is_over(keys), timeout=self._patience_s)
            self._require(keys)
            parts = {rank: self._take(key) for rank, key in keys.items()}
        return [own if rank == self.rank else parts[rank] for rank in range(self.world_size)]

    def abort(self, reason: str) -> None:
        with self._changed:
            self._aborted = reason
            self._changed.notify_all()

    def restart(self) -> None:
        with self._changed:
            self._aborted = None

    def close(self) -> None:
        self.abort("closed")
        self._listener.close()
        for outbox in self._outboxes.values():
            outbox.put(None)

    def _is_over(self, keys: Mapping[int, Key]) -> bool:
        return self._aborted is not None or bool(self._gone) or all(key in self._parts for key in keys.values())

    def _require(self, keys: Mapping[int, Key]) -> None:
        if self._aborted is not None:
            raise CommunicatorAborted(f"gathering was aborted: {self._aborted}", reason=self._aborted)
        for rank, key in keys.items():
            if key not in self._parts and rank in self._gone:
                raise PeerLost(f"trainer rank {rank} is gone", peer=rank)
            if key not in self._parts:
                late = f"trainer rank {rank} did not come to gather within {self._patience_s:g} s"
                raise CommunicatorAborted(late, reason=late)

    def _take(self, key: Key) -> bytes:
        part = self._parts[key].popleft()
        if not self._parts[key]:
            del self._parts[key]
        return part

    def _forget_before(self, version: int) -> None:
        """Parts of the versions before, which nobody asks for any more."""
        self._version = max(version, self._version)
        self._parts = {key: part for key, part in self._parts.items() if key[1] >= self._version}

    def _admit(self) -> None:
        missing = self.world_size - 1
        while missing:
            try:
                link = self._listener.accept()
            except AuthenticationError:
                continue
            except OSError:
                return
            missing -= 1
            threading.Thread(target=self._receive, args=(link,), name="gather-from", daemon=True).start()

    def _receive(self, link: Connection) -> None:
        rank = link.recv_bytes()[0]
        while True:
            try:
                message = link.recv_bytes()
            except (EOFError, OSError):
                break
            start = 4 + int.from_bytes(message[:4], "little")
            version, names = json.loads(message[4:start])
            with self._changed:
                if version >= self._version:
                    self._parts.setdefault((rank, version, tuple(names)), deque()).append(message[start:])
                    self._changed.notify_all()
        link.close()
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()


def _send(link: Connection, outbox: SimpleQueue[bytes | None]) -> None:
    with link, contextlib.suppress(OSError):  # whoever reads no more is missed by its own link to us
        while (message := outbox.get()) is not None:
            link.send_bytes(message)


class GatheredWeights(WeightSource):
    """The weights of ``version``, of which this rank keeps its part of every tensor and no more."""

    def __init__(self, exchange: Exchange, version: int, whole: Mapping[str, torch.Tensor]) -> None:
        self._exchange = exchange
        self._version = version
        self._like = {name: torch.empty_like(tensor, device="meta") for name, tensor in whole.items()}
        self._parts = {name: self._parts_of(tensor)[exchange.rank].clone() for name, tensor in whole.items()}

    def specs(self) -> list[TensorSpec]:
        return tensor_specs(self._like.items())

    def materialize(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        whole = {name: torch.empty_like(self._like[name], device="cpu") for name in names}
        own = b"".join(bytes(byte_view(self._parts[name])) for name in names)
        for rank, given in enumerate(self._exchange.gather(self._version, tuple(names), own)):
            start = 0
            for tensor in whole.values():
                part = self._parts_of(tensor)[rank]
                byte_view(part)[:] = given[start : start + part.numel()]
                start += part.numel()
        return whole

    def abort(self, reason: str) -> None:
        self._exchange.abort(reason)

    def restart(self) -> None:
        self._exchange.restart()

    def _parts_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of the bytes of a contiguous tensor, one for each rank."""
        flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
        return torch.tensor_split(flat, self._exchange.world_size)
