"""A run that did not keep a promise says so, whichever promise it was."""

from __future__ import annotations

from dataclasses import replace

from elastic_refit.chaos import Fault
from elastic_refit.core.ids import ShardId
from elastic_refit.demo.result import DemoResult, StepRow, broken_promises

GOOD = StepRow(
    step=1,
    version=1,
    world_size=5,
    participants=("trainer[0]", "shard[0]"),
    seconds=0.5,
    bytes=1_000_000,
    logprob_gap=1e-5,
    logprob_gap_previous=0.5,
    reward=0.6,
    incident=None,
)
FAULT = Fault("kill", ShardId(0), 2, "bucket:1")


def _run(*rows: StepRow) -> DemoResult:
    start = replace(GOOD, step=0, version=0, logprob_gap_previous=None, reward=0.5)
    return DemoResult(bring_up=start, steps=list(rows))


def test_a_run_that_kept_every_promise_has_none_to_name() -> None:
    rows = (GOOD, replace(GOOD, step=2, version=2, reward=0.7))
    assert broken_promises(_run(*rows), [FAULT], [FAULT]) == []


def test_wrong_weights_are_a_broken_promise() -> None:
    (sentence,) = broken_promises(_run(replace(GOOD, logprob_gap=2e-3)), [], [])
    assert "step 1" in sentence
    assert "2.0e-03" in sentence


def test_a_gap_that_is_not_a_number_is_a_broken_promise() -> None:
    assert broken_promises(_run(replace(GOOD, logprob_gap=float("nan"))), [], [])


def test_a_control_that_does_not_fail_is_a_broken_promise() -> None:
    rows = (GOOD, replace(GOOD, step=2, version=2, logprob_gap_previous=1e-3, reward=0.7))
    (sentence,) = broken_promises(_run(*rows), [], [])
    assert "the control did not fail" in sentence


def test_a_fault_that_did_not_strike_is_a_broken_promise() -> None:
    assert broken_promises(_run(GOOD), [FAULT], []) == ["kill of shard[0] in refit v2, bucket:1 did not strike"]


def test_a_reward_that_did_not_rise_is_a_broken_promise() -> None:
    (sentence,) = broken_promises(_run(GOOD, replace(GOOD, step=2, version=2, reward=0.4)), [], [])
    assert "did not rise" in sentence


def test_a_run_that_ended_early_is_not_ok_whatever_it_showed_before() -> None:
    result = _run(GOOD)
    result.error = "NoSurvivingShards: …"
    assert not result.ok
    assert result.to_dict()["ok"] is False
