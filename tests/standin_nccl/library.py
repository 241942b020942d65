"""A libnccl.so.2 for machines without a GPU: built from the C files here, loaded by the real nccl4py.

A process has it if it was started under ``environment``: preloaded, so that it is found before any that is installed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from elastic_refit.communicators.nccl_stream import Event, Region, Stream

__all__ = ["HostMemory", "build_library", "environment"]

SONAME = "libnccl.so.2"
SOURCES = sorted(Path(__file__).parent.glob("*.c"))


def build_library(folder: Path) -> Path:
    """Compile it into ``folder``."""
    compiler = shutil.which("cc")
    assert compiler, "the tests of the nccl communicator need a C compiler called cc (on Debian: gcc and libc6-dev)"
    library = folder / SONAME
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread", f"-Wl,-soname,{SONAME}"]
    command = [compiler, *flags, "-o", str(library), *map(str, SOURCES)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return library


@contextmanager
def environment(library: Path, **switches: str) -> Iterator[None]:
    """What processes started inside load; for the ``switches`` see nccl.c."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        for name, value in switches.items():
            patch.setenv(f"STANDIN_NCCL_{name}", value)
        yield


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
