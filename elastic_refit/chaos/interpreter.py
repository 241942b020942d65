"""Holds the interpreter, so that no other thread of the process runs any Python."""

from __future__ import annotations

import ctypes
import time

__all__ = ["hold_interpreter"]

_FOR_EVER_S = 3600.0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def hold_interpreter(seconds: float | None) -> None:
    """Be in a C call with the GIL held for ``seconds``; None: until the process is ended, or for an hour.

    It waits for a mutex that it holds itself: unlike a sleep, that is resumed after a signal (pthread_mutex_lock(3p)),
    so whoever asks the process for its stacks does not set it free.
    """
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(128)  # larger than any pthread_mutex_t; zeros are an unlocked one
    libc.pthread_mutex_lock(mutex)
    until = time.time() + (_FOR_EVER_S if seconds is None else seconds)
    limit = _Timespec(int(until), int(until % 1 * 1e9))
    libc.pthread_mutex_timedlock(mutex, ctypes.byref(limit))
