"""What a person sees of a run: a table that lives on a terminal, one line per cell where there is none."""

from __future__ import annotations

import time

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.grid import grid_table
from elastic_refit.matrix.results import CellResult, MatrixResult, time_to_recover

__all__ = ["Display"]

_MARKS = {"passed": "[green]passed[/green]", "failed": "[red]FAILED[/red]", "not_run": "[dim]not run[/dim]"}
_SHOWN = 12
_REFRESHES_PER_S = 4


class Display:
    """Use as a context; afterwards the terminal is as it was. ``total`` cells are to be run."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done: list[CellResult] = []
        self._running: dict[str, float] = {}
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=_REFRESHES_PER_S)
        self._live.transient = True

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def began(self, cell: Cell) -> None:
        self._running[cell.id] = time.monotonic()

    def ended(self, result: CellResult) -> None:
        self._running.pop(result.id, None)
        self._done.append(result)
        number = f"{len(self._done)}/{self._total}"
        if not self._console.is_terminal or result.status == "failed":
            self.say(f"{number:>7} {result.status.replace('_', ' '):<8} {result.id:<28} {_told(result)}")

    def say(self, line: str) -> None:
        """One line that stays."""
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def summary(self, result: MatrixResult) -> None:
        """The grid, what recovery cost, and what was left behind."""
        self._console.print(grid_table(result.cells))
        for fault, times in time_to_recover(result.cells, stall_s=result.stall_s).items():
            self.say(
                f"time to recover from a {fault}: p50 {times.p50_s:.2f} s, p95 {times.p95_s:.2f} s over {times.cells} "
                f"cells; aim {times.limit_s:.2f} s"
            )
        for line in result.left:
            self.say(f"LEFT BEHIND: {line}")

    def _table(self) -> Table:
        failed = sum(result.status == "failed" for result in self._done)
        title = f"{len(self._done)} of {self._total} cells, {failed} failed"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for heading in ("cell", "result", "outcome", "names", "rule", "landed in", "recover"):
            table.add_column(heading, no_wrap=True)
        for result in self._done[-_SHOWN:]:
            rules = ",".join(map(str, result.rule))
            recover = result.seconds.get("recover")
            table.add_row(
                result.id,
                _MARKS[result.status],
                result.outcome or "",
                ", ".join(_named(result)),
                rules,
                ", ".join(result.landed_in),
                "" if recover is None else f"{recover:.2f} s",
            )
        for name, since_s in self._running.items():
            table.add_row(name, f"[yellow]{time.monotonic() - since_s:.0f} s …[/yellow]")
        return table


def _told(result: CellResult) -> str:
    if result.why:
        return f"{result.seconds.get('cell', 0):5.1f} s  {result.why}" if result.seconds else result.why
    parts = [f"{result.seconds['cell']:5.1f} s ", result.outcome or ""]
    if named := _named(result):
        parts.append(f"{', '.join(named)} by rule {', '.join(map(str, result.rule))}")
    if result.error is not None:
        parts.append(result.error)
    if "recover" in result.seconds:
        parts.append(f"in {result.seconds['recover']:.2f} s")
        if result.refit_multiple is not None:
            parts.append(f"({result.refit_multiple:.0f} refits)")
    return " ".join(parts)


def _named(result: CellResult) -> list[str]:
    trainers, shards = result.trainers, result.names
    return [*(f"trainer[{index}]" for index in trainers), *(f"shard[{index}]" for index in shards)]
