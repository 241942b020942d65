"""Single actors with real Ray: which refits the coordinator begins, and the bench's rival, the object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from elastic_refit.actors.bench import _through_the_store
from elastic_refit.actors.coordinator import RefitCoordinator, coordinator_options
from elastic_refit.actors.ledger import ledger_actor
from elastic_refit.actors.reports import RefitReport
from elastic_refit.config import DeadlinesConfig
from elastic_refit.control.setup import ChannelPlan
from elastic_refit.core.ledger_state import LedgerPolicy
from elastic_refit.core.refit_state import RefitPolicy
from elastic_refit.errors import Superseded
from tests.waiting import wait_until

WAIT_S = 60.0


class Recording(RefitCoordinator):
    """Its refits are over when the folder says so, and are noted there when they begin."""

    folder: Path

    def watch(self, folder: str) -> None:
        self.folder = Path(folder)

    def _refit(self, version: int) -> RefitReport:
        (self.folder / f"began {version}").touch()
        wait_until((self.folder / "go").exists, WAIT_S)
        return RefitReport(version, 0, (), 0.0, 0, 0, False, None)


@pytest.fixture
def coordinator(ray_cluster: None, tmp_path: Path) -> Iterator[ActorHandle[Recording]]:
    ledger = ledger_actor(tmp_path / "ledger.jsonl", run_id="run", policy=LedgerPolicy())
    remote: Any = ray.remote  # its stubs do not know what a class becomes
    kind = remote(**coordinator_options())(Recording)
    policy, plan = RefitPolicy(DeadlinesConfig().limits), ChannelPlan()
    actor = kind.remote(policy, ledger, plan.host(), widths=(1,), incident_folder=str(tmp_path))
    ray.get(actor.watch.remote(str(tmp_path)), timeout=WAIT_S)
    yield actor
    ray.kill(actor)
    ray.kill(ledger)
    plan.close()


def test_a_newer_version_takes_the_place_of_one_that_waits_and_its_caller_is_told(
    coordinator: ActorHandle[Recording], tmp_path: Path
) -> None:
    first = coordinator.refit.remote(1)
    wait_until((tmp_path / "began 1").exists, WAIT_S)
    second, third = coordinator.refit.remote(2), coordinator.refit.remote(3)
    with pytest.raises(RayTaskError) as caught:
        ray.get(second, timeout=WAIT_S)
    assert isinstance(caught.value.cause, Superseded)
    assert (caught.value.cause.version, caught.value.cause.by) == (2, 3)
    (tmp_path / "go").touch()
    assert [report.version for report in ray.get([first, third], timeout=WAIT_S)] == [1, 3]
    assert not (tmp_path / "began 2").exists()


def test_the_rival_through_the_object_store_says_how_long_every_receiver_took(ray_cluster: None) -> None:
    move = _through_the_store(1 << 20, 2)
    assert all(0 < move() < WAIT_S for _ in range(2))
