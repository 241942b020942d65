"""The matrix from a file to an exit code."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from elastic_refit.config import RayConfig, RunConfig
from elastic_refit.demo.cluster import cluster
from elastic_refit.engines.registry import require_engine
from elastic_refit.errors import ConfigError
from elastic_refit.forking.workers import VLLM_MODULES, WORKER_MODULES
from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.display import Display
from elastic_refit.matrix.grid import draw_grid, require_drawable
from elastic_refit.matrix.results import CellResult, MatrixResult, broke, not_run
from elastic_refit.matrix.running import Watcher, run_cells
from elastic_refit.matrix.shape import lab_deadlines
from elastic_refit.matrix.validation import check_cells, why_not_run
from elastic_refit.processes import living_descendants

__all__ = ["Asked", "run_matrix"]


@dataclass(frozen=True, slots=True)
class Asked:
    """How to run, and where to put the results. ``seed``: that of cells that were drawn."""

    jobs: int = 1
    seed: int | None = None
    json_path: Path | None = None
    grid_path: Path | None = None
    ray_address: str | None = None


def run_matrix(cells: Sequence[Cell], asked: Asked, console: Console) -> int:
    """Run the cells; returns the exit code: 0 if none failed and nothing was left behind, else 1.

    Raises:
        ConfigError: a cell cannot be, or something else that the user set cannot be used. Nothing was started.
    """
    check_cells(cells)
    _check_outputs(asked)
    why = {cell.id: reason for cell in cells if (reason := why_not_run(cell)) is not None}
    to_run = [cell for cell in cells if cell.id not in why]
    for engine in sorted({cell.engine for cell in to_run}):
        require_engine(engine)
    result = MatrixResult(seed=asked.seed, stall_s=lab_deadlines().stall_s)
    with Display(console, len(cells)) as display:

        def ended(done: CellResult) -> None:
            result.cells.append(done)
            display.ended(done)

        watcher = Watcher(display.began, ended)
        for cell in cells:
            if cell.id in why:
                watcher.ended(not_run(cell, why[cell.id]))
        if to_run:
            result.left = _run(to_run, asked, watcher)
    done = {each.id for each in result.cells}
    why_none = "the thread that ran it ended without a result"
    result.cells += [broke(cell, why_none) for cell in cells if cell.id not in done]
    order = {cell.id: number for number, cell in enumerate(cells)}
    result.cells.sort(key=lambda each: order[each.id])
    return _conclude(result, asked, display)


def _run(cells: Sequence[Cell], asked: Asked, watcher: Watcher) -> list[str]:
    config = RunConfig(ray=RayConfig(address=asked.ray_address))
    forks = WORKER_MODULES + (VLLM_MODULES if any(cell.engine == "vllm" for cell in cells) else ())
    children = {child.pid for child in psutil.Process().children()}
    with tempfile.TemporaryDirectory(prefix="elastic-refit-matrix-") as folder:
        with cluster(config, has_dashboard=False, forks=forks):
            left, segments = run_cells(cells, Path(folder), jobs=asked.jobs, watcher=watcher)
    left += [f"pid {pid}" for pid in living_descendants(besides=children)]
    return left + [f"shared memory {segment}" for segment in sorted(segments) if Path(segment).exists()]


def _check_outputs(asked: Asked) -> None:
    if asked.json_path is not None and not asked.json_path.parent.is_dir():
        raise ConfigError(f"--json: there is no folder {str(asked.json_path.parent)!r} to write into", field="json")
    if asked.grid_path is not None:
        require_drawable(asked.grid_path)
    if asked.jobs < 1:
        raise ConfigError(f"--jobs: {asked.jobs} is none; use at least 1", field="jobs")


def _conclude(result: MatrixResult, asked: Asked, display: Display) -> int:
    display.summary(result)
    if asked.json_path is not None:
        result.write(asked.json_path)
    if asked.grid_path is not None:
        draw_grid(result.cells, asked.grid_path)
    counts = f"{result.count('passed')} passed, {result.count('failed')} failed, {result.count('not_run')} not run"
    display.say(f"{'ok' if result.ok else 'NOT ok'}: {counts}")
    return 0 if result.ok else 1
