"""An incident's seconds follow each other and add up, and its record is a file that a person and a tool can read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_refit.core.evidence import MemberEvidence
from elastic_refit.core.ids import Member, ShardId
from elastic_refit.core.messages import Op
from elastic_refit.core.refit_state import Ended, Fleet, Round, Running
from elastic_refit.core.verdict import Finding
from elastic_refit.incident import STAGES, Incident, IncidentClock, sentence_of, write_incident

QUIET = Running(3, Fleet(1, (1, 1), frozenset({ShardId(0), ShardId(1)})), Round(Op.TRANSFER, 7, frozenset()))


def _in_round(op: Op) -> Running:
    return replace(QUIET, round=Round(op, 8, frozenset()), in_incident=True)


def test_every_second_of_an_incident_is_in_exactly_one_stage() -> None:
    clock = IncidentClock(released_s=0.25)
    clock.observe(QUIET, QUIET, 99.0)
    clock.observe(QUIET, _in_round(Op.PING), 100.0)
    clock.last_progress = 98.5
    clock.observe(_in_round(Op.PING), _in_round(Op.FENCE), 101.0)
    clock.observe(_in_round(Op.FENCE), _in_round(Op.SETTLE), 103.0)
    clock.observe(_in_round(Op.SETTLE), _in_round(Op.PREPARE), 104.0)
    clock.observe(_in_round(Op.PREPARE), _in_round(Op.JOIN), 104.5)
    clock.observe(_in_round(Op.JOIN), _in_round(Op.TRANSFER), 105.0)
    clock.observe(_in_round(Op.TRANSFER), None, 109.0)
    seconds = clock.close()
    assert list(seconds) == list(STAGES)
    assert seconds == {
        "detect": 1.5,
        "attribute": 1.0,
        "fence": 2.0,
        "abort": 0.25,
        "settle": 0.75,
        "rebuild": 1.0,
        "resend": 4.0,
    }
    assert clock.phase == "transfer"


def test_detection_is_counted_from_the_strike_where_the_fault_was_made_on_purpose() -> None:
    clock = IncidentClock(last_progress=98.5, struck=99.75)
    clock.observe(QUIET, _in_round(Op.PING), 100.0)
    assert clock.close()["detect"] == pytest.approx(0.25)


def _looking(at: Op) -> Running:
    return replace(QUIET, round=Round(Op.PING, 8, frozenset()), stalled=Round(at, 7, frozenset()))


def test_an_incident_that_a_look_revealed_began_with_the_look() -> None:
    clock = IncidentClock(struck=95.0)
    look = _looking(Op.TRANSFER)
    known: dict[Member, MemberEvidence] = {ShardId(0): MemberEvidence(ShardId(0), 1, answered_ping=False)}
    clock.observe(QUIET, look, 98.0)
    clock.observe(look, look, 99.0)
    clock.observe(look, replace(_in_round(Op.FENCE), evidence=known), 100.0)
    clock.observe(_in_round(Op.FENCE), None, 101.0)
    seconds = clock.close()
    assert (seconds["detect"], seconds["attribute"], seconds["fence"]) == (3.0, 2.0, 1.0)
    assert (clock.phase, clock.evidence) == ("transfer", tuple(known.values()))


def test_an_incident_of_something_that_failed_during_a_look_began_with_the_failure() -> None:
    clock, look = IncidentClock(struck=99.5), _looking(Op.TRANSFER)
    clock.observe(QUIET, look, 98.0)
    clock.observe(look, _in_round(Op.PING), 100.0)
    clock.observe(_in_round(Op.PING), None, 101.0)
    seconds = clock.close()
    assert (seconds["detect"], seconds["attribute"], clock.phase) == (0.5, 1.0, "transfer")


def test_a_look_that_names_nobody_is_no_incident_and_the_next_one_counts_from_itself() -> None:
    clock, look = IncidentClock(), _looking(Op.JOIN)
    clock.observe(QUIET, look, 90.0)
    clock.observe(look, QUIET, 92.0)
    assert (clock.began, clock.looked) == (None, None)
    clock.observe(QUIET, _in_round(Op.PING), 100.0)
    clock.observe(_in_round(Op.PING), None, 101.0)
    assert clock.close()["attribute"] == 1.0


def test_the_record_holds_the_sentence_the_findings_and_a_total_that_adds_up(tmp_path: Path) -> None:
    finding = Finding(ShardId(1), 1, "died")
    ended = Ended("NoSurvivingShards", "no shard is left", (finding,))
    incident = Incident(
        id="incident-001-v3",
        version=3,
        sentence=sentence_of(ended, 3, 1.0),
        names=("shard[1]",),
        rules=(1,),
        phase="transfer",
        seconds=dict.fromkeys(STAGES, 0.5),
        findings=(finding,),
        error="NoSurvivingShards",
    )
    stored = write_incident(incident, tmp_path / "incidents")
    assert stored.path is not None
    data = json.loads(Path(stored.path).read_text())
    assert data["total_s"] == pytest.approx(sum(data["seconds"].values()))
    assert data["rule"] == 1
    assert data["findings"] == [{"member": "shard[1]", "rule": 1, "why": "died"}]
    assert data["sentence"] == "refit v3 ended the run: NoSurvivingShards: no shard is left"
    assert [path.name for path in (tmp_path / "incidents").iterdir()] == ["incident-001-v3.json"]
