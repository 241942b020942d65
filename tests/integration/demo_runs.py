"""Runs of the real command line in a process of its own, with every process that it starts accounted for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import RUN_MARK, describe, processes_of

ROOT = Path(__file__).resolve().parents[2]

Result = dict[str, Any]
"""The JSON of a run, as the command writes it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that is over. ``left`` describes every process of it that was still alive when it had exited."""

    exit_code: int
    result: Result
    output: str
    left: tuple[str, ...]

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]


@contextmanager
def started(*arguments: str, env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command running, and the mark of its processes. It is ended with the block, whatever happened."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, **(env or {}), RUN_MARK: f"{os.environ.get(RUN_MARK, '')} {mark}"}
    # A shell starts what it runs in the background with Ctrl-C ignored, and whatever that starts inherits it.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "elastic_refit.cli", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield process, mark
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def run(*arguments: str, timeout_s: float = 60, env: dict[str, str] | None = None) -> Finished:
    """Run a command that writes no result to its end."""
    with started(*arguments, env=env) as (process, mark):
        output, _ = process.communicate(timeout=timeout_s)
        left = tuple(describe(each) for each in processes_of(mark))
    return Finished(process.returncode, {}, output, left)


def run_demo(folder: Path, *arguments: str, timeout_s: float = 280) -> Finished:
    """Run ``elastic-refit demo`` to its end."""
    path = folder / "result.json"
    finished = run("demo", *arguments, "--json", str(path), timeout_s=timeout_s)
    result: Result = json.loads(path.read_text()) if path.exists() else {}
    return Finished(finished.exit_code, result, finished.output, finished.left)


def assert_proved(result: Result) -> None:
    """Every step's samples are the trainer's own policy, and the control fails: the version before is not."""
    assert result["steps"], "a run without steps proves nothing"
    for row in result["steps"]:
        assert row["logprob_gap"] < 1e-3, row
    for row in result["steps"][1:]:
        assert row["logprob_gap_previous"] > 1e-2, row


def assert_adds_up(incident: Result) -> None:
    """An incident's stages are all there and are its total."""
    stages = ("detect", "attribute", "fence", "abort", "settle", "rebuild", "resend")
    assert tuple(incident["seconds"]) == stages
    assert all(seconds >= 0 for seconds in incident["seconds"].values()), incident["seconds"]
    assert abs(sum(incident["seconds"].values()) - incident["total_s"]) < 1e-6
    assert Path(incident["path"]).is_file()


def column(result: Result, name: str) -> Sequence[Any]:
    return [row[name] for row in result["steps"]]
