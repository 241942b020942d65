"""Faults on purpose, in a run that was started for them: what may be asked for, and what carries it out."""

from elastic_refit.chaos.faults import PHASES, Fault, FaultKind, FaultRecord, Victim, parse_fault, phases_of
from elastic_refit.chaos.saboteur import Saboteur

__all__ = ["PHASES", "Fault", "FaultKind", "FaultRecord", "Saboteur", "Victim", "parse_fault", "phases_of"]
