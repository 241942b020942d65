"""Where the bytes of a ``nccl`` communicator lie, and how the host learns that work on the device is done.

This is all that knows of CUDA. The host never blocks in it: it asks an event again and again, so that an abort, a
deadline and a lost peer end the wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from elastic_refit.errors import ContextLost

if TYPE_CHECKING:
    import torch

__all__ = ["CudaDevice", "Device", "Event", "Region", "Stream"]


@dataclass(frozen=True, slots=True)
class Region:
    """Contiguous bytes at an address that NCCL can use. ``owner`` keeps them where they are."""

    pointer: int
    size_bytes: int
    owner: object


class Event(Protocol):
    def is_done(self) -> bool:
        """Whether the work enqueued before it was recorded has ended; after an abort that says nothing of its success.

        Raises:
            ContextLost: the device answers with an error; it cannot be used any more.
        """
        ...


class Stream(Protocol):
    handle: int
    """A ``cudaStream_t``."""

    def follow_caller(self) -> None:
        """Let what is enqueued from here on wait for what the calling thread has enqueued elsewhere."""

    def record(self) -> Event: ...

    def close(self) -> None:
        """Never blocks; what was enqueued is still done."""


class Device(Protocol):
    def current(self) -> AbstractContextManager[object]:
        """Make it the one on which the calling thread makes a communicator."""
        ...

    def open_stream(self) -> Stream: ...

    def locate(self, buffer: object, *, is_written: bool) -> Region:
        """Where ``buffer`` lies.

        Raises:
            ValueError: NCCL cannot use it: of another device, not contiguous, or read-only where it would be written.
        """
        ...


class CudaDevice:
    """A GPU, through torch. Buffers are contiguous CUDA tensors of any dtype. Not measured: no GPU was at hand."""

    def __init__(self, index: int | None = None) -> None:
        self._index = index

    def current(self) -> AbstractContextManager[object]:
        import torch

        return torch.cuda.device(torch.cuda.current_device() if self._index is None else self._index)

    def open_stream(self) -> Stream:
        import torch

        return _CudaStream(torch.cuda.Stream(self._index))

    def locate(self, buffer: object, *, is_written: bool) -> Region:
        import torch

        if not isinstance(buffer, torch.Tensor) or not buffer.is_cuda or not buffer.is_contiguous():
            raise ValueError("on a GPU the nccl communicator moves contiguous CUDA tensors")
        if self._index is not None and buffer.device.index != self._index:
            raise ValueError(f"the tensor is on {buffer.device}, the communicator on cuda:{self._index}")
        return Region(buffer.data_ptr(), buffer.numel() * buffer.element_size(), buffer)


class _CudaStream:
    """A stream of our own. Not measured: no GPU was at hand."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self.handle = int(stream.cuda_stream)

    def follow_caller(self) -> None:
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def record(self) -> Event:
        import torch

        event = torch.cuda.Event()
        with _lost_context():
            event.record(self._stream)
        return _CudaEvent(event)

    def close(self) -> None:
        """torch keeps its streams."""


@dataclass(frozen=True, slots=True)
class _CudaEvent:
    event: torch.cuda.Event

    def is_done(self) -> bool:
        with _lost_context():
            return bool(self.event.query())


@contextlib.contextmanager
def _lost_context() -> Iterator[None]:
    """CUDA's errors are sticky: the first one that a query meets is the answer to every later call."""
    try:
        yield
    except RuntimeError as error:
        raise ContextLost(f"this process has lost its CUDA context: {error}") from error
