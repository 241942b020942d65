"""Faults on purpose, in a run that was started for them: what may be asked for, and what carries it out."""

from elastic_refit.chaos.engine import aim_at_engine
from elastic_refit.chaos.faults import PHASES, Fault, FaultKind, FaultRecord, Victim, parse_fault, phases_of
from elastic_refit.chaos.moment import Moment
from elastic_refit.chaos.saboteur import Sabotaged, Saboteur

__all__ = [
    "PHASES",
    "Fault",
    "FaultKind",
    "FaultRecord",
    "Moment",
    "Sabotaged",
    "Saboteur",
    "Victim",
    "aim_at_engine",
    "parse_fault",
    "phases_of",
]
