"""Where a rank listens, and how another one reaches it: a Unix socket on one host, TCP across.

An address is a text that travels through the coordinator: ``tcp=HOST:PORT|unix=NAME|host=ID``. ``host`` is the
boot and network namespace in which an abstract Unix socket named ``NAME`` can be seen; it leaves no file behind, and
it has no permissions either, so nobody is trusted for having reached it: the handshake decides.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass

from elastic_refit.errors import ConfigError

__all__ = ["Address", "bind_listeners", "host_identity"]

_BACKLOG = 128
_ADDRESS_MAX_CHARS = 512


@dataclass(frozen=True, slots=True)
class Address:
    """One rank's two doors. ``unix`` and ``host`` are empty where the platform has no abstract sockets."""

    tcp_host: str
    tcp_port: int
    unix: str
    host: str

    def __str__(self) -> str:
        return f"tcp={self.tcp_host}:{self.tcp_port}|unix={self.unix}|host={self.host}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """The inverse of ``str``.

        Raises:
            ValueError: ``text`` is not an address.
        """
        parts = [part.partition("=") for part in text[:_ADDRESS_MAX_CHARS].split("|")]
        fields = {key: value for key, _, value in parts}
        tcp_host, _, port = fields.get("tcp", "").rpartition(":")
        is_port = port.isdecimal() and 0 < int(port) < 1 << 16
        if [key for key, _, _ in parts] != ["tcp", "unix", "host"] or not tcp_host or not is_port:
            raise ValueError(f"{text[:_ADDRESS_MAX_CHARS]!r} is not a tcp communicator's address")
        return cls(tcp_host, int(port), fields["unix"], fields["host"])

    def shares_host(self, other: Address) -> bool:
        return bool(self.host) and self.host == other.host

    def is_local(self) -> bool:
        return bool(self.unix) and self.host == host_identity()

    def is_loopback(self) -> bool:
        return self.tcp_host.startswith("127.") or self.tcp_host == "::1"

    def open_socket(self) -> tuple[socket.socket, str | tuple[str, int]]:
        """A fresh non-blocking socket and what to connect it to."""
        if self.is_local():
            sock: socket.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            target: str | tuple[str, int] = f"\0{self.unix}"
        else:
            sock = socket.socket(_family(self.tcp_host), socket.SOCK_STREAM)
            target = (self.tcp_host, self.tcp_port)
        sock.setblocking(False)
        return sock, target


def host_identity() -> str:
    """Equal exactly where an abstract Unix socket can be shared: same boot, same network namespace. Else empty."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot_id:
            boot = boot_id.read().strip()
        namespace = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}/{namespace.st_dev}/{namespace.st_ino}".encode()).hexdigest()[:16]


def bind_listeners(host: str | None, *, use_unix: bool = True) -> tuple[Address, list[socket.socket]]:
    """Listen on ``host`` (default: loopback) at a free port, and on an abstract Unix socket where there are such.

    Raises:
        ConfigError: ``host`` is a wildcard, or not an address of this machine.
    """
    tcp_host = _resolve(host or "127.0.0.1")
    listeners: list[socket.socket] = []
    try:
        listeners.append(_listen(_family(tcp_host), (tcp_host, 0)))
        port = int(listeners[0].getsockname()[1])
        identity = host_identity()
        name = f"elastic-refit-{secrets.token_hex(8)}" if use_unix and identity else ""
        if name:
            listeners.append(_listen(socket.AF_UNIX, f"\0{name}"))
    except OSError as error:
        for listener in listeners:
            listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"host={host!r} is not an address of this machine", host=host) from error
        raise
    return Address(tcp_host, port, name, identity), listeners


def _resolve(host: str) -> str:
    try:
        resolved = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise ConfigError(f"host={host!r} cannot be resolved: {error}", host=host) from error
    if ipaddress.ip_address(resolved).is_unspecified:
        raise ConfigError(f"host={host!r} is every interface; name the address that peers should use", host=host)
    return resolved


def _listen(family: socket.AddressFamily, target: str | tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
