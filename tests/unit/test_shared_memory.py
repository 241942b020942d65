"""Shared memory of processes that were killed: nobody is left to remove it, so whoever killed them does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_refit.core.ids import ProcessId
from elastic_refit.processes import identify, kill_proved, mapped_segments

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


def mapper(segment: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", MAPPER, str(segment)], stdout=subprocess.PIPE, text=True)
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
