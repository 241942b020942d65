"""The grid: who is counted in which field, and a picture that is the same for the same run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from elastic_refit.errors import ConfigError
from elastic_refit.matrix.grid import draw_grid, grid_table, require_drawable, tally
from elastic_refit.matrix.results import CellResult, not_run
from tests.unit.matrix.observations import cell

RUN = [
    CellResult("a", "passed", "HEALTHY", outcome="recovers"),
    CellResult("b", "failed", "HEALTHY", outcome="ends", expected="recovers"),
    CellResult("c", "passed", "SUSPECT", outcome="ends"),
    CellResult("d", "failed", "STALE", expected="continues"),
    not_run(cell(id="e"), "later"),
]


def test_a_cell_that_ran_is_in_the_field_of_its_state_and_the_outcome_that_it_asks_for() -> None:
    found = tally(RUN)
    assert [each.id for each in found["HEALTHY", "recovers"]] == ["a", "b"]
    assert [each.id for each in found["STALE", "continues"]] == ["d"]
    assert sum(map(len, found.values())) == 4


def test_the_table_says_how_many_of_a_field_passed() -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(grid_table(RUN))
    assert re.search(r"HEALTHY\s+·\s+1 of 2\s+·", captured.get())


@pytest.mark.parametrize("name", ["grid.svg", "grid.png"])
def test_the_picture_is_a_file_of_its_kind_and_the_same_every_time(tmp_path: Path, name: str) -> None:
    (tmp_path / "again").mkdir()
    require_drawable(tmp_path / name)
    for folder in (tmp_path, tmp_path / "again"):
        draw_grid(RUN, folder / name)
    first, second = (tmp_path / name).read_bytes(), (tmp_path / "again" / name).read_bytes()
    assert first == second
    assert b"2 of 4 cells passed; 1 not run" in first if name.endswith("svg") else first.startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.svg or \.png"):
        require_drawable(tmp_path / "grid.jpeg")
    with pytest.raises(ConfigError, match="there is no folder"):
        require_drawable(tmp_path / "nowhere" / "grid.svg")
