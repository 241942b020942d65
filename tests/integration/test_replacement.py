"""A shard that is lost and made anew by the driver: a new identity, which serves only after its first refit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayTaskError

from elastic_refit.core.ids import ShardId
from elastic_refit.engines.base import SamplingSpec
from elastic_refit.errors import ShardError
from elastic_refit.matrix.lab import Lab
from elastic_refit.matrix.shape import Shape
from elastic_refit.processes import kill_proved, living
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.faults]

SHAPE = Shape(
    trainers=1,
    widths=(1, 1),
    engine="torch",
    transport="broadcast",
    commit="streamed",
    bucket_bytes=None,
    min_healthy=1,
    max_recoveries=1,
    gathering=False,
)


@pytest.fixture(scope="module")
def lab(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(SHAPE, Path(tmp_path_factory.mktemp("fleet")))
    try:
        lab.bring_up()
        yield lab
    finally:
        assert lab.close() == []


def states(lab: Lab) -> dict[str, str]:
    return {str(record.id): record.state.name for record in lab.state().shards.values()}


def test_a_shard_that_lives_is_not_replaced_and_goes_on_serving(lab: Lab) -> None:
    lab.refit()
    with pytest.raises(ShardError, match="the ledger lets nobody be replaced"):
        lab.fleet.replace(ShardId(0), timeout_s=60)
    assert states(lab) == {"shard[0]": "HEALTHY", "shard[1]": "HEALTHY"}
    assert lab.refit().participants == ("trainer[0]", "shard[0]", "shard[1]")


def test_a_successor_joins_the_next_refit_and_serves_only_then(lab: Lab) -> None:
    lab.refit()
    kill_proved(lab.processes(ShardId(1)), timeout_s=10)
    wait_until(lambda: states(lab)["shard[1]"] == "DEAD", timeout_s=30)
    (successor,) = lab.fleet.replace(ShardId(1), timeout_s=120)
    assert successor == ShardId(1, incarnation=1)
    assert states(lab) == {"shard[0]": "HEALTHY", "shard[1]#1": "STALE"}
    with pytest.raises(RayTaskError, match="holds no whole version"):
        ray.get(lab.fleet.shards[successor].generate.remote([(1, 2)], SamplingSpec(max_tokens=1)), timeout=60)
    report = lab.refit()
    assert (report.rebuilt, report.participants) == (True, ("trainer[0]", "shard[0]", "shard[1]#1"))
    assert states(lab) == {"shard[0]": "HEALTHY", "shard[1]#1": "HEALTHY"}


def test_the_death_of_a_successor_is_noticed_like_any_other(lab: Lab) -> None:
    (shard,) = [shard for shard in lab.fleet.shards if shard.index == 1]
    kill_proved(lab.processes(shard), timeout_s=10)
    wait_until(lambda: states(lab)[str(shard)] == "DEAD", timeout_s=30)
    assert not living(lab.processes(shard))
    assert lab.refit().participants == ("trainer[0]", "shard[0]")
