"""The watch on an engine's processes: a death is told at once, and ends every call that waits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future

import psutil
import pytest

from elastic_refit.engines.watch import DeathWatch, end_processes, engine_processes
from elastic_refit.errors import ShardDied

WAIT_S = 30.0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def test_a_call_that_would_wait_for_ever_ends_with_the_death_of_a_process(child: subprocess.Popen[bytes]) -> None:
    watch, told = DeathWatch([child.pid]), Future[str]()
    watch.when_dead(told.set_result)
    child.kill()
    with pytest.raises(ShardDied, match=str(child.pid)):
        watch.race(Future())
    assert told.result(WAIT_S) == watch.death
    late = Future[str]()
    watch.when_dead(late.set_result)
    assert late.done()


def test_an_answer_that_came_is_the_answer_whoever_died_after_it(child: subprocess.Popen[bytes]) -> None:
    watch, answered, failed = DeathWatch([child.pid]), Future[int](), Future[int]()
    answered.set_result(3)
    failed.set_exception(ValueError("its own"))
    child.kill()
    with pytest.raises(ShardDied):
        watch.race(Future())
    assert watch.race(answered) == 3
    with pytest.raises(ValueError, match="its own"):
        watch.race(failed)


def test_after_the_watch_is_closed_no_death_is_told_and_nobody_waits(child: subprocess.Popen[bytes]) -> None:
    watch, told = DeathWatch([child.pid]), Future[str]()
    watch.when_dead(told.set_result)
    watch.close()
    with pytest.raises(ShardDied, match="closed"):
        watch.race(Future())
    end_processes([child.pid], timeout_s=WAIT_S)
    assert not psutil.pid_exists(child.pid)
    assert watch.death is None
    assert not told.done()


def test_the_processes_of_an_engine_are_all_that_descend_from_this_one(child: subprocess.Popen[bytes]) -> None:
    assert child.pid in engine_processes()
    end_processes([child.pid], timeout_s=WAIT_S)
    assert child.pid not in engine_processes()
    end_processes([child.pid], timeout_s=WAIT_S)


NEGLIGENT = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER (prctl(2))
spawn = "sleep 600 >/dev/null 2>&1 & echo $!"
print(int(subprocess.run(["sh", "-c", spawn], capture_output=True, check=True).stdout), flush=True)
sys.stdin.read()
"""
"""Inherits a process, and never reaps it."""


def test_who_was_inherited_and_is_never_reaped_is_gone_all_the_same() -> None:
    with subprocess.Popen([sys.executable, "-c", NEGLIGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        orphan = psutil.Process(int(parent.stdout.readline()))
        end_processes([orphan.pid], timeout_s=3600.0)
        assert orphan.status() == psutil.STATUS_ZOMBIE
        assert parent.stdin is not None
        parent.stdin.close()
