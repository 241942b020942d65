"""The parts of the nccl communicator that need neither a GPU nor NCCL."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_refit.communicators.nccl_library import describe_version
from elastic_refit.communicators.nccl_stream import _CudaEvent
from elastic_refit.communicators.nccl_terms import Terms, check_terms
from elastic_refit.communicators.rank_processes import make_specs
from elastic_refit.errors import ContextLost, VersionMismatch


class FakeEvent:
    """What torch's event does when the device was lost, or was not."""

    def __init__(self, error: str | None = None) -> None:
        self._error = error

    def query(self) -> bool:
        if self._error is not None:
            raise RuntimeError(self._error)
        return True


@pytest.mark.parametrize(("version", "text"), [(23007, "2.30.7"), (22203, "2.22.3"), (30000, "3.0.0")])
def test_a_version_is_written_as_nccl_writes_it(version: int, text: str) -> None:
    assert describe_version(version) == text


def test_terms_survive_the_wire_and_equal_ones_are_agreed_on() -> None:
    terms = Terms(23007, 1 << 40)
    assert Terms.unpack(terms.pack()) == terms
    check_terms(make_specs(["", ""])[0], [terms, terms])


def test_the_odd_version_out_is_named_with_its_identity() -> None:
    with pytest.raises(VersionMismatch, match=r"2\.29\.7 on rank 1 \(shard\[1\]/0\)"):
        check_terms(make_specs(["", "", ""])[0], [Terms(23007, 1), Terms(22907, 1), Terms(23007, 1)])


def test_an_error_of_the_device_is_a_lost_context() -> None:
    lost: Any = FakeEvent("CUDA error: an illegal memory access was encountered")
    with pytest.raises(ContextLost, match="lost its CUDA context: CUDA error"):
        _CudaEvent(lost).is_done()
    well: Any = FakeEvent()
    assert _CudaEvent(well).is_done()
