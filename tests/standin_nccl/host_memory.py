"""Host memory and the stand-in's streams, where a GPU's would be. Every rank process imports this: nothing heavy."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy

from elastic_refit.communicators.nccl_stream import Event, Region, Stream

__all__ = ["SONAME", "HostMemory"]

SONAME = "libnccl.so.2"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The device of a communicator over the stand-in: buffers are ``memoryview``, streams are the stand-in's."""

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def open_stream(self) -> Stream:
        return _HostStream()

    def locate(self, buffer: object, *, is_written: bool) -> Region:
        assert isinstance(buffer, memoryview)
        array = numpy.frombuffer(buffer, numpy.uint8) if buffer.nbytes else numpy.empty(0, numpy.uint8)
        if is_written and buffer.nbytes and not array.flags.writeable:
            raise ValueError("a buffer must be writable where it receives")
        return Region(array.ctypes.data, array.nbytes, array)


class _HostStream:
    def __init__(self) -> None:
        library = ctypes.CDLL(SONAME)
        library.standinStreamCreate.restype = ctypes.c_void_p
        library.standinStreamRecord.restype = ctypes.c_uint64
        library.standinStreamRecord.argtypes = [ctypes.c_void_p]
        library.standinStreamQuery.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        library.standinStreamDestroy.argtypes = [ctypes.c_void_p]
        self._library = library
        self.handle: int = library.standinStreamCreate()

    def follow_caller(self) -> None:
        """Host memory is there when it is there."""

    def record(self) -> Event:
        return _HostEvent(self._library, self.handle, self._library.standinStreamRecord(self.handle))

    def close(self) -> None:
        self._library.standinStreamDestroy(self.handle)


@dataclass(frozen=True, slots=True)
class _HostEvent:
    library: ctypes.CDLL
    stream: int
    mark: int

    def is_done(self) -> bool:
        return bool(self.library.standinStreamQuery(self.stream, self.mark))
