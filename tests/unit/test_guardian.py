"""What a killed process had started ends with it; what a process leaves on purpose stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from elastic_refit.processes import is_living
from tests.waiting import wait_until, wait_while

pytestmark = pytest.mark.faults

GUARDED = """
import subprocess, sys, time
from elastic_refit.guardian import guarded
sleeper = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
nested = f"import subprocess; subprocess.run({sleeper!r}, start_new_session=True)"
with guarded():
    before = subprocess.Popen([sys.executable, "-c", nested], stdout=subprocess.PIPE)
    before.stdout.readline()
    print(before.pid, flush=True)
    sys.stdin.readline()
print("left the body", flush=True)
"""


def _start() -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A guarded process in its body, and the two that it has started: a child, and that one's child."""
    process = subprocess.Popen(
        [sys.executable, "-c", GUARDED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    return process, [child, *child.children()]


def _living(processes: list[psutil.Process]) -> list[int]:
    return [each.pid for each in processes if is_living(each)]


def test_a_killed_process_takes_along_what_it_started_the_frozen_and_the_detached_too() -> None:
    process, started = _start()
    with process:
        assert len(started) == 2
        os.kill(started[0].pid, signal.SIGSTOP)
        wait_until(lambda: started[0].status() == psutil.STATUS_STOPPED, timeout_s=10)
        process.kill()
        process.wait()
        wait_while(lambda: _living(started), timeout_s=30)


def test_after_an_orderly_end_of_the_body_nothing_is_ended_and_no_guardian_is_left() -> None:
    process, started = _start()
    with process:
        assert process.stdout is not None
        guardians = [each for each in psutil.Process(process.pid).children() if each not in started]
        output, _ = process.communicate("leave\n")
        assert "left the body" in output
        assert _living(guardians) == []
        assert len(_living(started)) == 2
        for each in started:
            each.kill()
