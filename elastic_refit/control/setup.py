"""Where the channel is and who may use it: decided by the driver, and handed to each side in an object of its own.

Keys are CURVE25519 pairs (RFC 7748) in ZeroMQ's Z85 text. What must never happen here: a secret key in a ``repr``, an
argument list or a log; one key for two ends.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import zmq

from elastic_refit.errors import ConfigError

__all__ = ["ChannelAddress", "ChannelPlan", "EndSetup", "HostSetup"]


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """The host's two doors: ``host`` is an IP address, beacons go up by one port and orders come down by the other."""

    host: str
    beacon_port: int
    order_port: int

    @property
    def is_v6(self) -> bool:
        return ":" in self.host

    def url(self, port: int) -> str:
        return f"tcp://[{self.host}]:{port}" if self.is_v6 else f"tcp://{self.host}:{port}"


@dataclass(frozen=True, slots=True)
class HostSetup:
    """For the process of one coordinator. ``ends``: the public key of every end that is let in, by the end's name.

    ``incarnation`` counts the coordinators of one run: ends ignore whoever is older than one they have heard.
    """

    address: ChannelAddress
    public_key: bytes
    secret_key: bytes = field(repr=False)
    ends: Mapping[str, bytes]
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class EndSetup:
    """For one participant process; ``name`` is what the host calls it, whatever it says itself."""

    name: str
    address: ChannelAddress
    host_key: bytes
    public_key: bytes
    secret_key: bytes = field(repr=False)


class ChannelPlan:
    """The driver's: keys and two ports of ``host`` (an address of this machine, loopback by default), for one run.

    The ports stay reserved until ``close``: nobody is given them by chance, and a host of this machine may bind them,
    one that follows another too.

    Raises:
        ConfigError: ``host`` is not the address of one interface of this machine.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._reserved = [_reserve(host) for _ in range(2)]
        self.address = ChannelAddress(host, *(int(each.getsockname()[1]) for each in self._reserved))
        self._public_key, self._secret_key = zmq.curve_keypair()
        self._ends: dict[str, EndSetup] = {}

    def end(self, name: str) -> EndSetup:
        """The setup of the end called ``name``; equal for equal names."""
        if name not in self._ends:
            self._ends[name] = EndSetup(name, self.address, self._public_key, *zmq.curve_keypair())
        return self._ends[name]

    def host(self, incarnation: int = 0) -> HostSetup:
        """The setup of a host that lets in every end that was asked for so far."""
        keys = {name: end.public_key for name, end in self._ends.items()}
        return HostSetup(self.address, self._public_key, self._secret_key, keys, incarnation)

    def close(self) -> None:
        """Give the ports back. Idempotent."""
        for each in self._reserved:
            each.close()


def _reserve(host: str) -> socket.socket:
    """A socket that is bound and does not listen: with SO_REUSEADDR a listener may join it, an automatic port cannot.

    See bind(2), ip(7); libzmq sets that option on its listeners.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"host={host!r} is no IP address", host=host) from None
    if address.is_unspecified:
        raise ConfigError(f"host={host!r} is every interface; name the address that ends should use", host=host)
    reserved = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, 0))
    except OSError as error:
        reserved.close()
        raise ConfigError(f"host={host!r} is not an address of this machine: {error.strerror}", host=host) from error
    return reserved
