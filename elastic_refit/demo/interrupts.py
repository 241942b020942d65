"""Ctrl-C and SIGTERM: both unwind the stack, at any moment, and neither is lost.

What must never happen here: an interrupt that a driver survives because it came where Python drops exceptions, or a
clean-up that a second one cuts short.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["ignore_interrupts", "interruptible", "unwind_on_sigterm"]

_AGAIN_S = 0.05


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does; afterwards as before. For the main thread.

    Python only prints what is raised in a finalizer, or in a hook around a fork (Ray forks with hooks): an interrupt
    that was dropped in one is sent again.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    hook = sys.unraisablehook

    def dropped(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            unwinds = before[signal.SIGINT] is signal.default_int_handler
            number = signal.SIGINT if unwinds else signal.SIGTERM
            threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()
        else:
            hook(unraisable)

    unwind_on_sigterm()
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def unwind_on_sigterm() -> None:
    """Again, where a library has set a handler of its own meanwhile."""
    signal.signal(signal.SIGTERM, _unwind)


def ignore_interrupts() -> None:
    """From here on: for a clean-up that is bounded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _unwind(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
