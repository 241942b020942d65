"""The bookkeeping of an open update."""

from __future__ import annotations

import pytest

from elastic_refit.core.manifest import Manifest, TensorSpec
from elastic_refit.engines.base import NO_VERSION
from elastic_refit.engines.update import UpdateLedger
from elastic_refit.errors import PlanMismatch, TransportError

MANIFEST = Manifest(tuple(TensorSpec(name, (1,), "float32", 4) for name in "abcde"), ())


def test_the_version_is_lost_with_the_first_tensor_and_kept_by_an_update_without_any() -> None:
    update = UpdateLedger(version=4)
    update.open(MANIFEST)
    update.take([])
    update.close()
    assert (update.version, update.is_open) == (4, False)
    update.open(MANIFEST)
    update.take(["a"])
    update.close()
    assert update.version == NO_VERSION


def test_what_is_missing_is_named_and_the_update_stays_open() -> None:
    update = UpdateLedger(version=0)
    update.open(MANIFEST)
    update.take(["b"])
    with pytest.raises(TransportError, match="4 tensors are missing: a, c, d and 1 more") as caught:
        update.require_complete()
    assert caught.value.missing == ("a", "c", "d", "e")
    update.take(["e", "d", "c", "a"])
    update.require_complete()
    assert update.is_open


@pytest.mark.parametrize("names", [["b", "b"], ["b", "x"], ["a"]], ids=["twice-at-once", "unknown", "again"])
def test_a_wrong_name_marks_nothing(names: list[str]) -> None:
    update = UpdateLedger(version=0)
    update.open(MANIFEST)
    update.take(["a"])
    with pytest.raises(PlanMismatch, match="fed twice, or not part"):
        update.take(names)
    update.take(["b"])


def test_nothing_is_taken_or_finished_without_an_open_update_and_none_is_opened_twice() -> None:
    update = UpdateLedger(version=0)
    with pytest.raises(PlanMismatch, match="no update is open"):
        update.take(["a"])
    with pytest.raises(PlanMismatch, match="no update is open"):
        update.require_complete()
    update.open(MANIFEST)
    with pytest.raises(PlanMismatch, match="is open"):
        update.open(MANIFEST)
