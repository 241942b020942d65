"""The journal: every entry that the ledger has applied, on disk before anybody is told so.

A file of JSON lines, each with a checksum that continues the one before it::

    {"crc":"6f1c…","line":{"format":"elastic-refit-journal/1","run_id":…,"policy":…,"base":null}}
    {"crc":"09ab…","line":{"by":["driver",0,0],"at":1700000000.0,"event":"Registered",…}}

So a line that was changed, lost or moved is found, and named. Only an *unterminated* last line is forgiven: a process
died while it wrote it, so nobody was told that it is kept, and it is cut off. ``base`` is the state that the first
entry applies to: compaction writes the present state there and begins again, so that the file does not grow for ever.

What must never happen here: an acknowledged entry that a crash can lose, half a line with good lines after it, two
processes that write one journal.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from zlib import crc32

from elastic_refit.core.events import Entry, entry_from_dict, entry_to_dict
from elastic_refit.core.ledger import apply, new_ledger
from elastic_refit.core.ledger_codec import state_from_dict, state_to_dict
from elastic_refit.core.ledger_state import LedgerPolicy, LedgerState
from elastic_refit.errors import JournalError

__all__ = ["FORMAT", "Journal", "Recovery", "open_journal", "read_journal"]

FORMAT: Final = "elastic-refit-journal/1"

_OPENING: Final = b'{"crc":"'
_MIDDLE: Final = b'","line":'
_BODY: Final = len(_OPENING) + 8 + len(_MIDDLE)
_LOCK_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Recovery:
    """What reading a journal gave."""

    run_id: str
    state: LedgerState
    num_entries: int
    base_bytes: int
    """Up to the end of the first line, which holds the base."""
    size_bytes: int
    """Up to the end of the last whole line."""
    torn_bytes: int
    """Length of an unterminated last line, which is no part of the state."""
    checksum: int


class Journal:
    """A journal that this process may write. One thread uses it."""

    def __init__(self, path: Path, file: BinaryIO, lock: BinaryIO, read: Recovery) -> None:
        self.path = path
        self.recovery = read
        self.size_bytes = read.size_bytes
        self._base_bytes = read.base_bytes
        self._file = file
        self._lock = lock
        self._checksum = read.checksum
        self._broken: str | None = None

    @property
    def grown_bytes(self) -> int:
        """Size of all entries since the base: what opening it again has to replay."""
        return self.size_bytes - self._base_bytes

    def append(self, entries: Iterable[Entry]) -> None:
        """Keep ``entries``; they are on disk when this returns. All of them or none: a failed write is taken back.

        Raises:
            JournalError: they could not be written. After a failed fsync, whose effect nobody can know, or if taking
                back fails too, every later append raises as well: open the journal again.
        """
        self._refuse_if_broken()
        data, checksum = _encode((entry_to_dict(entry) for entry in entries), self._checksum)
        if not data:
            return
        try:
            _write_all(self._file, data)
        except OSError as error:
            self._take_back()
            raise JournalError(f"{self.path}: {len(data)} bytes could not be written: {error}") from error
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._broken = f"fsync failed: {error}"
            raise JournalError(f"{self.path}: {self._broken}") from error
        self.size_bytes += len(data)
        self._checksum = checksum

    def compact(self, state: LedgerState) -> None:
        """Begin again from ``state``, which must be what the journal replays to. Atomic: a crash keeps the old file.

        Raises:
            JournalError: the new file could not be written, and the old one goes on; or it could not be put in place,
                and every later append raises as well.
        """
        self._refuse_if_broken()
        try:
            file, size_bytes, checksum = _write_beside(self.path, self.recovery.run_id, state.policy, state)
        except OSError as error:
            raise JournalError(f"{self.path} could not be compacted: {error}") from error
        try:
            _put_in_place(self.path)
        except OSError as error:
            file.close()
            self._broken = f"compaction did not end: {error}"
            raise JournalError(f"{self.path}: {self._broken}") from error
        self._file.close()
        self._file, self._checksum = file, checksum
        self.size_bytes = self._base_bytes = size_bytes

    def close(self) -> None:
        """Let another process have it. Idempotent."""
        self._broken = "it was closed"
        self._file.close()
        self._lock.close()

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise JournalError(f"{self.path} takes no more entries: {self._broken}")

    def _take_back(self) -> None:
        try:
            self._file.truncate(self.size_bytes)
            self._file.seek(self.size_bytes)
            os.fsync(self._file.fileno())
        except OSError as error:
            self._broken = f"half a line could not be taken back: {error}"


def open_journal(path: Path, *, run_id: str, policy: LedgerPolicy, lock_timeout_s: float = 10.0) -> Journal:
    """Open the journal of ``run_id`` for writing, or begin it. ``journal.recovery.state`` is the ledger that it holds.

    Blocks at most ``lock_timeout_s`` for another process that still has it, as one does that is being killed.

    Raises:
        JournalError: another process holds it, it is corrupt, of another run, of another policy or of another format.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _locked(path, lock_timeout_s)
    try:
        if not path.exists() or _is_torn_beginning(path):
            _write_beside(path, run_id, policy, None)[0].close()
            _put_in_place(path)
        read = read_journal(path)
        _refuse_strangers(path, read, run_id, policy)
        file = path.open("r+b", buffering=0)
        if read.torn_bytes:
            file.truncate(read.size_bytes)
            os.fsync(file.fileno())
        file.seek(read.size_bytes)
    except BaseException:
        lock.close()
        raise
    return Journal(path, file, lock, read)


