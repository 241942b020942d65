"""What a run of the matrix comes to: counts, the JSON, and the time that recovery took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_refit.matrix.results import CellResult, MatrixResult, not_run, time_to_recover
from tests.unit.matrix.observations import cell


def result(name: str, **changes: Any) -> CellResult:
    facts: dict[str, Any] = {"status": "passed", "state": "HEALTHY", "fault": "kill", "outcome": "recovers"}
    return CellResult(id=name, **{**facts, **changes})


def test_a_cell_that_was_not_run_is_counted_as_such_and_never_as_passed() -> None:
    found = MatrixResult([result("a"), not_run(cell(id="b"), "no restarts yet")])
    data = found.to_dict()
    assert (data["passed"], data["failed"], data["not_run"]) == (1, 0, 1)
    assert data["cells"][1]["passed"] is False
    assert data["cells"][1]["why"] == "no restarts yet"
    assert found.ok


def test_one_failed_cell_or_one_thing_left_behind_is_enough_to_fail_a_run() -> None:
    assert not MatrixResult([result("a"), result("b", status="failed")]).ok
    assert not MatrixResult([result("a")], left=["pid 7"]).ok


def test_the_json_has_what_a_reader_of_one_cell_asks_for(tmp_path: Path) -> None:
    seconds = {"detect": 0.1, "recover": 0.5, "refit": 0.1, "cell": 3.0}
    seen = result(
        "a", names=(0,), rule=(1,), landed_in=("bucket:2",), seconds=seconds, refit_multiple=5.0, sentence="s"
    )
    MatrixResult([seen], seed=7, stall_s=2.0).write(tmp_path / "out.json")
    data = json.loads((tmp_path / "out.json").read_text())
    (row,) = data["cells"]
    assert data["seed"] == 7
    assert {"id", "passed", "outcome", "names", "rule", "error", "sentence", "landed_in", "seconds"} <= row.keys()
    assert {"refit_multiple", "why"} <= row.keys()
    assert (row["rule"], row["names"], row["landed_in"]) == (1, [0], "bucket:2")
    assert not list(tmp_path.glob("*.tmp"))


def test_time_to_recover_is_of_cells_that_recovered_and_aims_at_a_constant_and_one_refit() -> None:
    cells = [
        result(f"k{number}", seconds={"recover": 0.1 * number, "refit": 0.2, "cell": 1.0}) for number in range(1, 21)
    ]
    cells.append(result("f", fault="freeze", seconds={"recover": 3.5, "refit": 0.2, "cell": 5.0}))
    cells.append(result("ended", outcome="ends", seconds={"recover": 99.0, "refit": 0.2, "cell": 1.0}))
    cells.append(result("cold", seconds={"recover": 0.3, "cell": 1.0}))
    found = time_to_recover(cells, stall_s=2.0)
    assert found["kill"].cells == 21
    assert found["kill"].p95_s == pytest.approx(1.9)
    assert found["kill"].limit_s == pytest.approx(1.2)
    assert found["freeze"].limit_s == pytest.approx(3.7)
    assert time_to_recover([], stall_s=2.0) == {}
