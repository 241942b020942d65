"""The error tree: one root, whole after pickling, with fields that read like attributes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from elastic_refit import errors
from elastic_refit.errors import ConfigError, ElasticRefitError, PeerLost

ALL_ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, ElasticRefitError) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_its_message_and_fields(kind: type[ElasticRefitError]) -> None:
    error = kind("shard[2] lost its peer", peer=3, ranks=(1, 2))
    for restored in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(restored) is kind
        assert restored.message == str(restored) == "shard[2] lost its peer"
        assert restored.fields == {"peer": 3, "ranks": (1, 2)}


def test_every_error_is_exported_and_drawn_in_the_tree() -> None:
    names = {kind.__name__ for kind in ALL_ERRORS}
    assert names == set(errors.__all__)
    assert errors.__doc__ is not None
    assert {name for name in names if name not in errors.__doc__} == set()


def test_a_field_reads_as_an_attribute() -> None:
    assert PeerLost("rank 3 is gone", peer=3).peer == 3


def test_an_unknown_field_is_named_in_the_attribute_error() -> None:
    with pytest.raises(AttributeError, match="PeerLost has no field 'rank'"):
        _ = PeerLost("rank 3 is gone", peer=3).rank


def test_a_config_error_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="num_shards"):
        raise ConfigError("num_shards must be positive", field="num_shards")


def test_no_error_declares_a_field_that_ray_owns() -> None:
    assert [kind for kind in ALL_ERRORS if "cause" in vars(kind)] == []
