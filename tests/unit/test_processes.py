"""Processes are ended for good, and only the ones that were meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from elastic_refit.processes import end_descendants, identify, is_living, kill_proved, wait_until_running
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
        assert not is_living(child)
    assert sleeper.poll() is None


def test_a_process_ends_with_the_one_that_it_must_not_outlive(sleeper: subprocess.Popen[bytes]) -> None:
    bound = f"from elastic_refit.processes import exit_with; exit_with({sleeper.pid}); print('bound', flush=True)"
    command = [sys.executable, "-c", f"{bound}; import threading; threading.Event().wait()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"bound\n"
        assert process.poll() is None
        sleeper.kill()
        sleeper.wait()
        assert process.wait(timeout=30) == 1
        process.stdout.read()
    late = subprocess.run([sys.executable, "-c", bound], capture_output=True, check=False)
    assert (late.returncode, late.stdout) == (1, b"")


def test_a_stopped_process_is_waited_for_until_it_runs_again_and_one_that_is_gone_is_not(
    sleeper: subprocess.Popen[bytes],
) -> None:
    recorded = identify(sleeper.pid, "here")
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED, timeout_s=10)
    waiting = threading.Thread(target=wait_until_running, args=([recorded],))
    waiting.start()
    assert waiting.is_alive()
    os.kill(sleeper.pid, signal.SIGCONT)
    waiting.join(30)
    assert not waiting.is_alive()
    sleeper.kill()
    sleeper.wait()
    wait_until_running([recorded])
