"""Waiting for a condition with a deadline: the only sleeping that a test does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_until", "wait_while"]

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_s: float, *, interval_s: float = 0.01) -> T:
    """Return the first true value of ``condition()``.

    Raises:
        AssertionError: the condition was still false after ``timeout_s``; the message quotes it and its last value.
    """
    return _wait(condition, bool, timeout_s, interval_s)


def wait_while(condition: Callable[[], T], timeout_s: float, *, interval_s: float = 0.01) -> T:
    """Return the first false value of ``condition()``.

    Raises:
        AssertionError: the condition was still true after ``timeout_s``; the message quotes it and its last value.
    """
    return _wait(condition, lambda value: not value, timeout_s, interval_s)


def _wait(condition: Callable[[], T], is_met: Callable[[T], bool], timeout_s: float, interval_s: float) -> T:
    deadline = time.monotonic() + timeout_s
    while not is_met(value := condition()):
        if time.monotonic() >= deadline:
            name = getattr(condition, "__qualname__", repr(condition))
            raise AssertionError(f"{name} was still {value!r} after {timeout_s} s")
        time.sleep(interval_s)
    return value
