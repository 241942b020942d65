"""The bookkeeping of an open update."""

from __future__ import annotations

import pytest

from elastic_refit.core.manifest import Manifest, TensorSpec
from elastic_refit.engines.base import NO_VERSION
from elastic_refit.engines.update import UpdateLedger
from elastic_refit.errors import PlanMismatch, TransportError

MANIFEST = Manifest(tuple(TensorSpec(name, (1,), "float32", 4) for name in "abcde"), ())


def take(update: UpdateLedger, *names: str) -> None:
    with update.taking(names):
        pass


def test_the_version_is_lost_with_the_first_tensor_and_kept_by_an_update_without_any() -> None:
    update = UpdateLedger(version=4)
    update.open(MANIFEST)
    take(update)
    update.close()
    assert (update.version, update.is_open) == (4, False)
    update.open(MANIFEST)
    take(update, "a")
    update.close()
    assert update.version == NO_VERSION


def test_what_is_missing_is_named_and_the_update_stays_open() -> None:
    update = UpdateLedger(version=0)
    update.open(MANIFEST)
    take(update, "b")
    with pytest.raises(TransportError, match="4 tensors are missing: a, c, d and 1 more") as caught:
        update.require_complete()
    assert caught.value.missing == ("a", "c", "d", "e")
    take(update, *"edca")
    update.require_complete()
    assert update.is_open


@pytest.mark.parametrize("names", [["b", "b"], ["b", "x"], ["a"]], ids=["twice-at-once", "unknown", "again"])
def test_a_wrong_name_marks_nothing(names: list[str]) -> None:
    update = UpdateLedger(version=0)
    update.open(MANIFEST)
    take(update, "a")
    with pytest.raises(PlanMismatch, match="fed twice, or not part"):
        take(update, *names)
    take(update, "b")


def test_an_update_that_broke_off_inside_a_tensor_can_only_be_closed() -> None:
    update = UpdateLedger(version=0)
    update.open(MANIFEST)
    with pytest.raises(KeyError), update.taking(["a"]):
        raise KeyError
    for name in ("a", "b"):
        with pytest.raises(PlanMismatch, match="can only be rolled back"):
            take(update, name)
    with pytest.raises(PlanMismatch, match="can only be rolled back"):
        update.require_complete()
    assert (update.is_open, update.version) == (True, NO_VERSION)
    update.close()
    update.open(MANIFEST)
    take(update, "a")


def test_nothing_is_taken_or_finished_without_an_open_update_and_none_is_opened_twice() -> None:
    update = UpdateLedger(version=0)
    with pytest.raises(PlanMismatch, match="no update is open"):
        take(update, "a")
    with pytest.raises(PlanMismatch, match="no update is open"):
        update.require_complete()
    update.open(MANIFEST)
    with pytest.raises(PlanMismatch, match="is open"):
        update.open(MANIFEST)
