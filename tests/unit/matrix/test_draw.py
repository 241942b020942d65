"""Random cells: from a seed, possible, and with the outcome that follows from them."""

from __future__ import annotations

import pytest

from elastic_refit.errors import ConfigError
from elastic_refit.matrix.draw import draw_cells
from elastic_refit.matrix.validation import check_cells, why_not_run


def test_the_same_seed_draws_the_same_cells_and_another_seed_others() -> None:
    assert draw_cells(40, 7) == draw_cells(40, 7)
    assert draw_cells(40, 7) != draw_cells(40, 8)
    assert draw_cells(40, 7)[:10] == draw_cells(10, 7)


def test_every_cell_that_can_be_drawn_is_possible_and_is_run() -> None:
    cells = draw_cells(500, 1)
    check_cells(cells)
    assert [each.id for each in cells if why_not_run(each) is not None] == []
    assert {each.trainers for each in cells} == {1, 2, 3}
    assert {each.num_shards for each in cells} == {1, 2, 3, 4, 5, 6}
    assert {each.victim for each in cells} == {0, 1, 2, 3, 4, 5}
    assert len({each.id for each in cells}) == 500


def test_the_outcome_follows_from_what_was_drawn() -> None:
    for each in draw_cells(300, 2):
        if each.num_shards == 1:
            assert (each.outcome, each.error) == ("ends", "NoSurvivingShards")
        elif each.phase == "idle":
            assert (each.outcome, each.rebuilds) == ("continues", 1)
        else:
            assert (each.outcome, each.names) == ("recovers", [each.victim])
            assert each.rules == ({"kill": 1, "raise": 1, "freeze": 2, "gil": 2, "wedge": 3}[each.fault],)


def test_no_cells_cannot_be_drawn() -> None:
    with pytest.raises(ConfigError, match="0 cells are none"):
        draw_cells(0, 1)