def read_journal(path: Path) -> Recovery:
    """Replay a journal without writing it; another process may be appending.

    Raises:
        JournalError: it is corrupt or of an unknown format; the message names the line.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        lines = _Lines(path, file)
        header = lines.header()
        state = _base(path, header)
        base_bytes = lines.size_bytes
        for entry in lines.entries():
            state = apply(state, entry)
        return Recovery(
            run_id=header["run_id"],
            state=state,
            num_entries=lines.number - 1,
            base_bytes=base_bytes,
            size_bytes=lines.size_bytes,
            torn_bytes=lines.torn_bytes,
            checksum=lines.checksum,
        )


class _Lines:
    """The lines of a journal as they are read and checked, one after the other."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self.number = 0
        self.size_bytes = 0
        self.torn_bytes = 0
        self.checksum = 0

    def header(self) -> dict[str, Any]:
        header = next(self._bodies(), None)
        if header is None:
            raise JournalError(f"{self._path} has no header line", line=1)
        if header.get("format") != FORMAT:
            raise JournalError(f"{self._path} has format {header.get('format')!r}, not {FORMAT!r}", line=1)
        return header

    def entries(self) -> Iterator[Entry]:
        for body in self._bodies():
            try:
                entry = entry_from_dict(body)
            except ValueError as error:
                raise self._corrupt(str(error)) from error
            yield entry

    def _bodies(self) -> Iterator[dict[str, Any]]:
        for line in self._file:
            if not line.endswith(b"\n"):
                self.torn_bytes = len(line)
                return
            self.number += 1
            body = self._checked(line)
            self.size_bytes += len(line)
            yield body

    def _checked(self, line: bytes) -> dict[str, Any]:
        body = line[_BODY:-2]
        checksum = crc32(body, self.checksum)
        if line != _framed(body, checksum):
            raise self._corrupt("its checksum does not follow from what is there")
        self.checksum = checksum
        data = json.loads(body)
        if not isinstance(data, dict):
            raise self._corrupt("it holds no object")
        return data

    def _corrupt(self, why: str) -> JournalError:
        return JournalError(f"{self._path} is corrupt in line {self.number}: {why}", line=self.number)


def _framed(body: bytes, checksum: int) -> bytes:
    return b"".join((_OPENING, b"%08x" % checksum, _MIDDLE, body, b"}\n"))


def _encode(lines: Iterable[dict[str, Any]], checksum: int) -> tuple[bytes, int]:
    parts = []
    for line in lines:
        body = json.dumps(line, separators=(",", ":")).encode()
        checksum = crc32(body, checksum)
        parts.append(_framed(body, checksum))
    return b"".join(parts), checksum


def _base(path: Path, header: dict[str, Any]) -> LedgerState:
    try:
        policy = LedgerPolicy(**header["policy"])
        return new_ledger(policy) if header["base"] is None else state_from_dict(header["base"])
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"{path} is corrupt in line 1: {error!r}", line=1) from error


def _is_torn_beginning(path: Path) -> bool:
    """Whether it was never finished creating: nothing, or the unterminated beginning of a header."""
    with path.open("rb") as file:
        line = file.readline()
    return not line.endswith(b"\n") and line[: len(_OPENING)] == _OPENING[: len(line)]


def _refuse_strangers(path: Path, read: Recovery, run_id: str, policy: LedgerPolicy) -> None:
    if read.run_id != run_id:
        raise JournalError(f"{path} is the journal of run {read.run_id!r}, not of {run_id!r}")
    ours, theirs = policy.to_dict(), read.state.policy.to_dict()
    changed = [f"{name} was {theirs[name]} and is now {ours[name]}" for name in ours if ours[name] != theirs[name]]
    if changed:
        raise JournalError(f"{path} was written under another policy: {'; '.join(changed)}")


def _write_beside(path: Path, run_id: str, policy: LedgerPolicy, base: LedgerState | None) -> tuple[BinaryIO, int, int]:
    """A journal that holds only its header, on disk beside ``path``: the open file, its size and its checksum."""
    header = {
        "format": FORMAT,
        "run_id": run_id,
        "policy": policy.to_dict(),
        "base": None if base is None else state_to_dict(base),
    }
    data, checksum = _encode([header], 0)
    file = _beside(path).open("w+b", buffering=0)
    try:
        _write_all(file, data)
        os.fsync(file.fileno())
    except OSError:
        file.close()
        raise
    return file, len(data), checksum


def _put_in_place(path: Path) -> None:
    """Rename what lies beside ``path`` to it, durably."""
    _beside(path).replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _write_all(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _locked(path: Path, timeout_s: float) -> BinaryIO:
    """An exclusive lock beside the journal; the kernel lets go of it when its process is gone, however it went."""
    lock = path.with_name(f"{path.name}.lock").open("a+b", buffering=0)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                lock.close()
                raise JournalError(f"{path} is held by another process (waited {timeout_s} s)") from None
            time.sleep(_LOCK_POLL_S)
        else:
            return lock
