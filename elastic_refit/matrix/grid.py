"""The grid of a run: what the ledger thought against what followed, as a table and as a picture.

The picture is drawn with matplotlib (the extra ``matrix``), which is imported when one is asked for and not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from elastic_refit.errors import ConfigError
from elastic_refit.matrix.cells import STATES
from elastic_refit.matrix.results import CellResult

__all__ = ["OUTCOMES", "draw_grid", "grid_table", "require_drawable", "tally"]

OUTCOMES = ("continues", "recovers", "ends")
_FORMATS = (".svg", ".png")
_COLOURS = {"passed": "#2e7d32", "failed": "#c62828", "not_run": "#9e9e9e"}
_PER_ROW = 12
_DOT = 0.9

Tally = dict[tuple[str, str], list[CellResult]]


def tally(cells: Sequence[CellResult]) -> Tally:
    """The cells by state and outcome; a failed one where it asks to be, and what was not run in none."""
    found: Tally = {}
    for cell in cells:
        outcome = cell.outcome if cell.passed else cell.expected
        if outcome in OUTCOMES:
            found.setdefault((cell.state, outcome), []).append(cell)
    return found


def grid_table(cells: Sequence[CellResult]) -> Table:
    """Passed of run, by state and outcome."""
    table = Table(title="the ledger thought × what followed: passed of run", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("state")
    for outcome in OUTCOMES:
        table.add_column(outcome, justify="right")
    found = tally(cells)
    for state in STATES:
        row = [found.get((state, outcome), []) for outcome in OUTCOMES]
        table.add_row(state, *(f"{sum(cell.passed for cell in part)} of {len(part)}" if part else "·" for part in row))
    return table


def require_drawable(path: Path) -> None:
    """Raises ConfigError if no picture can be written to ``path``: before the run, not after it."""
    if path.suffix not in _FORMATS:
        raise ConfigError(f"--grid: {str(path)!r} must end in {' or '.join(_FORMATS)}", field="grid")
    if not path.parent.is_dir():
        raise ConfigError(f"--grid: there is no folder {str(path.parent)!r} to write into", field="grid")
    _matplotlib()


def draw_grid(cells: Sequence[CellResult], path: Path) -> None:
    """One square per cell in the field of its state and outcome, green where it passed; the same every time."""
    matplotlib = _matplotlib()
    figure = matplotlib.figure.Figure(figsize=(10, 4.8), layout="constrained")
    axes = figure.subplots()
    found, rows = tally(cells), list(STATES)
    for y, state in enumerate(rows):
        for x, outcome in enumerate(OUTCOMES):
            _draw_field(axes, found.get((state, outcome), []), x=x, y=y)
    for y in range(1, len(rows)):
        axes.axhline(y - 0.5, color="#dddddd", linewidth=0.8)
    for x in range(1, len(OUTCOMES)):
        axes.axvline(x - 0.5, color="#dddddd", linewidth=0.8)
    axes.set(xlim=(-0.5, len(OUTCOMES) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xticks(range(len(OUTCOMES)), OUTCOMES)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    passed, ran = sum(cell.passed for cell in cells), sum(cell.status != "not_run" for cell in cells)
    axes.set_title(f"{passed} of {ran} cells passed; {len(cells) - ran} not run", loc="left")
    with matplotlib.rc_context({"svg.hashsalt": "elastic-refit", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_field(axes: Any, cells: Sequence[CellResult], *, x: int, y: int) -> None:
    for number, cell in enumerate(sorted(cells, key=lambda each: each.status != "failed")):
        across, down = number % _PER_ROW, number // _PER_ROW
        left, top = x - 0.46 + across * _DOT / _PER_ROW, y - 0.38 + down * 0.2
        axes.add_patch(_rectangle()((left, top), 0.062, 0.15, color=_COLOURS[cell.status], linewidth=0))


def _rectangle() -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle


def _matplotlib() -> Any:
    """Its types are its own; no pyplot, so no global state and no display."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise ConfigError("--grid: matplotlib is not installed: pip install 'elastic-refit[matrix]'") from None
    return matplotlib
