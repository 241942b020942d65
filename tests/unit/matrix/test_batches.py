"""Which cells share a fleet, and that what ends one comes last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic_refit.matrix.batches import batches_of
from elastic_refit.matrix.cells import load_cells
from elastic_refit.matrix.shape import shape_of
from tests.unit.matrix.observations import cell

OWN = Path(__file__).resolve().parents[3] / "configs" / "matrix.yaml"


def test_every_cell_is_in_one_batch_whose_cells_all_fit_on_one_fleet() -> None:
    cells = load_cells(OWN)
    for jobs in (1, 2, 5):
        batches = batches_of(cells, jobs)
        assert sorted(each.id for batch in batches for each in batch) == sorted(each.id for each in cells)
        assert all(len({shape_of(each) for each in batch}) == 1 for batch in batches)
        assert [len(batch) for batch in batches] == sorted(map(len, batches), reverse=True)


def test_a_batch_that_is_longer_than_its_share_is_cut() -> None:
    cells = [cell(id=str(number)) for number in range(10)]
    assert [len(batch) for batch in batches_of(cells, 1)] == [10]
    assert [len(batch) for batch in batches_of(cells, 3)] == [4, 3, 3]


def test_what_a_fleet_does_not_survive_comes_last_and_cold_cells_before_it() -> None:
    lost = cell(id="lost", trainer_victim=1, outcome="ends", error="TrainerLost", names=None, rule=None)
    retired = cell(id="retired", state="RETIRED", fault="none", phase=None, outcome="continues", names=None, rule=None)
    led = cell(id="led", actor="coordinator", outcome="continues", names=None, rule=None)
    (batch,) = batches_of([lost, cell(id="cold", cold=True), led, retired, cell(id="mid")], 1)
    assert [each.id for each in batch] == ["mid", "cold", "lost", "led", "retired"]


def test_another_width_commit_or_budget_is_another_fleet() -> None:
    changes: list[dict[str, Any]] = [{}, {"widths": [2, 1, 1]}, {"commit": "staged"}, {"max_recoveries": 2}]
    assert len(batches_of([cell(id=str(n), **change) for n, change in enumerate(changes)], 1)) == 4
