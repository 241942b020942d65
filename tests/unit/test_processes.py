"""Processes are ended for good, and only the ones that were meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from elastic_refit.processes import end_descendants, identify, kill_proved
from tests.waiting import wait_until

pytestmark = pytest.mark.faults

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEPER) as process:
        yield process
        process.kill()


def test_a_running_process_is_killed_and_proved_gone(sleeper: subprocess.Popen[bytes]) -> None:
    assert kill_proved([identify(sleeper.pid, "here")], timeout_s=10) == []
    assert sleeper.wait(timeout=10) == -signal.SIGKILL


def test_a_stopped_process_is_killed_too(sleeper: subprocess.Popen[bytes]) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED, timeout_s=10)
    assert kill_proved([identify(sleeper.pid, "here")], timeout_s=10) == []
    assert sleeper.wait(timeout=10) == -signal.SIGKILL


def test_another_process_with_the_same_pid_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    recorded = identify(sleeper.pid, "here")
    earlier = replace(recorded, start_ticks=recorded.start_ticks - 1)
    assert kill_proved([earlier], timeout_s=10) == []
    assert sleeper.poll() is None


def test_a_process_that_is_gone_already_is_no_error(sleeper: subprocess.Popen[bytes]) -> None:
    recorded = identify(sleeper.pid, "here")
    sleeper.kill()
    sleeper.wait()
    assert kill_proved([recorded], timeout_s=10) == []
    with pytest.raises(ProcessLookupError):
        identify(sleeper.pid, "here")


def test_descendants_end_with_their_own_children_and_others_are_spared(sleeper: subprocess.Popen[bytes]) -> None:
    nested = f"import subprocess; subprocess.run({SLEEPER!r})"
    with subprocess.Popen([sys.executable, "-c", nested]) as parent:
        child = wait_until(lambda: psutil.Process(parent.pid).children(), timeout_s=10)[0]
        spared = [each.pid for each in psutil.Process().children() if each.pid != parent.pid]
        assert end_descendants(timeout_s=10, besides=spared) == []
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert sleeper.poll() is None
