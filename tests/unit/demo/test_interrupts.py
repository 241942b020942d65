"""An interrupt ends what it interrupts, wherever it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from elastic_refit.demo.interrupts import ignore_interrupts, interruptible

WAIT_S = 60.0


class InterruptedAtItsEnd:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(WAIT_S)


def wait() -> None:
    threading.Event().wait(WAIT_S)
    raise AssertionError("nothing has interrupted it")


@pytest.fixture(autouse=True)
def with_default_handler() -> Iterator[None]:
    """A run that was started in a shell's background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_unwind_the_stack_and_the_handlers_of_before_are_back_afterwards(number: int) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), interruptible():
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        wait()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook) == before


def test_an_interrupt_that_came_in_a_finalizer_comes_again() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        InterruptedAtItsEnd()
        wait()


def test_an_interrupt_that_came_in_a_hook_around_a_fork_comes_again() -> None:
    """In a process of its own: such a hook is for good."""
    script = """
import os, signal, subprocess, threading
from elastic_refit.demo.interrupts import interruptible
signal.signal(signal.SIGINT, signal.default_int_handler)
parent = os.getpid()

def interrupted():
    if os.getpid() == parent:
        os.kill(parent, signal.SIGINT)
        threading.Event().wait(60)

os.register_at_fork(before=interrupted)
try:
    with interruptible():
        subprocess.run(["true"], preexec_fn=lambda: None)
        threading.Event().wait(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert done.stdout == "interrupted\n"


def test_what_is_raised_otherwise_in_a_finalizer_is_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))

    class Raises:
        def __del__(self) -> None:
            raise ValueError("no")

    with interruptible():
        Raises()
    assert told == [ValueError]


def test_a_clean_up_is_not_cut_short() -> None:
    with interruptible():
        ignore_interrupts()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
