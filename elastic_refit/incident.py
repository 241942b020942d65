"""The record of one failed refit: who, why, what was done, and what it cost. One JSON file each."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_refit.core.evidence import MemberEvidence
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.messages import Op
from elastic_refit.core.refit_state import Ended, Landed, Running
from elastic_refit.core.verdict import Finding

__all__ = ["STAGES", "Incident", "IncidentClock", "names_of", "sentence_of", "write_incident"]

STAGES = ("detect", "attribute", "fence", "abort", "settle", "rebuild", "resend")
"""In the order in which they follow each other. ``detect`` begins with the last progress that anybody made, or, where
the fault was made on purpose, with its strike."""

_STAGE_OF = {
    Op.PING: "attribute",
    Op.FENCE: "fence",
    Op.SETTLE: "settle",
    Op.PREPARE: "rebuild",
    Op.JOIN: "rebuild",
    Op.READY: "resend",
    Op.TRANSFER: "resend",
    Op.COMMIT: "resend",
}


@dataclass(frozen=True, slots=True)
class Incident:
    """``seconds`` has every one of ``STAGES`` and adds up to ``total_s``; times are of the coordinator's clock."""

    id: str
    version: int
    sentence: str
    names: tuple[str, ...]
    rules: tuple[int, ...]
    phase: str
    seconds: Mapping[str, float]
    findings: tuple[Finding, ...] = ()
    evidence: tuple[MemberEvidence, ...] = ()
    fenced: Mapping[str, str] = field(default_factory=dict)
    """By condemned member: ``gone`` (every process was seen to end), or ``by_epoch`` (nobody could reach its node)."""
    resent_buckets: int = 0
    injected: tuple[str, ...] = ()
    error: str | None = None
    stacks: tuple[str, ...] = ()
    """Files with the stacks of the condemned, each on the node of its process."""
    path: str | None = None

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as the file holds it."""
        data = {each.name: _plain(getattr(self, each.name)) for each in dataclasses.fields(self)}
        rules = data.pop("rules")
        return {**data, "rule": rules[0] if len(rules) == 1 else rules, "total_s": self.total_s}


@dataclass(slots=True)
class IncidentClock:
    """Measures one refit's incident while the coordinator's loop runs. ``now`` is monotonic seconds throughout."""

    began: float | None = None
    stage: str = ""
    since: float = 0.0
    last_progress: float | None = None
    struck: float | None = None
    released_s: float = 0.0
    phase: str = ""
    looked: float | None = None
    evidence: tuple[MemberEvidence, ...] = ()
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def observe(self, before: Running | None, after: Running | None, now: float) -> None:
        """Take in one step of the protocol; adds the time since the last one to the stage that it ended."""
        if self.began is None:
            looked, self.looked = self.looked, self._look_since(after, now)
            if after is None or not after.in_incident:
                return
            was_told = after.round.op is not Op.PING  # what fails during a look is looked into anew
            self._begin(before, looked if looked is not None and was_told else now, now)
        else:
            self.seconds[self.stage] += now - self.since
            self.since = now
        if before is not None and before.round.op is Op.PING:
            known = (after or before).evidence or before.evidence
            self.evidence = tuple(known.values()) or self.evidence
        if after is not None:
            self.stage = _STAGE_OF.get(after.round.op, self.stage or "attribute")

    def _look_since(self, after: Running | None, now: float) -> float | None:
        """When the look began that is going on, if one is: should it name somebody, the incident began with it."""
        if after is None or after.stalled is None:
            return None
        return now if self.looked is None else self.looked

    def _begin(self, before: Running | None, began: float, now: float) -> None:
        self.began, self.since = began, now
        self.seconds["attribute"] += now - began
        broken = None if before is None else before.stalled or before.round
        self.phase = "idle" if broken is None else str(broken.op)

    def close(self) -> dict[str, float]:
        """The seconds of every stage: ``abort`` is split off what settling took, ``detect`` put before it all."""
        assert self.began is not None, "there was no incident"
        seconds = dict(self.seconds)
        seconds["abort"] = min(self.released_s, seconds["settle"])
        seconds["settle"] -= seconds["abort"]
        start = self.struck if self.struck is not None else self.last_progress
        seconds["detect"] = max(0.0, self.began - start) if start is not None else 0.0
        return seconds


def sentence_of(outcome: Landed | Ended, version: int, total_s: float) -> str:
    """The sentence for 3 a.m."""
    if isinstance(outcome, Ended):
        return f"refit v{version} ended the run: {outcome.error}: {outcome.sentence}"
    who = "; ".join(f"{f.member} was condemned (rule {f.rule}: {f.why})" for f in outcome.findings)
    group = outcome.membership
    left = f"{_count(len(group.trainers), 'trainer')} and {_count(len(group.shards), 'shard')}"
    return (
        f"{who or 'nobody was condemned'}; refit v{version} was rebuilt over {left}, resent "
        f"{_count(outcome.resent_buckets, 'bucket')} and landed {total_s:.2f} s after the fault"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def write_incident(incident: Incident, folder: str | Path) -> Incident:
    """Store the record as one JSON file, whole or not at all; returns it with its ``path``."""
    path = Path(folder) / f"{incident.id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = dataclasses.replace(incident, path=str(path))
    draft = path.with_suffix(".tmp")
    with draft.open("w") as file:
        json.dump(stored.to_dict(), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    return stored


def _plain(value: Any) -> Any:
    if isinstance(value, (TrainerId, ShardId)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (tuple, list)) else value


def names_of(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    members: dict[Member, None] = dict.fromkeys(finding.member for finding in findings)
    return tuple(str(member) for member in members)
