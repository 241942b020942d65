"""Transports by name: our own, and whatever other distributions offer by an entry point.

A distribution adds one by a class and a line in its ``pyproject.toml``::

    [project.entry-points."elastic_refit.transports"]
    rdma = "my_package.rdma:RdmaTransport"

A transport's libraries are imported when it is built, and not before. Our own names cannot be taken.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from elastic_refit.errors import ConfigError

if TYPE_CHECKING:
    from elastic_refit.communicators.base import CommunicatorBackend
    from elastic_refit.transports.base import WeightTransport

__all__ = ["ENTRY_POINT_GROUP", "TRANSPORTS", "build_transport", "load_transport", "require_transport"]

ENTRY_POINT_GROUP = "elastic_refit.transports"
TRANSPORTS: dict[str, str] = {"broadcast": "elastic_refit.transports.broadcast:BroadcastTransport"}
"""Our own. They need no entry point, so that a bare source tree has them too."""


def build_transport(name: str, backend: CommunicatorBackend) -> WeightTransport:
    """The transport ``name`` for this process, over communicators that ``backend`` makes.

    Raises:
        ConfigError: ``name`` is unknown, or what it stands for cannot be loaded or is no transport.
    """
    return load_transport(name)(backend)


def load_transport(name: str) -> type[WeightTransport]:
    """The class of transport ``name``; imports its libraries. Raises ConfigError as :func:`build_transport` does."""
    entry = _find(name)
    try:
        kind = entry.load()
    except Exception as error:
        raise ConfigError(f"transport {name!r} cannot be loaded: {error}", transport=name) from error
    from elastic_refit.transports.base import WeightTransport

    if not (isinstance(kind, type) and issubclass(kind, WeightTransport)):
        raise ConfigError(f"transport {name!r} is {entry.value}, which is no WeightTransport", transport=name)
    return kind


def require_transport(name: str) -> None:
    """Raises ConfigError if nobody offers a transport ``name``; imports nothing heavy."""
    _find(name)


def _find(name: str) -> EntryPoint:
    if name in TRANSPORTS:
        return EntryPoint(name, TRANSPORTS[name], ENTRY_POINT_GROUP)
    offered = entry_points(group=ENTRY_POINT_GROUP)
    if name not in offered.names:
        known = ", ".join([*TRANSPORTS, *sorted(offered.names - TRANSPORTS.keys())])
        raise ConfigError(f"transport {name!r} is unknown; use one of {known}", transport=name)
    return offered[name]
