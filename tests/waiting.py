"""Waiting for a condition with a deadline: the only sleeping that a test does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_until"]

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_s: float, *, interval_s: float = 0.01) -> T:
    """Return the first true value of ``condition()``.

    Raises:
        AssertionError: the condition was still false after ``timeout_s``; the message quotes it and its last value.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            name = getattr(condition, "__qualname__", repr(condition))
            raise AssertionError(f"{name} was still {value!r} after {timeout_s} s")
        time.sleep(interval_s)
    return value
