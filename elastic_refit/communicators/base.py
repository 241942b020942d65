"""The communicator contract: a group of ranks that moves bytes and can be broken from any thread at any moment.

What must never happen here: a call that nobody can free, a call that returns success with a partial buffer after an
abort, a peer admitted that does not know the epoch's secret.

A group comes together in two steps and without a store. ``bind()`` makes a :class:`PendingCommunicator` that already
listens; its ``address`` goes to the coordinator, which hands every rank the same :class:`GroupSpec`; ``join`` connects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Communicator", "CommunicatorBackend", "GroupSpec", "PendingCommunicator", "Progress"]

Progress = Callable[[int, int], None]
"""Called as ``progress(bytes_done, bytes_total)`` on the calling thread each time a chunk has moved in this rank."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One epoch's group, as the coordinator gives it to a rank.

    ``addresses[r]`` and ``identities[r]`` belong to rank ``r``; an identity is ``str(member)`` plus the rank inside it.
    ``secret`` is fresh for each epoch: who does not hold it is refused.
    """

    epoch: int
    rank: int
    addresses: tuple[str, ...]
    identities: tuple[str, ...]
    secret: bytes

    @property
    def world_size(self) -> int:
        return len(self.addresses)


class Communicator(ABC):
    """A joined group. One thread uses it; any thread may abort it."""

    rank: int
    world_size: int
    epoch: int

    @abstractmethod
    def broadcast(self, buffer: memoryview, root: int, *, progress: Progress | None = None) -> None:
        """Give every rank the ``buffer`` of ``root``: contiguous bytes, same length everywhere, written in place.

        Blocks until this rank has received and forwarded everything.

        Raises:
            PeerLost: a neighbour's connection ended; ``peer`` is its rank.
            CommunicatorAborted: ``abort`` was called, before or during the call; ``reason`` says why.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Free every blocked call, from any thread; the second call is a no-op. Later calls raise at once."""

    @abstractmethod
    def close(self) -> None:
        """End of life without a fault. Idempotent; never blocks on a peer."""

    @property
    @abstractmethod
    def aborted(self) -> str | None:
        """The reason of the first abort, or None."""


class PendingCommunicator(ABC):
    """A rank that already listens but has not joined. ``abort`` also frees a ``join`` in progress."""

    address: str

    @abstractmethod
    def join(self, group: GroupSpec, *, timeout_s: float) -> Communicator:
        """Connect to the group; blocks at most ``timeout_s``.

        Raises:
            RendezvousFailed: not everybody came in time; the message names the ranks that are missing.
            PeerLost: a neighbour went away while joining.
            CommunicatorAborted: ``abort`` was called.
        """

    @abstractmethod
    def abort(self, reason: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class CommunicatorBackend(Protocol):
    """Makes communicators of one kind; one instance per process."""

    name: str

    def bind(self) -> PendingCommunicator: ...
