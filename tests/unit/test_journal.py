"""The journal: what was acknowledged is there, what is there can be trusted, and nothing else is taken for it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_refit.core.events import ActorDied, Condemned, Entry, Event, ProbeOk, Registered
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger import new_ledger, replay
from elastic_refit.core.ledger_state import LedgerPolicy
from elastic_refit.errors import JournalError
from elastic_refit.journal import FORMAT, Journal, open_journal, read_journal

POLICY = LedgerPolicy(window_s=5.0)


def _entries(*events: Event, first: int = 0) -> list[Entry]:
    return [Entry("driver", 1, first + number, 100.0 + number, event) for number, event in enumerate(events)]


ENTRIES = _entries(
    Registered(ShardId(0)),
    Registered(ShardId(1), width=2, node="n1"),
    ProbeOk(ShardId(0)),
    Condemned(ShardId(1), "silent", "no beacon, no ping"),
    ActorDied(ShardId(0), "killed"),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "ledger.jsonl"


@contextmanager
def _opened(path: Path, run_id: str = "run", policy: LedgerPolicy = POLICY) -> Iterator[Journal]:
    journal = open_journal(path, run_id=run_id, policy=policy, lock_timeout_s=0.0)
    try:
        yield journal
    finally:
        journal.close()


def _written(path: Path) -> bytes:
    with _opened(path) as journal:
        for entry in ENTRIES:
            journal.append([entry])
    return path.read_bytes()


def test_a_new_journal_holds_a_ledger_that_knows_nobody(path: Path) -> None:
    with _opened(path) as journal:
        assert journal.recovery.state == new_ledger(POLICY)


@pytest.mark.parametrize("num_entries", range(len(ENTRIES) + 1))
def test_what_was_appended_replays_to_the_same_ledger_at_every_prefix(path: Path, num_entries: int) -> None:
    with _opened(path) as journal:
        journal.append(ENTRIES[:num_entries])
    with _opened(path) as journal:
        assert journal.recovery.state == replay(POLICY, ENTRIES[:num_entries])
        journal.append(ENTRIES[num_entries:])
    assert read_journal(path).state == replay(POLICY, ENTRIES)


def test_entries_one_by_one_and_as_a_batch_are_the_same_file(path: Path, tmp_path: Path) -> None:
    one_by_one = _written(path)
    with _opened(tmp_path / "batch.jsonl") as journal:
        journal.append(ENTRIES)
        journal.append([])
    assert (tmp_path / "batch.jsonl").read_bytes() == one_by_one


def test_a_torn_last_line_is_cut_off_and_reported_wherever_it_tore(path: Path) -> None:
    whole = _written(path)
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        with _opened(path) as journal:
            assert journal.recovery.torn_bytes == end - last
            assert journal.recovery.state == replay(POLICY, ENTRIES[:-1])
            journal.append(ENTRIES[-1:])
        assert path.read_bytes() == whole


def test_a_journal_that_was_never_finished_creating_is_begun_again(path: Path) -> None:
    with _opened(path):
        header = path.read_bytes()
    for end in (0, 1, 7, 8, 15, 40, len(header) - 1):
        path.write_bytes(header[:end])
        with _opened(path) as journal:
            assert journal.recovery.state == new_ledger(POLICY)
        assert path.read_bytes() == header


def test_a_file_that_is_no_journal_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    for content in (b"dear diary", b'{"a": 1}\n', b"\0" * 64 + b"\n", b"\n"):
        path.write_bytes(content)
        with pytest.raises(JournalError, match=r"no header line|corrupt in line 1"), _opened(path):
            pass
        assert path.read_bytes() == content


def test_a_flipped_bit_anywhere_is_an_error_that_names_the_line(path: Path) -> None:
    whole = _written(path)
    for at in range(0, len(whole) - 1, 3):
        if whole[at] == ord("\n"):
            continue
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        line = whole.count(b"\n", 0, at) + 1
        with pytest.raises(JournalError, match=r"corrupt in line|has format") as corrupt, _opened(path):
            pass
        assert corrupt.value.line == line


@pytest.mark.parametrize("missing", range(1, len(ENTRIES)))
def test_a_line_that_is_missing_or_moved_is_found(path: Path, missing: int) -> None:
    lines = _written(path).splitlines(keepends=True)
    for others in (
        lines[:missing] + lines[missing + 1 :],
        [*lines[:missing], lines[missing + 1], lines[missing], *lines[missing + 2 :]],
        lines[: missing + 1] + lines[missing:],
    ):
        path.write_bytes(b"".join(others))
        with pytest.raises(JournalError, match="corrupt in line"):
            read_journal(path)


def test_a_journal_of_another_run_is_refused(path: Path) -> None:
    _written(path)
    with pytest.raises(JournalError, match="journal of run 'run', not of 'other'"), _opened(path, "other"):
        pass


def test_a_journal_of_another_policy_is_refused_with_the_number_that_changed(path: Path) -> None:
    _written(path)
    changed = LedgerPolicy(window_s=6.0)
    with pytest.raises(JournalError, match=r"another policy: window_s was 5\.0 and is now 6\.0"):
        open_journal(path, run_id="run", policy=changed)


def test_a_journal_of_an_unknown_format_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_refit.journal.FORMAT", "elastic-refit-journal/2")
    _written(path)
    monkeypatch.undo()
    with pytest.raises(JournalError, match=f"has format 'elastic-refit-journal/2', not '{FORMAT}'"):
        read_journal(path)


def test_a_refused_journal_can_be_opened_by_who_it_belongs_to(path: Path) -> None:
    _written(path)
    with pytest.raises(JournalError), _opened(path, "other"):
        pass
    with _opened(path):
        pass


def test_one_process_at_a_time_writes_a_journal(path: Path) -> None:
    with _opened(path), pytest.raises(JournalError, match="held by another process"), _opened(path):
        pass


def test_a_full_disk_leaves_no_half_line_and_what_fits_later_is_kept(path: Path) -> None:
    with _opened(path) as journal:
        journal.append(ENTRIES[:2])
        before = path.read_bytes()
        with _file_size_limit(len(before) + 100), pytest.raises(JournalError, match="could not be written"):
            journal.append(ENTRIES[2:])
        assert path.read_bytes() == before
        journal.append(ENTRIES[2:])
    assert read_journal(path).state == replay(POLICY, ENTRIES)


def test_after_a_failed_fsync_nothing_more_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _opened(path) as journal:
        journal.append(ENTRIES[:1])
        monkeypatch.setattr(os, "fsync", _failing)
        with pytest.raises(JournalError, match="fsync failed"):
            journal.append(ENTRIES[1:2])
        monkeypatch.undo()
        with pytest.raises(JournalError, match="takes no more entries"):
            journal.append(ENTRIES[1:2])
        with pytest.raises(JournalError, match="takes no more entries"):
            journal.compact(replay(POLICY, ENTRIES[:1]))


def test_half_a_line_that_cannot_be_taken_back_is_never_followed_by_another(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _opened(path) as journal:
        journal.append(ENTRIES[:1])
        monkeypatch.setattr(os, "fsync", _failing)
        with _file_size_limit(journal.size_bytes + 10), pytest.raises(JournalError):
            journal.append(ENTRIES[1:])
        monkeypatch.undo()
        with pytest.raises(JournalError, match="could not be taken back"):
            journal.append(ENTRIES[1:])


def test_a_closed_journal_takes_nothing(path: Path) -> None:
    with _opened(path) as journal:
        pass
    journal.close()
    with pytest.raises(JournalError, match="it was closed"):
        journal.append(ENTRIES)


def test_a_compacted_journal_is_the_same_ledger_and_goes_on(path: Path) -> None:
    with _opened(path) as journal:
        journal.append(ENTRIES[:3])
        journal.compact(replay(POLICY, ENTRIES[:3]))
        assert read_journal(path).num_entries == 0
        assert read_journal(path).state == replay(POLICY, ENTRIES[:3])
        journal.append(ENTRIES[3:])
        assert journal.size_bytes == path.stat().st_size
    with _opened(path) as journal:
        assert journal.recovery.state == replay(POLICY, ENTRIES)


def test_a_compaction_that_finds_no_room_leaves_the_old_journal_in_use(path: Path) -> None:
    with _opened(path) as journal:
        journal.append(ENTRIES[:3])
        with _file_size_limit(100), pytest.raises(JournalError, match="could not be compacted"):
            journal.compact(replay(POLICY, ENTRIES[:3]))
        journal.append(ENTRIES[3:])
    assert read_journal(path).state == replay(POLICY, ENTRIES)


def test_a_compaction_whose_end_is_unknown_takes_no_more_entries(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _opened(path) as journal:
        journal.append(ENTRIES)
        monkeypatch.setattr(Path, "replace", _failing)
        with pytest.raises(JournalError, match="compaction did not end"):
            journal.compact(replay(POLICY, ENTRIES))
        monkeypatch.undo()
        with pytest.raises(JournalError, match="takes no more entries"):
            journal.append(ENTRIES)
    with _opened(path) as again:
        assert again.recovery.state == replay(POLICY, ENTRIES)


def test_a_reader_does_not_mind_a_writer_in_the_middle_of_a_line(path: Path) -> None:
    whole = _written(path)
    path.write_bytes(whole[:-5])
    read = read_journal(path)
    assert (read.num_entries, read.run_id) == (len(ENTRIES) - 1, "run")
    assert path.read_bytes() == whole[:-5]


@contextmanager
def _file_size_limit(limit: int) -> Iterator[None]:
    """What a full disk looks like: the first bytes are written and the rest are refused (setrlimit(2))."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _failing(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")
