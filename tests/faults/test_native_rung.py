"""The last rung, in processes whose interpreter is stuck: it ends them on time and leaves their stacks behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_refit.watchdog import STACK_DUMP_SIGNAL

DEADLINE_S = 60

HOLD_GIL = """import ctypes
    while True:  # a signal ends the sleep of C
        ctypes.PyDLL(None).sleep(600)"""
"""PyDLL calls with the GIL held, so no other Python thread of the process runs."""
LET_GIL_GO = "import time; time.sleep(600)"

GUARDED = """
import sys
from elastic_refit.watchdog import RefitAbortWatchdog

def stuck_in_the_engine():
    {stuck}

with RefitAbortWatchdog().armed(epoch=3, abort_s=0.1, hard_s=60, rung_s=0.4, dump_path=sys.argv[1]) as armed:
    armed.tick()
    stuck_in_the_engine()
"""

TICKING = """
import sys, time
from elastic_refit.watchdog import RefitAbortWatchdog

with RefitAbortWatchdog().armed(epoch=3, abort_s=1.9, hard_s=60, rung_s=2.0, dump_path=sys.argv[1]) as armed:
    end = time.monotonic() + 2.6
    while time.monotonic() < end:
        armed.tick()
        time.sleep(0.01)
time.sleep(2.2)  # longer than the rung: it must be gone with the guard
print("survived")
"""

ASKED = """
import sys
from elastic_refit.watchdog import register_stack_dump_signal

register_stack_dump_signal(sys.argv[1])
print("ready", flush=True)

def stuck_in_the_engine():
    {stuck}

stuck_in_the_engine()
"""


def _start(script: str, dump: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, str(dump)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("stuck", [HOLD_GIL, LET_GIL_GO], ids=["gil held", "gil free"])
def test_a_process_that_cannot_leave_is_ended_with_its_stacks_written(tmp_path: Path, stuck: str) -> None:
    dump = tmp_path / "stacks.txt"
    process = _start(GUARDED.format(stuck=stuck), dump)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "Timeout" in dump.read_text()
    assert "stuck_in_the_engine" in dump.read_text()


def test_ticks_hold_the_rung_off_and_it_is_gone_with_the_guard(tmp_path: Path) -> None:
    dump = tmp_path / "stacks.txt"
    process = _start(TICKING, dump)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "survived\n")
    assert not dump.exists(), "a refit that needed no dump leaves no file"


@pytest.mark.parametrize("stuck", [HOLD_GIL, LET_GIL_GO], ids=["gil held", "gil free"])
def test_a_stuck_process_gives_its_stacks_when_it_is_asked_and_lives_on(tmp_path: Path, stuck: str) -> None:
    dump = tmp_path / "stacks.txt"
    process = _start(ASKED.format(stuck=stuck), dump)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + DEADLINE_S
        while "stuck_in_the_engine" not in dump.read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline
            os.kill(process.pid, STACK_DUMP_SIGNAL)
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
