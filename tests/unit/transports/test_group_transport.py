"""A transport over one communicator: when it is built, when it is left alone, and what it leaves behind."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest

from elastic_refit.communicators.base import Communicator, GroupSpec, PendingCommunicator
from elastic_refit.core.ids import ShardId
from elastic_refit.core.membership import Membership, plan_membership
from elastic_refit.errors import StaleEpoch
from elastic_refit.transports.broadcast import BroadcastTransport


class Backend:
    """Makes communicators that do nothing, and keeps them."""

    name = "fake"

    def __init__(self) -> None:
        self.pending: list[PendingCommunicator] = []
        self.made: list[Communicator] = []

    def bind(self) -> PendingCommunicator:
        pending: PendingCommunicator = create_autospec(
            PendingCommunicator, instance=True, address=f"address {len(self.pending)}"
        )
        pending.join.side_effect = self._join  # type: ignore[attr-defined]
        self.pending.append(pending)
        return pending

    def _join(self, group: GroupSpec, *, timeout_s: float) -> Communicator:
        made: Communicator = create_autospec(Communicator, instance=True, rank=group.rank, aborted=None)
        self.made.append(made)
        return made


def membership(*shards: int) -> Membership:
    return plan_membership(1, [1, 1, 1], [ShardId(shard) for shard in shards], epoch=1)


def reconcile(transport: BroadcastTransport, group: Membership) -> bool | None:
    spec = GroupSpec(1, 0, ("a",) * group.world_size, ("i",) * group.world_size, b"")
    return transport.reconcile_communicator(group, spec, timeout_s=1)


def test_the_first_build_and_a_rebuild_are_the_same_and_an_equal_group_is_left_alone() -> None:
    backend = Backend()
    transport = BroadcastTransport(backend)
    assert transport.listen() == "address 0"
    assert reconcile(transport, membership(0, 1)) is True
    assert reconcile(transport, membership(0, 1)) is False
    assert transport.listen() == "address 1"
    assert reconcile(transport, membership(0, 1)) is True
    assert len(backend.made) == 2


def test_a_group_that_was_aborted_is_not_the_one_that_is_wanted() -> None:
    backend = Backend()
    transport = BroadcastTransport(backend)
    transport.listen()
    reconcile(transport, membership(0, 1))
    backend.made[0].aborted = "a test"  # type: ignore[misc]
    assert reconcile(transport, membership(0, 1)) is True


def test_whoever_has_not_listened_joins_nothing_and_moves_nothing() -> None:
    transport = BroadcastTransport(Backend())
    with pytest.raises(StaleEpoch, match="without having prepared"):
        reconcile(transport, membership(0))
    with pytest.raises(StaleEpoch, match="without having joined"):
        transport._group()


def test_an_abort_reaches_what_listens_and_what_was_joined() -> None:
    backend = Backend()
    transport = BroadcastTransport(backend)
    transport.abort("nothing to break")
    transport.listen()
    reconcile(transport, membership(0))
    transport.abort("a test")
    backend.pending[0].abort.assert_called_once_with("a test")  # type: ignore[attr-defined]
    backend.made[0].abort.assert_called_once_with("a test")  # type: ignore[attr-defined]


def test_listening_anew_and_closing_both_leave_the_group() -> None:
    backend = Backend()
    transport = BroadcastTransport(backend)
    transport.listen()
    reconcile(transport, membership(0))
    transport.listen()
    backend.made[0].close.assert_called_once_with()  # type: ignore[attr-defined]
    assert transport.communicator is None
    transport.close()
    transport.close()
    backend.pending[1].close.assert_called_once_with()  # type: ignore[attr-defined]
