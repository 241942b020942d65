"""A manifest is made once per layout, and a new one does not come silently."""

from __future__ import annotations

import logging

import pytest

from elastic_refit.core.manifest import TensorSpec
from elastic_refit.transports.base import ManifestKeeper, Packing

PACKING = Packing(64)


def layout(*names: str, size: int = 16) -> list[TensorSpec]:
    return [TensorSpec(name, (size // 4,), "float32", size) for name in names]


def test_equal_layouts_share_one_manifest_and_one_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keeper = ManifestKeeper()
    first = keeper.manifest_of(layout("a", "b"), PACKING)
    assert keeper.manifest_of(layout("a", "b"), PACKING) is first
    assert [record.message for record in caplog.records] == ["manifest_made"]


@pytest.mark.parametrize(
    ("specs", "packing"),
    [
        (layout("a", "b", "c"), PACKING),
        (layout("b", "a"), PACKING),
        (layout("a", "b", size=32), PACKING),
        (layout("a", "b"), Packing(16)),
        (layout("a", "b"), Packing(64, "sum64")),
    ],
    ids=["another tensor", "another order", "another shape", "another bucket", "another digest"],
)
def test_another_layout_is_another_manifest_and_says_so(
    specs: list[TensorSpec], packing: Packing, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keeper = ManifestKeeper()
    first = keeper.manifest_of(layout("a", "b"), PACKING)
    second = keeper.manifest_of(specs, packing)
    assert second.fingerprint != first.fingerprint
    assert second.digest == packing.digest
    assert [record.message for record in caplog.records] == ["manifest_made", "manifest_remade"]
