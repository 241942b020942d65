"""The process of one rank of a wide torch shard: ``python -m elastic_refit.engines.torch_rank FD``.

It does what it is asked by the socket that it inherited as file descriptor FD, and ends when that one is closed.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_refit.engines.base import Sample, SamplingSpec, WeightReceiver
from elastic_refit.engines.torch_engine import TorchEngine
from elastic_refit.rank_line import serve

__all__ = ["TorchRank"]


class TorchRank:
    """The plain engine's calls; ``load`` comes first."""

    _engine: TorchEngine

    def load(self, model: str, options: Mapping[str, Any], initial_version: int, rank: int) -> None:
        self._engine = TorchEngine(model, options, initial_version=initial_version, rank=rank)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[Sample]:
        return self._engine.generate(prompts, sampling)

    def pause(self) -> None:
        self._engine.pause()

    def resume(self) -> None:
        self._engine.resume()

    def in_worker(self, function: Callable[[WeightReceiver], Any]) -> Any:
        return self._engine.in_worker(function)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), TorchRank())
    os._exit(0)  # a thread that is blocked in a refit must not hold the process
