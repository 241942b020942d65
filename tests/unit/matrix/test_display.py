"""What is printed where there is no terminal: a line for every cell, and what the run came to."""

from __future__ import annotations

from rich.console import Console

from elastic_refit.matrix.display import Display
from elastic_refit.matrix.results import CellResult, MatrixResult, not_run
from tests.unit.matrix.observations import cell

KILLED = CellResult(
    "kill-mid",
    "passed",
    "HEALTHY",
    "kill",
    outcome="recovers",
    names=(0,),
    rule=(1,),
    seconds={"recover": 0.5, "refit": 0.1, "cell": 3.0},
    refit_multiple=5.0,
)


def test_every_cell_has_its_line_and_a_failed_one_says_why() -> None:
    console = Console(width=120)
    failed = CellResult("lost", "failed", "HEALTHY", seconds={"cell": 1.0}, why="the outcome is ends")
    with console.capture() as captured, Display(console, 3) as display:
        display.began(cell(id="kill-mid"))
        display.ended(KILLED)
        display.ended(failed)
        display.ended(not_run(cell(id="later"), "not built yet"))
    first, second, third = (" ".join(line.split()) for line in captured.get().splitlines())
    assert first == "1/3 passed kill-mid 3.0 s recovers shard[0] by rule 1 in 0.50 s (5 refits)"
    assert second == "2/3 failed lost 1.0 s the outcome is ends"
    assert third == "3/3 not run later not built yet"


def test_the_summary_tells_the_grid_the_cost_of_recovery_and_what_was_left() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        Display(console, 1).summary(MatrixResult([KILLED], left=["pid 7"], stall_s=2.0))
    said = captured.get()
    assert "time to recover from a kill: p50 0.50 s, p95 0.50 s over 1 cells; aim 1.10 s" in said
    assert "LEFT BEHIND: pid 7" in said
    assert "1 of 1" in said
