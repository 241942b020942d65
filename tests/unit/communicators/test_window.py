"""The memory that ranks of one host share: what its publisher, a reader and a peer with bad intentions can do to it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_refit.communicators.window import SLOTS, Window
from elastic_refit.errors import CommunicatorError
from tests import held

CHUNK = 4096


@pytest.fixture
def published() -> Iterator[Window]:
    window = Window.create(CHUNK)
    yield window
    window.close()


@pytest.fixture
def mapped(published: Window) -> Iterator[Window]:
    window = Window.map(published.fd, CHUNK)
    yield window
    window.close()


def test_a_reader_sees_what_was_published_slot_by_slot(published: Window, mapped: Window) -> None:
    into = bytearray(CHUNK)
    for index in range(3 * SLOTS):
        chunk = bytes([index]) * (CHUNK - index)
        published.write(index, memoryview(chunk))
        mapped.read(index, memoryview(into)[: len(chunk)])
        assert into[: len(chunk)] == chunk


def test_a_reader_can_neither_write_nor_shrink_what_it_was_given(published: Window, mapped: Window) -> None:
    assert mapped.is_file(published.fd)
    with pytest.raises(TypeError):
        mapped.write(0, memoryview(b"forged"))
    with pytest.raises(PermissionError):
        os.write(mapped.fd, b"forged")
    with pytest.raises(PermissionError):
        os.ftruncate(mapped.fd, 0)


def test_what_could_shrink_under_a_reader_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SLOTS * CHUNK)
    with pytest.raises(CommunicatorError, match="seals 0x0"):
        Window.map(fd, CHUNK)
    os.close(fd)


def test_a_window_of_another_size_is_refused() -> None:
    fd = os.memfd_create("huge", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 40)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(CommunicatorError, match="same chunk_bytes"):
        Window.map(fd, CHUNK)
    os.close(fd)


def test_a_file_that_is_no_window_is_refused(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with (tmp_path / "file").open("wb") as file:
        for fd in (reading, writing, file.fileno()):
            with pytest.raises(CommunicatorError, match=r"no window|seals"):
                Window.map(fd, CHUNK)
    os.close(reading)
    os.close(writing)


def test_closing_leaves_no_descriptor_behind() -> None:
    before = held.files()
    window = Window.create(CHUNK)
    reader = Window.map(window.fd, CHUNK)
    assert not held.files() <= before
    reader.close()
    window.close()
    assert held.files() <= before
