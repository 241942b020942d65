"""The demo as a newcomer runs it: vLLM engines, one killed in the middle of a refit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.demo_runs import assert_adds_up, assert_proved, column, run_demo

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.vllm]


def test_a_vllm_shard_killed_in_mid_bucket_costs_one_shard_and_no_step(tmp_path: Path) -> None:
    run = run_demo(tmp_path, "--steps", "6", "--kill", "0@3:bucket:2")
    assert run.exit_code == 0, run.output
    assert column(run.result, "version") == [1, 2, 3, 4, 5, 6]
    assert column(run.result, "world_size") == [5, 5, 4, 4, 4, 4]
    assert run.result["steps"][5]["participants"] == ["trainer[0]", "trainer[1]", "shard[1]", "shard[2]"]
    assert_proved(run.result)
    (incident,) = run.result["incidents"]
    assert (incident["names"], incident["rule"], incident["version"]) == (["shard[0]"], 1, 3)
    assert incident["injected"] == ["kill of shard[0] in refit v3, bucket:2"]
    assert_adds_up(incident)
    assert column(run.result, "reward")[-1] > run.result["bring_up"]["reward"]
    assert run.left == ()
