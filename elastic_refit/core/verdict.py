"""What can be concluded about a failed refit: values, each with one sentence for whoever is woken by it.

Only :class:`Culprits` and :class:`TrainerFault` name somebody. Every other verdict condemns nobody and says what the
evidence showed instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from elastic_refit.core.ids import Member, ShardId, TrainerId

__all__ = [
    "ContextLost",
    "CoordinatorIsolated",
    "Culprits",
    "Finding",
    "LinkFault",
    "RefitRejected",
    "TrainerFault",
    "Unattributed",
    "Verdict",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One member that a rule names. Rules: 1 own fault, 2 silent, 3 behind the frontier, 4 sole suspect."""

    member: Member
    rule: int
    why: str

    def __str__(self) -> str:
        return f"{self.member} {self.why} (rule {self.rule})"


@dataclass(frozen=True, slots=True)
class _WithFindings:
    findings: tuple[Finding, ...]
    """One for each member that is named, trainers first, in index order."""

    @property
    def rules(self) -> tuple[int, ...]:
        return tuple(sorted({finding.rule for finding in self.findings}))

    @property
    def shards(self) -> tuple[ShardId, ...]:
        """The shards to fence."""
        return tuple(finding.member for finding in self.findings if isinstance(finding.member, ShardId))


@dataclass(frozen=True, slots=True)
class Culprits(_WithFindings):
    """These shards caused it; the others can go on without them."""

    @property
    def sentence(self) -> str:
        return "; ".join(map(str, self.findings))


@dataclass(frozen=True, slots=True)
class TrainerFault(_WithFindings):
    """A trainer is among those named, and no refit has a source without it: the run ends."""

    @property
    def trainers(self) -> tuple[TrainerId, ...]:
        return tuple(finding.member for finding in self.findings if isinstance(finding.member, TrainerId))

    @property
    def sentence(self) -> str:
        return f"the run cannot go on: {'; '.join(map(str, self.findings))}"


@dataclass(frozen=True, slots=True)
class ContextLost(_WithFindings):
    """Aborted work is orphaned on the device of ``member``, a trainer; ``findings`` are who caused the abort."""

    member: TrainerId
    report: str

    @property
    def sentence(self) -> str:
        after = f", after {'; '.join(map(str, self.findings))}" if self.findings else ""
        return f"{self.member} lost its device context and cannot go on: {self.report}{after}"


@dataclass(frozen=True, slots=True)
class RefitRejected(_WithFindings):
    """Every shard that reached ``bucket`` refused it with the same ``error``: the weights, not the shards."""

    bucket: int
    error: str

    @property
    def sentence(self) -> str:
        named = ", ".join(str(shard) for shard in self.shards)
        return (
            f"the weights were refused, no shard is at fault: all {len(self.shards)} shards that applied bucket "
            f"{self.bucket} ({named}) raised {self.error}"
        )


@dataclass(frozen=True, slots=True)
class LinkFault:
    """No bytes pass the link between two ranks that both live; the evidence names neither end."""

    edge: tuple[int, int]
    """Ranks; data flows from the first to the second."""
    members: tuple[Member, Member]
    bucket: int
    """The lowest one that is not completed by all; -1 is the join."""
    shown_by: str

    rules: ClassVar[tuple[int, ...]] = (5,)
    findings: ClassVar[tuple[Finding, ...]] = ()

    @property
    def sentence(self) -> str:
        (up, down), (sender, receiver) = self.edge, self.members
        where = "while joining" if self.bucket < 0 else f"at bucket {self.bucket}"
        return (
            f"nobody is condemned (rule 5): the link from rank {up} ({sender}) to rank {down} ({receiver}) "
            f"stalled {where}: {self.shown_by}, and nothing else speaks against either"
        )


@dataclass(frozen=True, slots=True)
class Unattributed:
    """The evidence names nobody. ``decidable_in_s``: when asking again can tell more; None: it cannot."""

    why: str
    decidable_in_s: float | None = None

    rules: ClassVar[tuple[int, ...]] = (5,)
    findings: ClassVar[tuple[Finding, ...]] = ()

    @property
    def sentence(self) -> str:
        return f"nobody is condemned (rule 5): {self.why}"


@dataclass(frozen=True, slots=True)
class CoordinatorIsolated:
    """Nobody answered, so it is the one who asked that is cut off."""

    silent: tuple[Member, ...]

    rules: ClassVar[tuple[int, ...]] = (2,)
    findings: ClassVar[tuple[Finding, ...]] = ()

    @property
    def sentence(self) -> str:
        return (
            f"the coordinator is cut off: none of {', '.join(map(str, self.silent))} answered it, and that all of them "
            "stopped at once is less likely; nobody is condemned"
        )


Verdict = Culprits | TrainerFault | LinkFault | Unattributed | CoordinatorIsolated | ContextLost | RefitRejected
