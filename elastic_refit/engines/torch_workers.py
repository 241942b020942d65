"""The plain torch engine as a shard of several ranks: a process with the whole model for each, the first one samples.

It has no tensor parallelism; it is for refits of wide shards at the price of small ones.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

from elastic_refit.engines.base import Sample, SamplingSpec, ShardEngine, WeightReceiver
from elastic_refit.engines.checkpoint import require_checkpoint
from elastic_refit.engines.watch import DeathWatch
from elastic_refit.errors import ShardError
from elastic_refit.rank_line import RankLine

__all__ = ["TorchWorkersEngine"]

T = TypeVar("T")


class TorchWorkersEngine(ShardEngine):
    """``width`` processes, each with a :class:`TorchEngine` and its ``options``."""

    has_workers = True
    rank_module: ClassVar[str] = "elastic_refit.engines.torch_rank"
    """What each process runs."""

    def __init__(
        self, model: str, options: Mapping[str, Any] | None = None, *, initial_version: int = 0, width: int = 2
    ) -> None:
        """Raises ConfigError as the plain engine does, and ShardDied if a process ends while it loads."""
        require_checkpoint(model)
        self.width = width
        started = [_start(self.rank_module, rank) for rank in range(width)]
        self._children = [child for child, _ in started]
        self._lines = [line for _, line in started]
        self._watch = DeathWatch([child.pid for child in self._children])
        self._is_closed = False
        try:
            arguments = (model, dict(options or {}), initial_version)
            self._all([line.ask("load", *arguments, rank) for rank, line in enumerate(self._lines)])
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[Sample]:
        samples: list[Sample] = self._all([self._lines[0].ask("generate", prompts, sampling)])[0]
        return samples

    def pause(self) -> None:
        self._everywhere("pause")

    def resume(self) -> None:
        self._everywhere("resume")

    def in_workers(self, function: Callable[[WeightReceiver], T]) -> list[T]:
        return self._everywhere("in_worker", function)

    def when_dead(self, callback: Callable[[str], None]) -> None:
        self._watch.when_dead(callback)

    def pids(self) -> tuple[int, ...]:
        return (os.getpid(), *(child.pid for child in self._children))

    def close(self) -> None:
        self._is_closed = True
        self._watch.close()
        for line in self._lines:
            line.close()
        for child in self._children:
            child.kill()
            child.wait()

    def _everywhere(self, verb: str, *arguments: Any) -> list[Any]:
        return self._all([line.ask(verb, *arguments) for line in self._lines])

    def _all(self, asked: Sequence[Future[Any]]) -> list[Any]:
        """Every rank's result, once all have answered; or the first one's error, or ShardDied."""
        results, errors = [], []
        for each in asked:
            try:
                results.append(self._watch.race(each))
            except Exception as error:  # noqa: BLE001 - raised below, when no rank is at work any more
                errors.append(error)
        if self._is_closed:
            raise ShardError("the engine is closed")
        if errors:
            raise errors[0]
        return results


def _start(module: str, rank: int) -> tuple[subprocess.Popen[bytes], RankLine]:
    mine, its = socket.socketpair()
    command = [sys.executable, "-m", module, str(its.fileno())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with its:
        child = subprocess.Popen(command, pass_fds=[its.fileno()], env=environment, stdin=subprocess.DEVNULL)
    return child, RankLine(mine, f"rank {rank}")
