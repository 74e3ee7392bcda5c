"""Reads and writes that leave the page cache unchanged, as counted by the operating system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.log.quiet import PAGE_BYTES, QuietFileSystem, cached_pages

PAGES = 600
ON_DISK = Path("/var/tmp")  # /tmp may be in memory, from which no page can be dropped


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = ON_DISK / f"keytail-quiet-{os.getpid()}"
    path.write_bytes(os.urandom(PAGES * PAGE_BYTES - 17))
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.close(fd)
    yield path
    path.unlink()


def _cached(path: Path) -> np.ndarray:
    fd = os.open(path, os.O_RDWR)
    try:
        return cached_pages(fd, 0, PAGES * PAGE_BYTES)
    finally:
        os.close(fd)


def _prepare(path: Path, wanted: set[int]) -> np.ndarray:
    """Cache these pages, as a broker's readers would, and return which pages are then cached."""
    fd = os.open(path, os.O_RDWR)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for page in wanted:
        os.pread(fd, 1, page * PAGE_BYTES)
    os.close(fd)
    return _cached(path)


def test_the_system_drops_and_reports_pages(path: Path) -> None:
    assert not _prepare(path, set()).any()
    assert _prepare(path, {0, 7, 599})[[0, 7, 599]].all()


@settings(max_examples=30)
@given(
    st.sets(st.integers(0, PAGES - 1), max_size=40),
    st.lists(st.tuples(st.integers(0, PAGES * PAGE_BYTES), st.integers(1, 300 * PAGE_BYTES)), min_size=1, max_size=4),
)
def test_reading_changes_nothing_in_the_page_cache(
    path: Path, wanted: set[int], reads: list[tuple[int, int]]
) -> None:
    before = _prepare(path, wanted)
    data = path.stat().st_size
    fs = QuietFileSystem()
    fd = fs.open_read(str(path))
    for position, size_bytes in reads:
        assert fs.read_into(fd, bytearray(size_bytes), position) == max(0, min(size_bytes, data - position))
    fs.close(fd)
    after = _cached(path)
    assert (after & before).sum() == before.sum(), "a page that the broker had cached was dropped"
    assert (after & ~before).sum() <= 2 * len(reads), "only parts of pages at the ends of reads may be left"


def test_pages_that_the_system_reads_ahead_are_dropped(path: Path) -> None:
    """A reader without advice marks a page, from which the system reads ahead for each later reader."""
    _prepare(path, set())
    with path.open("rb") as other:
        os.pread(other.fileno(), 61, 0)
    before = _cached(path)
    assert before.any()
    fs, buffer = QuietFileSystem(), bytearray(100 * PAGE_BYTES)
    fd = fs.open_read(str(path))
    for position in range(0, PAGES * PAGE_BYTES, len(buffer)):
        fs.read_into(fd, buffer, position)
    fs.close(fd)
    assert (_cached(path) == before).all()


def test_reads_return_the_bytes_of_the_file(path: Path) -> None:
    _prepare(path, {3, 4})
    fs, buffer = QuietFileSystem(), bytearray(5 * PAGE_BYTES)
    fd = fs.open_read(str(path))
    fs.read_into(fd, buffer, PAGE_BYTES + 1)
    fs.close(fd)
    assert buffer == path.read_bytes()[PAGE_BYTES + 1 :][: len(buffer)]


def test_written_pages_are_dropped_once_they_are_durable(path: Path) -> None:
    other = path.with_name(path.name + "-written")
    fs = QuietFileSystem()
    fd = fs.create(str(other), fs.stat(str(path)))
    try:
        fs.write(fd, bytes(PAGES * PAGE_BYTES))
        assert _cached(other).all()
        fs.fsync(fd)
        assert not _cached(other).any()
        assert other.read_bytes() == bytes(PAGES * PAGE_BYTES)
    finally:
        fs.close(fd)
        other.unlink()


def test_a_thread_and_those_that_it_starts_have_the_lowest_io_priority() -> None:
    """ioprio_get(2) reports the class; the test runs in a separate process, because the class cannot be reset."""
    program = (
        "import ctypes, platform, threading\n"
        "from keytail.log.quiet import let_others_go_first\n"
        "number = {'x86_64': 252, 'aarch64': 31}[platform.machine()]\n"
        "def asked(): print(ctypes.CDLL(None).syscall(number, 1, 0) >> 13)\n"
        "asked(); assert let_others_go_first(); asked()\n"
        "thread = threading.Thread(target=asked); thread.start(); thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second, third = done.stdout.split()
    assert first != "3"
    assert (second, third) == ("3", "3")
