"""One fleet that cells of one shape run on: brought up, made ready for the next cell, and taken down.

After a cell only what died is made anew. What must never happen here: a cell that runs on a fleet that the one before
left in another state than a new one is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from elastic_refit.actors.coordinator import RefitReport
from elastic_refit.actors.fleet import Fleet
from elastic_refit.config import RunConfig
from elastic_refit.core.events import ActorDied, RequestFailed, RequestSucceeded, RestartFailed, Restarting, Retired
from elastic_refit.core.ids import Member, ProcessId, ShardId
from elastic_refit.demo.tiny_model import make_tiny_model
from elastic_refit.engines.plain_lm import PlainShape, write_plain_checkpoint
from elastic_refit.errors import ElasticRefitError, TrainerLost
from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.shape import Shape
from elastic_refit.matrix.trainer import LabTrainer
from elastic_refit.processes import kill_proved, living

__all__ = ["Lab", "LabUnclean"]

_LOAD_S = {"torch": 120.0, "vllm": 300.0}
_CALL_S = 20.0
_LAYERS = 9
_KEPT_TIMES = 9


class LabUnclean(Exception):
    """The fleet is not as a new one is: close it, and make another."""


class Lab:
    """A fleet, and how far its versions have come. One thread uses it."""

    def __init__(self, shape: Shape, folder: Path, *, num_cpus: int | None = None) -> None:
        """Bring it up; blocks until everybody has loaded."""
        self.shape = shape
        model = folder / "model"
        size_bytes = _make_model(shape, model)
        self.config: RunConfig = shape.config(model_bytes=size_bytes, num_cpus=num_cpus)
        self.limits = self.config.deadlines.limits
        self.version = 0
        self.ever: set[ProcessId] = set()
        """Every process that a member of this fleet has had."""
        self._times: list[float] = []
        self._is_built = False
        self.fleet = Fleet(
            self.config,
            trainer_class=LabTrainer,
            trainer_arguments={"model": str(model)},
            model=str(model),
            folder=folder,
        )
        try:
            self.fleet.wait_until_loaded(timeout_s=_LOAD_S[shape.engine])
        except BaseException:
            self.fleet.close()
            raise
        self._note_processes()
