"""NCCL itself: NVIDIA's own binding (nccl4py), and one handle per ``ncclComm_t``.

Every communicator is nonblocking: a call returns at once, and nothing may be called again before ``is_ready``.

What must never happen here: a handle given back to NCCL twice, or used after it was given back. NCCL guards against
neither, and both are a use-after-free.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from elastic_refit.errors import ConfigError

__all__ = [
    "UNIQUE_ID_BYTES",
    "Claimed",
    "Handle",
    "NcclFailure",
    "abort_together",
    "describe_version",
    "library_version",
    "mint_unique_id",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNIQUE_ID_BYTES = 128
_OLDEST = 22200
"""The first version that aborts several communicators in one group call."""
_CALL_S = 5.0
"""How long an abort waits for a call in progress: each of them is nonblocking, so this one is stuck."""


class NcclFailure(Exception):
    """A call was refused, or NCCL reports an error of work in progress. ``status`` is an ``ncclResult_t``."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(what)
        self.status = status


class Claimed(Exception):
    """The handle was given back, or is about to be."""


class Handle:
    """One ``ncclComm_t``: empty until ``create``, and never used again after ``claim``.

    The lock is held for the length of one nonblocking call. So whoever aborts knows that nobody is inside NCCL with
    this handle; if somebody is all the same, for ``_CALL_S``, the abort is what can free them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._comm: Any = None
        self._is_claimed = False

    def create(self, make: Callable[[], Any]) -> None:
        """Fill the handle. NCCL may write into it until ``is_ready`` of whatever makes it."""
        with self._lock:
            self._check()
            with _translated():
                self._comm = make()
            if self._is_claimed:  # by somebody who did not wait for this call
                _bindings().comm_abort(self._comm)
                raise Claimed

    def init(self, unique_id: bytes, *, rank: int, world_size: int) -> None:
        """Begin to come together with the other ranks that hold ``unique_id``."""
        nccl, config = _bindings(), _config()
        opaque = nccl.UniqueId.from_buffer(unique_id)
        self.create(lambda: nccl.comm_init_rank_config(world_size, opaque.ptr, rank, config.ptr))

    def split(self, child: Handle, *, color: int, key: int) -> None:
        """Begin to fill ``child``; it is filled when this handle is ready, and used when it is ready itself."""
        nccl, config = _bindings(), _config()
        child.create(lambda: self.use(lambda comm: nccl.comm_split(comm, color, key, config.ptr)))

    def broadcast(self, pointer: int, size: int, *, root: int, stream: int) -> None:
        nccl = _bindings()
        self.use(lambda comm: nccl.broadcast(pointer, pointer, size, nccl.DataType.Uint8, root, comm, stream))

    def exchange(self, messages: Sequence[tuple[bool, int, int, int]], *, stream: int) -> None:
        """Issue ``(is_send, peer, pointer, size)`` as one group."""
        nccl = _bindings()

        def issue(comm: Any) -> None:
            nccl.group_start()
            try:
                for is_send, peer, pointer, size in messages:
                    verb = nccl.send if is_send else nccl.recv
                    verb(pointer, size, nccl.DataType.Uint8, peer, comm, stream)
            finally:
                nccl.group_end()

        self.use(issue)

    def is_ready(self) -> bool:
        """Whether the last call has been carried out: then its work is in the stream, and the next may be made.

        Raises:
            NcclFailure: it failed, or something that is under way has.
        """
        nccl = _bindings()
        status = self.use(nccl.comm_get_async_error)
        if status not in (nccl.Result.Success, nccl.Result.InProgress):
            raise NcclFailure(str(nccl.get_error_string(status)), int(status))
        return bool(status == nccl.Result.Success)

    def finalize(self) -> None:
        """Begin to flush; a collective."""
        self.use(_bindings().comm_finalize)

    def destroy(self) -> None:
        """Give the handle back after ``finalize`` is through. Blocks."""
        comm = self.claim()
        if comm is not None:
            with _translated():
                _bindings().comm_destroy(comm)

    def use(self, call: Callable[[Any], T]) -> T:
        with self._lock, _translated():
            self._check()
            return call(self._comm)

    def claim(self) -> Any:
        """The ``Comm``, for whoever gives it back: once. None if another has it, or there is none."""
        got_lock = self._lock.acquire(timeout=_CALL_S)
        if not got_lock:
            logger.error("nccl_call_stuck")
        try:
            comm = None if self._is_claimed else self._comm
            self._is_claimed = True
            return comm
        finally:
            if got_lock:
                self._lock.release()

    def _check(self) -> None:
        if self._is_claimed:
            raise Claimed


def abort_together(handles: Sequence[Handle], flagged: Callable[[], None]) -> None:
    """Abort them in one group call, in their order: parents before their children. Blocks until NCCL has reclaimed.

    ``flagged`` is called in between: their kernels have been told to end, and nothing more will be enqueued.
    """
    nccl = _bindings()
    comms = [comm for handle in handles if (comm := handle.claim()) is not None]
    with _translated():
        nccl.group_start()
        failures = [failure for comm in comms if (failure := _abort(comm)) is not None]
        flagged()
        nccl.group_end()
    if failures:
        raise failures[0]


def _abort(comm: Any) -> NcclFailure | None:
    """What went wrong, not raised: the others must be aborted all the same."""
    try:
        with _translated():
            _bindings().comm_abort(comm)
    except NcclFailure as failure:
        return failure
    return None


def mint_unique_id() -> bytes:
    """What a group's ranks find each other by. It holds a thread and a socket until every rank has used it."""
    with _translated():
        return ctypes.string_at(_bindings().get_unique_id().ptr, UNIQUE_ID_BYTES)


def library_version() -> int:
    """Of the libnccl that this process has loaded, as NCCL counts: 23007 is 2.30.7.

    Raises:
        ConfigError: there is none, or one that is too old.
    """
    try:
        version = int(_bindings().get_version())
    except RuntimeError as error:  # the loader's own
        raise ConfigError(f"libnccl.so.2 cannot be loaded: {error}") from error
    if version < _OLDEST:
        raise ConfigError(f"NCCL {describe_version(version)} is too old: {describe_version(_OLDEST)} is needed")
    return version


def describe_version(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


@functools.cache
def _bindings() -> Any:
    """nccl4py's generated layer, which takes pointers; untyped. Imported when first used: not everybody has it."""
    try:
        return importlib.import_module("nccl.bindings.nccl")
    except ImportError as error:
        what = "the nccl communicator needs nccl4py (pip install 'elastic-refit[cuda]')"
        raise ConfigError(f"{what}: {error}") from error


def _config() -> Any:
    """Nonblocking, so that an abort frees every call; and children apart, so that one can be aborted alone."""
    config = _bindings().Config()
    config.blocking = 0
    config.split_share = 0
    return config


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _bindings().NCCLError as error:
        raise NcclFailure(str(error), int(error.status)) from error
