"""What the driver is told of a refit: that it landed, or the error that ended the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_refit import errors
from elastic_refit.core.refit_state import Ended, Landed
from elastic_refit.incident import Incident, names_of, sentence_of
from elastic_refit.stacks import stacks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_refit.actors.refit_shell import RefitShell
    from elastic_refit.chaos import FaultRecord

__all__ = ["RefitReport", "error_of", "incident_of", "report_of"]


@dataclass(frozen=True, slots=True)
class RefitReport:
    """A refit that landed. ``size_bytes`` are those of one copy of the weights; ``seconds`` include a recovery."""

    version: int
    world_size: int
    participants: tuple[str, ...]
    seconds: float
    size_bytes: int
    num_buckets: int
    rebuilt: bool
    incident: Incident | None


def report_of(landed: Landed, incident: Incident | None, *, seconds: float) -> RefitReport:
    return RefitReport(
        version=landed.version,
        world_size=landed.membership.world_size,
        participants=tuple(str(member) for member in landed.membership.members),
        seconds=seconds,
        size_bytes=landed.manifest.total_bytes,
        num_buckets=landed.manifest.num_buckets,
        rebuilt=landed.rebuilt,
        incident=incident,
    )


def error_of(outcome: Ended, incident: Incident | None) -> errors.ElasticRefitError:
    """The exception that the protocol named."""
    kind = getattr(errors, outcome.error)
    error: errors.ElasticRefitError = kind(outcome.sentence, names=names_of(outcome.findings), incident=incident)
    return error


def incident_of(
    shell: RefitShell, outcome: Landed | Ended, struck: Sequence[FaultRecord], *, name: str, version: int, folder: str
) -> Incident:
    """The record of what went wrong in the refit that ``shell`` ran; ``folder`` is where stacks were left."""
    clock = shell.clock
    clock.struck = struck[0].at_s if struck else None
    seconds = clock.close()
    return Incident(
        id=name,
        version=version,
        sentence=sentence_of(outcome, version, sum(seconds.values())),
        names=names_of(outcome.findings),
        rules=tuple(sorted({finding.rule for finding in outcome.findings})),
        phase=clock.phase,
        seconds=seconds,
        findings=outcome.findings,
        evidence=outcome.evidence if isinstance(outcome, Ended) else clock.evidence,
        fenced=shell.fences.how(),
        resent_buckets=outcome.resent_buckets if isinstance(outcome, Landed) else 0,
        injected=tuple(str(record.fault) for record in struck),
        error=outcome.error if isinstance(outcome, Ended) else None,
        stacks=stacks_of(folder, (finding.member for finding in outcome.findings)),
    )
