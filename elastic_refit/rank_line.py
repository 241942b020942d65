"""The line between a shard's actor and a process that works for it: questions down, answers up, none waits for another.

A process that is blocked in a call still answers here, on threads of their own. Messages travel by pickle between a
process and its descendants on one node, through a socket pair or a socket in a folder that only the user may enter.
What must never happen here: a question without an answer once the other process is gone, or a process that outlives the
one it works for.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from elastic_refit.errors import ShardDied

__all__ = ["RankLine", "listen_at", "serve"]


@dataclass(frozen=True, slots=True)
class _Question:
    number: int
    verb: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Reply:
    number: int
    value: Any = None
    error: BaseException | None = None


class RankLine:
    """The asking end. Any thread may ask, whatever else is being asked."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        self._connection = connection
        self._lock = threading.Lock()
        self._asked: dict[int, Future[Any]] = {}
        self._count = 0
        self._is_over = False
        threading.Thread(target=self._read, name=f"line-{name}", daemon=True).start()

    @classmethod
    def to(cls, path: str, name: str) -> RankLine:
        """Connect to a process that listens at ``path``."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        return cls(connection, name)

    def ask(self, verb: str, *arguments: Any) -> Future[Any]:
        """Have the other process run ``verb``: its result, its error, or ShardDied once it is gone."""
        future: Future[Any] = Future()
        with self._lock:
            self._count += 1
            raw = pickle.dumps(_Question(self._count, verb, arguments))
            if not self._is_over:
                self._asked[self._count] = future
                with contextlib.suppress(OSError):  # then the reading thread sees the end too, and answers
                    self._connection.sendall(raw)
                return future
        future.set_exception(self._death())
        return future

    def close(self) -> None:
        """Hang up, which ends the other process. Idempotent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with self._connection, self._connection.makefile("rb") as stream:
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                while True:
                    self._take(pickle.load(stream))
            with self._lock:
                self._is_over = True
                left, self._asked = self._asked, {}
        for future in left.values():
            future.set_exception(self._death())

    def _take(self, reply: _Reply) -> None:
        with self._lock:
            future = self._asked.pop(reply.number)
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(reply.error)

    def _death(self) -> ShardDied:
        return ShardDied(f"the process of {self.name} is gone", process=self.name)


def listen_at(path: str, target: object) -> None:
    """Have ``target`` answer whoever connects to ``path`` first, and end this process when that one is gone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)

    def accept() -> None:
        with listener:
            connection, _ = listener.accept()
        serve(connection, target)
        os._exit(1)

    threading.Thread(target=accept, name="rank-line", daemon=True).start()


def serve(connection: socket.socket, target: object) -> None:
    """Run every question as a method of ``target``, on a thread of its own, until the asking process hangs up."""
    lock = threading.Lock()

    def reply(question: _Question) -> None:
        raw = _dumped(_answer(target, question))
        with lock, contextlib.suppress(OSError):
            connection.sendall(raw)

    with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError, EOFError):
        while True:
            question: _Question = pickle.load(stream)
            threading.Thread(target=reply, args=(question,), name=f"line-{question.verb}", daemon=True).start()


def _answer(target: object, question: _Question) -> _Reply:
    try:
        return _Reply(question.number, value=getattr(target, question.verb)(*question.arguments))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the answer
        return _Reply(question.number, error=error)


def _dumped(reply: _Reply) -> bytes:
    """What cannot cross the line, as an error that says so: an answer that never came would be taken for a hang."""
    try:
        raw = pickle.dumps(reply)
        if reply.error is not None:
            pickle.loads(raw)
        return raw
    except Exception as error:  # noqa: BLE001 - objects of other libraries fail to be pickled in any way they like
        what = reply.error if reply.error is not None else error
        return pickle.dumps(_Reply(reply.number, error=RuntimeError(f"{type(what).__name__}: {what}")))
