"""The communicator contract: a group of ranks that moves bytes and can be broken from any thread at any moment.

What must never happen here: a call that nobody can free, a call that returns success with a partial buffer after an
abort, a peer admitted that does not know the epoch's secret.

A group comes together in two steps and without a store. ``bind()`` makes a :class:`PendingCommunicator` that already
listens; its ``address`` goes to the coordinator, which hands every rank the same :class:`GroupSpec`; ``join`` connects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from elastic_refit.core.evidence import WaitingOn

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
    secret: bytes = field(repr=False)

    @property
    def world_size(self) -> int:
        return len(self.addresses)


class Communicator(ABC):
    """A joined group, or a part of one that ``split`` made. One thread uses it; any thread may abort it.

    A call that ends with an error leaves the group unusable for this rank: its neighbours are told by the loss of
    their connection, and the next call raises the same kind of error.
    """

    rank: int
    world_size: int
    epoch: int

    @abstractmethod
    def broadcast(self, buffer: memoryview, root: int, *, progress: Progress | None = None) -> None:
        """Give every rank the ``buffer`` of ``root``: contiguous bytes, same length everywhere, written in place.

        Blocks until this rank has received and forwarded everything; who forwards through memory shared with other
        ranks of its host also waits until they have it.

        Raises:
            PeerLost: a neighbour's connection ended; ``peer`` is its rank in the epoch's group.
            CommunicatorAborted: ``abort`` was called, before or during the call; ``reason`` says why.
            CommunicatorError: the peer is in another call than this rank: the group is out of step.
        """

    @abstractmethod
    def send(self, buffer: memoryview, peer: int, *, progress: Progress | None = None) -> None:
        """Give ``buffer`` to rank ``peer``, which must ``recv`` as many bytes. Blocks; raises as ``broadcast`` does."""

    @abstractmethod
    def recv(self, buffer: memoryview, peer: int, *, progress: Progress | None = None) -> None:
        """Fill ``buffer`` from rank ``peer``. Blocks; raises as ``broadcast`` does."""

    @abstractmethod
    def group(self) -> AbstractContextManager[None]:
        """Issue every ``send`` and ``recv`` of the ``with`` body together when it ends, so that none waits for another.

        Buffers must stay untouched until then. Sends to one peer, and receives from one peer, keep their order.
        """

    @abstractmethod
    def split(self, color: int | None, key: int) -> Communicator | None:
        """Divide the group: ranks of one ``color`` form a child, ranked by ``(key, rank)``. All ranks must call it.

        Returns None for ``color`` None. A child has an abort of its own; aborting or closing the parent does the same
        to every child. ``peer`` in a child's errors and in ``waiting_on`` is a rank of the epoch's group.
        """

    @abstractmethod
    def wait(self) -> None:
        """Return when everything issued so far has completed in this rank; raises as ``broadcast`` does."""

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

    @property
    @abstractmethod
    def released_s(self) -> float | None:
        """Seconds from ``abort`` until the call that it freed had left; 0.0 if there was none, None until then."""

    @property
    def reclaimed_s(self) -> float | None:
        """Seconds from ``abort`` until what the group held was given back, which may be later; None until then."""
        return self.released_s

    @property
    @abstractmethod
    def waiting_on(self) -> tuple[WaitingOn, int | None]:
        """What the call in progress waits for, and for which rank of the epoch's group. Any thread may read it."""


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
    def abort(self, reason: str) -> None:
        """Free a ``join`` in progress, refuse a later one, and abort the communicator that an earlier one made."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening, if ``join`` has not taken the listeners over. Idempotent."""


class CommunicatorBackend(Protocol):
    """Makes communicators of one kind; one instance per process."""

    name: str

    def bind(self) -> PendingCommunicator: ...
