"""The demo on the plain torch engine, end to end: real Ray, real processes, real kills and freezes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.demo_runs import assert_adds_up, assert_proved, column, run_demo

pytestmark = [pytest.mark.ray, pytest.mark.faults]


def test_two_kills_at_different_steps_are_two_recovered_incidents(tmp_path: Path) -> None:
    run = run_demo(tmp_path, "--engine", "torch", "--steps", "4", "--kill", "2@1:bucket:0", "--kill", "0@3:before")
    assert run.exit_code == 0, run.output
    assert run.result["ok"] is True
    assert column(run.result, "version") == [1, 2, 3, 4]
    assert column(run.result, "world_size") == [4, 4, 3, 3]
    assert [incident["names"] for incident in run.result["incidents"]] == [["shard[2]"], ["shard[0]"]]
    assert [incident["rule"] for incident in run.result["incidents"]] == [1, 1]
    for incident in run.result["incidents"]:
        assert_adds_up(incident)
        assert incident["injected"], "the fault has no record of its own"
    assert_proved(run.result)
    assert run.left == ()


def test_a_frozen_shard_is_named_by_its_silence_and_one_that_dies_between_refits_needs_no_verdict(
    tmp_path: Path,
) -> None:
    """With the commit and the digest that are not the default."""
    faults = ("--freeze", "1@1:bucket:2", "--kill", "0@3:idle")
    settings = ("--set", "refit.commit=staged", "--set", "refit.digest=sum64")
    run = run_demo(tmp_path, "--engine", "torch", "--steps", "3", *faults, *settings)
    assert run.exit_code == 0, run.output
    (incident,) = run.result["incidents"]
    assert (incident["names"], incident["rule"], incident["version"]) == (["shard[1]"], 2, 1)
    testimonies = [each["testimony"] for each in incident["evidence"]]
    assert testimonies == [None] * 5, "the stall was seen before a rank gave up by itself"
    assert column(run.result, "world_size") == [4, 4, 3]
    assert_adds_up(incident)
    assert_proved(run.result)
    assert run.left == ()


def test_the_loss_of_the_only_shard_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    run = run_demo(tmp_path, "--engine", "torch", "--shards", "1", "--kill", "0@1:bucket:1")
    assert run.exit_code == 1
    assert run.result["ok"] is False
    assert run.result["error"].startswith("NoSurvivingShards: ")
    assert "NoSurvivingShards" in run.last_line
    (incident,) = run.result["incidents"]
    assert (incident["names"], incident["error"]) == (["shard[0]"], "NoSurvivingShards")
    assert "Traceback" not in run.output
    assert run.left == ()
