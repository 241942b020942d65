"""Who is let into the channel: CURVE keys on a list, asked for by libzmq over ZAP (ZeroMQ RFC 27).

CURVE alone lets in anybody who knows the host's public key. Whoever is let in gets the name that belongs to the key,
and the name comes with every message: nobody can speak for somebody else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import zmq
from zmq.utils import z85

__all__ = ["Doorkeeper"]

logger = logging.getLogger(__name__)

_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"elastic-refit"
_TRY_AGAIN = b"300"
"""The connection is dropped without a word. After a 400, libzmq's client would not knock again once it is admitted."""
_AT_ONCE = 64
_MAX_LOGGED = 64


class Doorkeeper:
    """Answers for every CURVE server socket of ``context`` that it was given; made before the first of them is bound.

    One thread at a time, the owner of the sockets.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ends: Mapping[str, bytes]) -> None:
        self.questions = context.socket(zmq.REP)
        """Readable when somebody knocks."""
        self.questions.linger = 0
        self.questions.bind(_ENDPOINT)
        self.refused = 0
        self._names = {key: name for name, key in ends.items()}
        self._logged: set[tuple[str, str]] = set()

    def guard(self, socket: zmq.Socket[bytes], secret_key: bytes) -> None:
        """Let ``socket`` be entered only through this door. To be called before it is bound."""
        socket.curve_server = True
        socket.curve_secretkey = secret_key
        socket.zap_domain = _DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def admit(self, name: str, key: bytes) -> None:
        """From now on let ``key`` in under ``name``. Any thread; who was refused before tries again by itself."""
        self._names[key] = name

    def answer(self) -> None:
        """Judge who knocks now; whoever is left over is judged in the next turn."""
        for _ in range(_AT_ONCE):
            if not self.questions.poll(0):
                return
            self.questions.send_multipart(self._judge(self.questions.recv_multipart()))

    def note_refusal(self, who: str, why: str) -> None:
        """Count it, and log it if it is news: a stranger who keeps trying must not fill the log."""
        self.refused += 1
        if (who, why) not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add((who, why))
            logger.warning("control_refused", extra={"who": who, "why": why})

    def _judge(self, question: Sequence[bytes]) -> list[bytes]:
        version, request, _, address, _, mechanism, *credentials = question
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        name = self._names.get(key)
        if name is not None:
            return [version, request, b"200", b"OK", name.encode(), b""]
        self.note_refusal(address.decode(errors="replace"), "unknown key")
        return [version, request, _TRY_AGAIN, b"unknown key", b"", b""]
