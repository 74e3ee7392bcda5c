"""Text checkpoints: files that a broker reads are read, others are errors with a line number, and writes are
atomic.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keytail.errors import CorruptLog
from keytail.log import checkpoint
from keytail.log.checkpoint import read_epochs, read_offsets, update_offset, update_offsets, write_offsets
from keytail.log.fs import LOCAL, FileSystem
from tests.chance import draws
from tests.crash.driver import Counts, State, for_every_stop_and_fault


def _write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "cleaner-offset-checkpoint"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("", {}),
        ("0\n", {}),
        ("0\n0\n", {}),
        ("0\n2\norders 0 308\norders 1 12\n", {("orders", 0): 308, ("orders", 1): 12}),
        ("0\n1\norders 0 308", {("orders", 0): 308}),
        ("0\r\n1\r\norders\t 0  308 \r\n", {("orders", 0): 308}),
        ("0\n2\norders 0 1\norders 0 2\n", {("orders", 0): 2}),
        ("+0\n1\na-b.c_d 7 -1\n", {("a-b.c_d", 7): -1}),
    ],
)
def test_checkpoints_that_a_broker_reads_are_read(text: str, entries: dict, tmp_path: Path) -> None:
    assert read_offsets(LOCAL, _write(tmp_path, text)) == entries


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1\n0\n", 1),
        ("x\n0\n", 1),
        ("\n", 1),
        ("0 \n0\n", 1),
        ("0\nmany\n", 2),
        ("0\n2\norders 0 308\n", 2),
        ("0\n0\norders 0 308\n", 2),
        ("0\n1\norders 0 308\n\n", 4),
        ("0\n1\norders 308\n", 3),
        ("0\n1\n orders 0 308\n", 3),
        ("0\n1\norders 0 308 9\n", 3),
        ("0\n1\norders zero 308\n", 3),
        ("0\n1\norders 0 12x\n", 3),
        (f"0\n1\norders 0 {2**63}\n", 3),
        (f"0\n1\norders {2**31} 0\n", 3),
        (b"0\n1\nord\xff 0 308\n", 3),
    ],
)
def test_checkpoints_that_a_broker_refuses_are_refused(text: str | bytes, line: int, tmp_path: Path) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(CorruptLog, match=f"line {line} of the checkpoint") as caught:
        read_offsets(LOCAL, path)
    assert caught.value.path == path


def test_a_missing_file_has_no_entries(tmp_path: Path) -> None:
    assert read_offsets(LOCAL, str(tmp_path / "none")) == {}
    assert read_epochs(LOCAL, str(tmp_path / "none")) == []


def test_epochs_are_read(tmp_path: Path) -> None:
    assert read_epochs(LOCAL, _write(tmp_path, "0\n2\n0 0\n5 100\n")) == [(0, 0), (5, 100)]
    with pytest.raises(CorruptLog, match="line 3"):
        read_epochs(LOCAL, _write(tmp_path, "0\n1\n0 0 0\n"))
    assert read_epochs(LOCAL, _write(tmp_path, "0\r\n1\n+5\t100")) == [(5, 100)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0\n1\n0 0\n5 100\n", "line 2 .* declares 1 entries, but 2 follow"),
        ("0\n3\n0 0\n5 100\n", "line 2 .* declares 3 entries, but 2 follow"),
        ("0\n1\n0 0\n\n", "line 4 .* has 0 fields"),
        ("1\n1\n0 0\n", "line 1 .* has version 1"),
        ("0\n1\n2147483648 0\n", "line 3 .* has an invalid epoch"),
        ("0\n1\n٣ 0\n", "line 3 .* has an invalid epoch"),
    ],
)
def test_epochs_that_a_broker_refuses_are_refused(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptLog, match=complaint):
        read_epochs(LOCAL, _write(tmp_path, text))


_topics = st.text("abcXYZ019._-", min_size=1, max_size=20)
_entries = st.dictionaries(
    st.tuples(_topics, st.integers(0, 2**31 - 1)), st.integers(-(2**63), 2**63 - 1), max_size=20
)


@given(entries=_entries)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=draws(50))
def test_written_entries_are_read_back(entries: dict, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    write_offsets(LOCAL, path, entries)
    assert read_offsets(LOCAL, path) == entries
    assert os.listdir(tmp_path) == ["checkpoint"]


_odd_lines = st.text("ab1 0+-9\t\x0b.é", max_size=14) | st.builds(
    "{} {} {}".format, st.text("aé.", max_size=3), st.integers(-1, 2**32), st.integers(-(2**64), 2**64)
)


@given(lines=st.lists(_odd_lines, max_size=4))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=draws(200))
def test_plain_lines_are_read_as_all_others_are(lines: list[str], tmp_path: Path) -> None:
    """Nearly all lines are plain, and are parsed by one expression; here all lines are also parsed field by field."""
    path = _write(tmp_path, "".join(f"{line}\n" for line in ["0", str(len(lines)), *lines]))
    found = _read(path)
    with patch.object(checkpoint, "_PLAIN_ENTRY", re.compile("(?!)")):
        assert _read(path) == found


def _read(path: str) -> Any:
    try:
        return read_offsets(LOCAL, path)
    except CorruptLog as problem:
        return str(problem)


def test_the_format_is_that_of_kafka(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    write_offsets(LOCAL, str(path), {("orders", 1): 12, ("orders", 0): 308})
    assert path.read_bytes() == b"0\n2\norders 0 308\norders 1 12\n"


def test_an_update_retains_other_entries_except_those_of_partitions_no_longer_hosted(tmp_path: Path) -> None:
    path = _write(tmp_path, "0\n3\na 0 1\nb 0 2\nc 0 3\n")
    update_offset(LOCAL, path, ("a", 0), 9, hosted={("a", 0), ("b", 0)})
    assert read_offsets(LOCAL, path) == {("a", 0): 9, ("b", 0): 2}


def test_several_entries_are_written_with_one_replacement_of_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, "0\n3\na 0 1\nb 0 2\nc 0 3\n")
    fs = Watched()
    update_offsets(fs, path, {("a", 0): 9, ("b", 0): None, ("d", 1): 7}, hosted={("a", 0), ("b", 0), ("d", 1)})
    assert read_offsets(LOCAL, path) == {("a", 0): 9, ("d", 1): 7}
    assert fs.replaced == 1


class Watched(FileSystem):
    """Counts replacements. The first one waits until `go` is set, and raises OSError if `fails`."""

    def __init__(self, go: threading.Event | None = None, *, fails: bool = False) -> None:
        super().__init__()
        self.go, self.fails, self.begun, self.replaced = go, fails, threading.Event(), 0

    def rename(self, source: str, target: str) -> None:
        is_first, self.replaced = self.replaced == 0, self.replaced + 1
        if is_first and self.go is not None:
            self.begun.set()
            assert self.go.wait(120)
            if self.fails:
                raise OSError(5, "Input/output error", target)
        super().rename(source, target)


@pytest.mark.parametrize("fails", [False, True])
def test_updates_that_arrive_during_a_write_are_written_together(fails: bool, tmp_path: Path) -> None:
    """20 threads cause two replacements; if the first one fails, only the thread that made it gets the error."""
    path = _write(tmp_path, "0\n1\ngone 0 1\n")
    fs, failed = Watched(go := threading.Event(), fails=fails), []

    def work(number: int) -> None:
        try:
            update_offset(fs, path, ("t", number), number, hosted={("t", n) for n in range(20)})
        except OSError:
            failed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    threads[0].start()
    assert fs.begun.wait(120)
    for thread in threads[1:]:
        thread.start()
    while len(checkpoint._changing[path].waiting) < 20:
        pass
    go.set()
    for thread in threads:
        thread.join()
    assert failed == [0] * fails
    assert read_offsets(LOCAL, path) == {("t", number): number for number in range(20) if number not in failed}
    assert fs.replaced == 2
    assert not checkpoint._changing[path].waiting


def test_updates_of_many_threads_are_all_written(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    hosted = {("t", number) for number in range(20)}
    threads = [
        threading.Thread(
            target=update_offset, args=(LOCAL, path, ("t", number), number), kwargs={"hosted": hosted}
        )
        for number in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_offsets(LOCAL, path) == {("t", number): number for number in range(20)}


def test_the_mode_of_the_old_file_is_preserved(tmp_path: Path) -> None:
    path = _write(tmp_path, "0\n0\n")
    os.chmod(path, 0o640)
    update_offset(LOCAL, path, ("a", 0), 1, hosted=())
    assert os.stat(path).st_mode & 0o777 == 0o640


def test_every_stop_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    old, new = {("a", 0): 1, ("b", 0): 2}, {("a", 0): 50, ("b", 0): 2}
    counts = Counts("checkpoint file")

    def make(path: Path) -> None:
        path.mkdir()
        write_offsets(LOCAL, str(path / "checkpoint"), old)
        (path / "checkpoint.tmp").write_text("0\n9")  # an earlier crash left this file

    def check(state: State) -> None:
        found = read_offsets(LOCAL, str(state.root / "checkpoint"))
        assert found == new if state.action_ended else found in (old, new)
        update_offset(LOCAL, str(state.root / "checkpoint"), ("a", 0), 50, hosted=old)
        assert read_offsets(LOCAL, str(state.root / "checkpoint")) == new

    def action(fs: FileSystem, root: Path) -> None:
        update_offset(fs, str(root / "checkpoint"), ("a", 0), 50, hosted=old)

    for_every_stop_and_fault(
        make, action, check, again=action,
        work_dir=tmp_path / "work", counts=counts, partial_cuts=5,
    )  # fmt: skip
    assert counts.distinct_states > 5
