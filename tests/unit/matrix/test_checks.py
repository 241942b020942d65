"""Each check finds what it is there to find, and one that cannot be made fails the cell."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_refit.chaos import Fault, FaultRecord
from elastic_refit.core.ids import ShardId
from elastic_refit.errors import NoSurvivingShards, TrainerLost, UnattributedHang
from elastic_refit.incident import STAGES
from elastic_refit.matrix.checks import judge
from elastic_refit.matrix.observation import Served, ShardView
from tests.unit.matrix.observations import KILL, VERSION, cell, ended, incident, observation, served

HEALTHY = {index: ShardView(ShardId(index), "HEALTHY", VERSION, 0) for index in range(3)}
ALL_SERVE = {ShardId(index): served() for index in range(3)}
QUIET: dict[str, Any] = {
    "planned": (),
    "records": (),
    "incidents": [],
    "epochs_opened": 0,
    "shards": HEALTHY,
    "condemned": (),
    "served": ALL_SERVE,
}
NOTHING_WRONG = {"fault": "none", "phase": None, "outcome": "continues", "names": None, "rule": None, "rebuilds": 0}


def test_a_recovered_kill_in_which_everything_held_passes() -> None:
    assert judge(cell(), observation()) == []


def test_a_cell_without_a_fault_passes_when_nothing_happened() -> None:
    assert judge(cell(**NOTHING_WRONG), observation(**QUIET)) == []


def other(kind: str, **changes: Any) -> FaultRecord:
    facts = {"victim": ShardId(0), "version": VERSION, "phase": "bucket:2", **changes}
    reached = facts.pop("reached", facts["phase"])
    return FaultRecord(Fault(kind=kind, **facts), 1, reached, at_s=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"records": ()}, "did not strike there; what struck: nothing"),
        ({"records": (other("kill", phase="ack"),)}, "did not strike there"),
        ({"records": (other("kill", victim=ShardId(1)),)}, "did not strike there"),
        ({"records": (other("kill", version=VERSION - 1),)}, "did not strike there"),
        ({"records": (other("kill", reached="bucket:1"),)}, "did not strike there"),
        ({"planned": (), "records": ()}, "its fault was not armed"),
        ({"incidents": []}, "the outcome is continues, expected recovers"),
        ({"error": TrainerLost("gone")}, "the outcome is ends, expected recovers: gone"),
        ({"incidents": [incident(names=("shard[1]",))]}, "the verdict names ['shard[1]']"),
        ({"incidents": [incident(names=("shard[0]", "shard[2]"))]}, "the verdict names"),
        ({"incidents": [incident(rules=(2,))]}, "rules [2] named them, expected [1]"),
        ({"epochs_opened": 2}, "2 groups were built, expected 1"),
        ({"landed": []}, "versions [] landed"),
        ({"incidents": [incident(seconds={**dict.fromkeys(STAGES, 0.0), "fence": 99.0})]}, "fence took 99.00 s"),
        ({"condemned": (ShardId(0), ShardId(1))}, "shards [0, 1] were condemned"),
        ({"condemned": ()}, "shards [] were condemned"),
        ({"shards": HEALTHY}, "shard 0 is HEALTHY, expected DEAD"),
        ({"refused": ("Condemned of shard[0]: no",)}, "the ledger refused what the coordinator told it"),
        ({"living": ("pid 7 of shard[0]",)}, "pid 7 of shard[0] was condemned and lives"),
        ({"served": {ShardId(1): served()}}, "shard[2] should serve version 4 and does not: None"),
        ({"served": {ShardId(1): served(), ShardId(2): served(label=None)}}, "shard[2] should serve version 4"),
        ({"served": {ShardId(1): served(), ShardId(2): served(gap=0.2)}}, "does not hold the trainer's weights"),
        ({"served": {ShardId(1): served(), ShardId(2): served(gap_previous=0.0)}}, "the control did not fail"),
        ({"served": {ShardId(1): served(), ShardId(2): served(holds=3)}}, "labels its samples 4 and holds 3"),
    ],
)
def test_what_did_not_hold_of_a_recovered_kill_is_told(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in "; ".join(judge(cell(), observation(**changes)))


@pytest.mark.parametrize(
    ("attribute", "what"),
    [
        ("epochs_opened", "the number of epochs was not looked at"),
        ("shards", "the ledger was not looked at"),
        ("condemned", "who was condemned was not looked at"),
        ("refused", "what the ledger refused was not looked at"),
        ("living", "whether the condemned are gone was not looked at"),
        ("served", "what the shards serve was not looked at"),
    ],
)
def test_a_check_that_was_not_made_is_a_failure(attribute: str, what: str) -> None:
    assert what in "; ".join(judge(cell(), observation(**{attribute: None})))


def test_a_run_that_ended_passes_with_its_error_and_not_with_another() -> None:
    asked = cell(outcome="ends", error="UnattributedHang", names=None, rule=None, rebuilds=None)
    hang = ended(UnattributedHang("nobody is condemned"), incidents=[incident(names=(), rules=())])
    assert judge(asked, hang) == []
    wrong = judge(asked, ended(NoSurvivingShards("nobody is left"), incidents=[]))
    assert wrong == ["the driver saw NoSurvivingShards, expected UnattributedHang"]


def test_an_end_that_should_condemn_nobody_and_did_is_told() -> None:
    asked = cell(outcome="ends", error="UnattributedHang", names=None, rule=None, rebuilds=None)
    hang = ended(UnattributedHang("nobody is condemned"), condemned=(ShardId(0),))
    assert judge(asked, hang) == ["shards [0] were condemned, allowed are []"]


def test_the_error_of_a_partition_names_both_ends_of_the_link() -> None:
    facts = {"fault": "partition", "between": [1, 2], "outcome": "ends", "error": "UnattributedHang"}
    asked = cell(**facts, names=None, rule=None, rebuilds=None)
    cut = Fault("partition", ShardId(1), VERSION, "bucket:2", peer=ShardId(2))
    struck = {"planned": (cut,), "records": (FaultRecord(cut, 1, "bucket:2", at_s=1.0),)}
    assert judge(asked, ended(UnattributedHang("from shard[1] to shard[2]"), **struck, incidents=[])) == []
    (wrong,) = judge(asked, ended(UnattributedHang("somewhere"), **struck, incidents=[]))
    assert wrong.startswith("the error does not name the edge [1, 2]")


def test_the_loss_of_a_trainer_names_it() -> None:
    asked = cell(trainer_victim=1, outcome="ends", error="TrainerLost", names=None, rule=None, rebuilds=None)
    assert judge(asked, ended(TrainerLost("trainer[1] died"))) == []
    assert judge(asked, ended(TrainerLost("somebody died"))) == ["the error does not name trainer[1]: somebody died"]


def test_what_takes_longer_than_the_cell_allows_is_told() -> None:
    asked = cell(within_s=0.2)
    assert judge(asked, observation()) == ["it took 0.50 s from the fault, more than 0.2 s"]
    assert judge(cell(within_s=1), observation()) == []


def test_a_suspect_stays_one_with_its_streak() -> None:
    asked = cell(**NOTHING_WRONG, state="SUSPECT")
    kept = {**HEALTHY, 0: ShardView(ShardId(0), "SUSPECT", VERSION, 1)}
    assert judge(asked, observation(**{**QUIET, "shards": kept})) == []
    assert judge(asked, observation(**QUIET)) == [
        "shard 0 is HEALTHY, expected SUSPECT",
        "shard 0 lost its request streak",
    ]


def test_a_death_between_two_refits_needs_no_verdict() -> None:
    asked = cell(phase="idle", outcome="continues", names=None, rule=None)
    idle = Fault("kill", ShardId(0), VERSION, "idle")
    facts = {"planned": (idle,), "records": (FaultRecord(idle, 1, "idle", at_s=1.0),), "incidents": []}
    assert judge(asked, observation(**facts, condemned=())) == []
    assert "the verdict names" in "; ".join(judge(asked, observation(**{**facts, "incidents": [incident()]})))


def test_when_everybody_had_every_bucket_none_is_resent() -> None:
    asked, late = cell(phase="ack"), Fault("kill", ShardId(0), VERSION, "ack")
    facts = {"planned": (late,), "records": (FaultRecord(late, 1, "ack", at_s=10.0),)}
    assert judge(asked, observation(**facts, incidents=[incident(resent_buckets=0)])) == []
    assert judge(asked, observation(**facts)) == ["[4] buckets were resent, and everybody had them all"]


def test_a_survivor_of_a_staged_refit_never_leaves_the_serving_set() -> None:
    asked = cell(commit="staged")
    assert judge(asked, observation()) == []
    assert judge(asked, observation(left_serving=(ShardId(1),))) == [
        "shard[1] left the serving set, and the commit is staged"
    ]
    asked = cell(commit="staged", phase="idle", outcome="continues", names=None, rule=None)
    idle = Fault("kill", ShardId(0), VERSION, "idle")
    facts = {"planned": (idle,), "records": (FaultRecord(idle, 1, "idle", at_s=1.0),), "incidents": []}
    assert judge(asked, observation(**facts, condemned=(), left_serving=(ShardId(0),))) == []
    assert judge(asked, observation(**facts, condemned=(), left_serving=(ShardId(1),))) != []


def test_a_staged_refit_that_ended_left_the_old_version_whole() -> None:
    asked = cell(commit="staged", outcome="ends", error="UnattributedHang", names=None, rule=None, rebuilds=None)
    old = {ShardId(index): Served(VERSION - 1, VERSION - 1, gap=0.5, gap_previous=1e-7) for index in range(3)}
    assert judge(asked, ended(UnattributedHang("nobody"), served=old, incidents=[])) == []
    mixed = {**old, ShardId(2): Served(None, None)}
    (wrong,) = judge(asked, ended(UnattributedHang("nobody"), served=mixed, incidents=[]))
    assert wrong.startswith("shard[2] should still serve version 3")


def test_a_fault_that_may_strike_in_any_bucket_is_met_in_each() -> None:
    slow = Fault("slow", ShardId(0), VERSION, "bucket:*", seconds=0.1)
    asked = cell(**{**NOTHING_WRONG, "fault": "slow", "phase": "bucket:*"})
    met = FaultRecord(slow, 1, "bucket:5", at_s=1.0)
    assert judge(asked, observation(**{**QUIET, "planned": (slow,), "records": (met,)})) == []


def test_a_condemned_process_that_could_not_be_killed_is_tried_instead() -> None:
    asked = cell(fault="freeze", fence="unreachable", rule=None)
    frozen = Fault("freeze", ShardId(0), VERSION, "bucket:2")
    facts = {"planned": (frozen,), "records": (FaultRecord(frozen, 1, "bucket:2", at_s=1.0),), "living": ("pid 7",)}
    assert judge(asked, observation(**facts)) == []
    assert judge(asked, observation(**facts, intruders=("it served",))) == ["it served"]
    assert "was not looked at" in judge(asked, observation(**facts, intruders=None))[0]


def test_who_holds_the_interpreter_leaves_its_stacks() -> None:
    asked = cell(fault="gil", rule=2)
    held = Fault("gil", ShardId(0), VERSION, "bucket:2")
    facts: dict[str, Any] = {"planned": (held,), "records": (FaultRecord(held, 1, "bucket:2", at_s=1.0),)}
    facts["stacks"] = ("a.txt",)
    assert judge(asked, observation(**facts, incidents=[incident(rules=(2,), stacks=("a.txt",))])) == []
    told = incident(rules=(2,))
    assert judge(asked, observation(**facts, incidents=[told])) == ["no stacks of the condemned are in the incident"]
    facts["stacks"] = ()
    assert "left no stacks" in judge(asked, observation(**facts, incidents=[told]))[0]


def test_the_kill_of_the_fixture_is_the_one_of_the_cell() -> None:
    assert str(KILL) == "kill of shard[0] in refit v4, bucket:2"
