"""The fault matrix by its command: real fleets, real faults, and a cell that expects what does not happen."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.conftest import describe, processes_of
from tests.integration.demo_runs import run, started

pytestmark = [pytest.mark.ray, pytest.mark.faults]

CELLS = """
defaults: {trainers: 1, shards: 2}
cells:
  - {id: quiet, fault: none, outcome: continues, rebuilds: 0}
  - {id: killed, fault: kill, phase: "bucket:2", victim: 1, outcome: recovers, names: [1], rule: 1, rebuilds: 1}
  - {id: wrong, fault: kill, phase: ack, outcome: continues, rebuilds: 0, note: it is named}
  - {id: elsewhere, transport: reshard, fault: none, outcome: continues}
"""


@pytest.fixture
def cells(tmp_path: Path) -> Path:
    path = tmp_path / "cells.yaml"
    path.write_text(CELLS)
    return path


def test_cells_that_hold_pass_and_one_that_expects_something_false_fails_the_run(cells: Path, tmp_path: Path) -> None:
    path, picture = tmp_path / "out.json", tmp_path / "grid.svg"
    finished = run("matrix", "--file", str(cells), "--json", str(path), "--grid", str(picture), timeout_s=240)
    assert finished.exit_code == 1, finished.output
    assert path.exists(), finished.output
    result = json.loads(path.read_text())
    assert (result["passed"], result["failed"], result["not_run"], result["left"]) == (2, 1, 1, [])
    rows = {row["id"]: row for row in result["cells"]}
    assert list(rows) == ["quiet", "killed", "wrong", "elsewhere"]
    killed = rows["killed"]
    assert (killed["passed"], killed["names"], killed["rule"], killed["landed_in"]) == (True, [1], 1, "bucket:2")
    assert {"detect", "fence", "resend", "recover", "refit"} <= killed["seconds"].keys()
    assert rows["wrong"]["passed"] is False
    assert "the outcome is recovers, expected continues" in rows["wrong"]["why"]
    assert (rows["elsewhere"]["passed"], rows["elsewhere"]["status"]) == (False, "not_run")
    assert "2 of 3 cells passed; 1 not run" in picture.read_text()
    assert finished.left == ()


def test_a_file_that_cannot_be_is_refused_in_one_sentence_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "cells.yaml"
    path.write_text("cells: [{id: far, fault: kill, phase: ack, victim: 9, outcome: recovers, names: [9]}]\n")
    finished = run("matrix", "--file", str(path))
    assert finished.exit_code == 2
    assert finished.last_line == "elastic-refit: cell far: victim names shard 9; shards are 0 to 2"
    assert len(finished.output.strip().splitlines()) == 1


def test_an_interrupt_in_the_middle_of_a_cell_leaves_nothing_behind(cells: Path) -> None:
    with started("matrix", "--file", str(cells)) as (process, mark):
        assert process.stdout is not None
        for line in process.stdout:
            if "quiet" in line:
                break
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 130, output
        assert "Traceback" not in output
        assert [describe(each) for each in processes_of(mark)] == []
