"""Memory that neighbouring ranks of one host share, so that a broadcast is copied once into it and once out per rank.

It is an anonymous sealed file: it cannot shrink under a reader, only its publisher can write, and it is gone with the
last descriptor. Descriptors travel over the authenticated links.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Self

from elastic_refit.errors import CommunicatorError

__all__ = ["SLOTS", "Window"]

SLOTS = 8
"""Chunks that the publisher may be ahead of the last reader."""
_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, since 5.1; this Python does not name it
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE


class Window:
    """``SLOTS`` chunks; chunk ``index`` of a broadcast lies in slot ``index % SLOTS``."""

    def __init__(self, fd: int, chunk_bytes: int, *, is_publisher: bool) -> None:
        self.fd = fd
        self._chunk_bytes = chunk_bytes
        access = mmap.ACCESS_WRITE if is_publisher else mmap.ACCESS_READ
        self._map = mmap.mmap(fd, SLOTS * chunk_bytes, access=access)

    @classmethod
    def create(cls, chunk_bytes: int) -> Self:
        fd = os.memfd_create("elastic-refit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, SLOTS * chunk_bytes)
            window = cls(fd, chunk_bytes, is_publisher=True)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(fd)
            raise
        return window

    @classmethod
    def map(cls, fd: int, chunk_bytes: int) -> Self:
        """A window that a peer has published. ``fd`` stays the caller's.

        Raises:
            CommunicatorError: ``fd`` is not such a window of such chunks.
        """
        try:
            seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        except OSError as error:
            raise CommunicatorError(f"what a peer published is no window: {error}") from error
        if not seals & fcntl.F_SEAL_SHRINK or size != SLOTS * chunk_bytes:
            raise CommunicatorError(
                f"a peer's window has {size} bytes and seals {seals:#x}, expected {SLOTS} chunks of {chunk_bytes}; "
                "every rank of a group needs the same chunk_bytes"
            )
        return cls(os.dup(fd), chunk_bytes, is_publisher=False)

    def is_file(self, fd: int) -> bool:
        return os.path.sameopenfile(self.fd, fd)

    def write(self, index: int, chunk: memoryview) -> None:
        start = index % SLOTS * self._chunk_bytes
        self._map[start : start + len(chunk)] = chunk

    def read(self, index: int, into: memoryview) -> None:
        start = index % SLOTS * self._chunk_bytes
        into[:] = memoryview(self._map)[start : start + len(into)]

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)
