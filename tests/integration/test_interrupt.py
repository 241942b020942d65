"""Ctrl-C, or a plain SIGTERM, at any moment: the run ends and nothing of it is left."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.conftest import describe, processes_of
from tests.integration.demo_runs import started
from tests.waiting import wait_until, wait_while

pytestmark = [pytest.mark.ray, pytest.mark.faults]


SMALL = ("--engine", "torch", "--shards", "1", "--trainers", "1", "--steps", "50")


@pytest.mark.parametrize(("moment", "sent"), [("loading", signal.SIGINT), ("step 1:", signal.SIGTERM)])
def test_an_interrupt_leaves_no_process_behind(moment: str, sent: signal.Signals) -> None:
    with started("demo", *SMALL) as (process, mark):
        _read_until(process, moment)
        process.send_signal(sent)
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 130, output
        assert "Traceback" not in output
        assert [describe(each) for each in processes_of(mark)] == []


def test_an_interrupt_while_ray_starts_leaves_no_process_behind() -> None:
    with started("demo", *SMALL) as (process, mark):
        wait_until(lambda: len(list(processes_of(mark))) > 1, timeout_s=60)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 130, output
        assert [describe(each) for each in processes_of(mark)] == []


def test_the_end_of_a_killed_driver_is_the_end_of_its_processes() -> None:
    with started("demo", *SMALL) as (process, mark):
        _read_until(process, "step 1:")
        process.kill()
        process.wait()
        wait_while(lambda: [describe(each) for each in processes_of(mark)], timeout_s=60)


def _read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"the run ended before it said {text!r}: {''.join(seen)}")
