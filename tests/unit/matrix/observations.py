"""What a recovered kill looks like when everything held; tests change one thing."""

from __future__ import annotations

from typing import Any

from elastic_refit.chaos import Fault, FaultRecord
from elastic_refit.core.ids import ShardId
from elastic_refit.errors import ElasticRefitError
from elastic_refit.incident import STAGES, Incident
from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.observation import Observation, Served, ShardView
from elastic_refit.matrix.shape import lab_deadlines

VERSION = 4
KILL = Fault("kill", ShardId(0), VERSION, "bucket:2")


def cell(**changes: Any) -> Cell:
    row: dict[str, Any] = {
        "id": "x",
        "fault": "kill",
        "phase": "bucket:2",
        "outcome": "recovers",
        "names": [0],
        "rule": 1,
        "rebuilds": 1,
    }
    return Cell.model_validate({key: value for key, value in {**row, **changes}.items() if value is not None})


def incident(**changes: Any) -> Incident:
    facts = {
        "id": "incident-001-v4",
        "version": VERSION,
        "sentence": "shard[0] was condemned",
        "names": ("shard[0]",),
        "rules": (1,),
        "phase": "transfer",
        "seconds": dict.fromkeys(STAGES, 0.01),
        "resent_buckets": 4,
    }
    return Incident(**{**facts, **changes})


def served(**changes: Any) -> Served:
    return Served(**{"holds": VERSION, "label": VERSION, "gap": 1e-7, "gap_previous": 0.5, **changes})


def observation(**changes: Any) -> Observation:
    facts: dict[str, Any] = {
        "limits": lab_deadlines().limits,
        "version": VERSION,
        "num_buckets": 6,
        "planned": (KILL,),
        "records": (FaultRecord(KILL, 123, "bucket:2", 2, at_s=10.0),),
        "landed": [VERSION],
        "incidents": [incident()],
        "ended_s": 10.5,
        "epochs_opened": 1,
        "refit_s": 0.1,
        "shards": {
            0: ShardView(ShardId(0), "DEAD", None, 0),
            1: ShardView(ShardId(1), "HEALTHY", VERSION, 0),
            2: ShardView(ShardId(2), "HEALTHY", VERSION, 0),
        },
        "condemned": (ShardId(0),),
        "left_serving": (),
        "refused": (),
        "living": (),
        "intruders": (),
        "served": {ShardId(1): served(), ShardId(2): served()},
    }
    return Observation(**{**facts, **changes})


def ended(error: ElasticRefitError, **changes: Any) -> Observation:
    """The same, but the run ended; survivors hold nothing whole."""
    facts: dict[str, Any] = {
        "error": error,
        "landed": [],
        "shards": {
            0: ShardView(ShardId(0), "STALE", None, 0),
            1: ShardView(ShardId(1), "STALE", None, 0),
            2: ShardView(ShardId(2), "STALE", None, 0),
        },
        "condemned": (),
        "served": {ShardId(index): Served(holds=None, label=None) for index in range(3)},
    }
    return observation(**{**facts, **changes})
