"""What a person sees while the demo runs: bars on a terminal, one line per event where there is none."""

from __future__ import annotations

from statistics import median

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from elastic_refit.demo.result import DemoResult, StepRow
from elastic_refit.incident import Incident

__all__ = ["Display"]

_TABLE_WIDTH = 110
_TITLE = "refits; gap: largest difference between trainer and sampler log-probabilities over all sampled tokens"


class Display:
    """Use as a context; afterwards the terminal is as it was."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.is_live = console.is_terminal
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Display:
        if self.is_live:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_live:
            self._progress.stop()

    def say(self, line: str) -> None:
        """One line that stays."""
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def begin(self, what: str, total: int) -> None:
        """A new bar; a line where there are no bars."""
        if self.is_live:
            self._tasks[what] = self._progress.add_task(what, total=total)
        else:
            self.say(f"{what} …")

    def advance_to(self, what: str, done: int) -> None:
        if self.is_live:
            self._progress.update(self._tasks[what], completed=done)

    def end(self, what: str) -> None:
        if self.is_live:
            self._progress.remove_task(self._tasks.pop(what))

    def row(self, row: StepRow) -> None:
        """A finished step."""
        previous = "-" if row.logprob_gap_previous is None else f"{row.logprob_gap_previous:.1e}"
        self.say(
            f"step {row.step}: v{row.version} to {row.world_size} ranks in {row.seconds:.3f} s, "
            f"reward {row.reward:.3f}, gap {row.logprob_gap:.1e} (previous version {previous})"
        )

    def incident(self, incident: Incident) -> None:
        self.say(f"incident: {incident.sentence}")

    def summary(self, result: DemoResult) -> None:
        """The table, the incidents, and what did not hold."""
        if result.steps:
            self._console.print(_table(result), width=max(self._console.width, _TABLE_WIDTH))
        for incident in result.incidents:
            stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in incident.seconds.items())
            self.say(f"{incident.id}: {incident.sentence}.")
            self.say(f"  seconds: {stages}; total {incident.total_s:.3f}{_in_refits(incident, result)}")
            self.say(f"  record: {incident.path}")
        for sentence in result.broken:
            self.say(f"BROKEN PROMISE: {sentence}")


def _in_refits(incident: Incident, result: DemoResult) -> str:
    """What the incident cost, in refits of this run that had none."""
    normal = [row.seconds for row in result.steps if row.incident is None]
    return f", {incident.total_s / median(normal):.1f} times a refit without a fault" if normal else ""


def _table(result: DemoResult) -> Table:
    table = Table(title=_TITLE, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("step", "version", "world", "seconds", "GB/s", "reward", "gap", "gap to previous"):
        table.add_column(heading, justify="right")
    table.add_column("incident")
    for row in result.steps:
        previous = "-" if row.logprob_gap_previous is None else f"{row.logprob_gap_previous:.1e}"
        table.add_row(
            str(row.step),
            str(row.version),
            str(row.world_size),
            f"{row.seconds:.3f}",
            f"{row.gb_per_s:.3f}",
            f"{row.reward:.3f}",
            f"{row.logprob_gap:.1e}",
            previous,
            row.incident or "none",
        )
    return table
