"""Shared memory of processes that were killed: nobody is left to remove it, so whoever killed them does."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_refit.core.ids import ProcessId
from elastic_refit.processes import end_all, identify, kill_proved
from elastic_refit.shared_memory import mapped_segments

pytestmark = pytest.mark.faults

MAPPER = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    kept = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
time.sleep(600)
"""


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/elastic-refit-test-{os.getpid()}")
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


def mapper(segment: Path, prelude: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", prelude + MAPPER, str(segment)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    return process


def identity(process: subprocess.Popen[str]) -> ProcessId:
    return identify(process.pid, "here")


def test_a_segment_goes_with_the_last_process_that_had_mapped_it(segment: Path) -> None:
    with mapper(segment) as first, mapper(segment) as second:
        assert mapped_segments([identity(first)]) == {str(segment)}
        assert kill_proved([identity(first)], timeout_s=10) == []
        assert segment.exists(), "somebody still uses it"
        assert kill_proved([identity(second)], timeout_s=10) == []
        assert not segment.exists()


def test_a_segment_that_was_removed_by_its_owner_is_none(segment: Path) -> None:
    with mapper(segment) as process:
        segment.unlink()
        assert mapped_segments([identity(process)]) == set()
        assert kill_proved([identity(process)], timeout_s=10) == []


def test_a_semaphore_is_found_by_what_is_mapped_as_its_path_is_not_there() -> None:
    before = set(os.listdir("/dev/shm"))
    held = multiprocessing.get_context("spawn").Lock()
    made = {f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - before if name.startswith("sem.")}
    assert made & mapped_segments([identify(os.getpid(), "here")])
    del held


def test_whoever_ends_what_it_finds_removes_its_segments(segment: Path) -> None:
    with mapper(segment) as process:
        assert end_all(lambda: [psutil.Process(process.pid)] if process.poll() is None else [], timeout_s=10) == []
        assert not segment.exists()


def test_a_process_that_ends_with_another_takes_its_segments_along(segment: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as owner:
        bound = f"from elastic_refit.processes import exit_with; exit_with({owner.pid})"
        with mapper(segment, bound) as process:
            assert segment.exists()
            owner.kill()
            assert process.wait(10) == 1
            assert not segment.exists()
