"""Tables of rows: at any width of the terminal, all cells are printed, and names and statuses are complete."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from keytail.cli import rows as show
from keytail.cli import table
from keytail.cli.command import Command
from keytail.cli.table import Column
from keytail.console import OutputStyle, set_output_style
from keytail.errors import ErrorText
from keytail.ledger.command import MaintainRow, PartitionRow, RunRow
from keytail.main.main import COMMANDS
from keytail.undo.command import BackedUpRun, UndoRow

WIDTHS = (60, 80, 120)
# Names of topics; the last one is as long as Kafka allows.
NAMES = ("a", "orders.by-customer.v2-changelog", "t" * 249)
LARGE = 1_234_567_890_123
# The fields of requests that `show` of several commands reads, with their values in the cases below.
REQUEST = {
    "execute": False, "prepare": False, "is_out_of_place": False, "every_setting": True, "originals": "/backup",
    "run_id": None, "is_list": False, "maintain": False, "partitions": None, "ledger": "/ledger", "only_ends": False,
    "repack": None,
}  # fmt: skip


def screens() -> Iterator[tuple[str, Command, type[Any], dict[str, Any]]]:
    """Yield (name, command, type of row, request) of each table that a command prints."""
    of_some: dict[str, list[tuple[type[Any], dict[str, Any]]]] = {
        "history": [(RunRow, {}), (PartitionRow, {"partitions": ["a-0"]}), (MaintainRow, {"maintain": True})],
        "undo": [(UndoRow, {}), (BackedUpRun, {"is_list": True})],
    }
    for name, command in COMMANDS.items():
        if command.show is not None:
            for kind, changes in of_some.get(name, [(kind, {}) for kind in command.rows.values()]):
                yield f"{name} {kind.__name__}", command, kind, REQUEST | changes


SCREENS = {key: rest for key, *rest in screens()}


def filled(hint: Any) -> Any:
    """Return a value of this type, which is large if it is a number."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(kind) in (Union, UnionType):
        kind = next(item for item in get_args(kind) if item is not type(None))
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if kind in (int, float):
        return kind(LARGE)
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return kind(**{field.name: filled(hints[field.name]) for field in fields(kind)})
    plain = {str: "some words of text", ErrorText: ErrorText(), bool: True}
    return plain[kind] if kind in plain else () if get_origin(kind) is tuple or kind is tuple else {}


def row_of(kind: type[Any], name: str, status: str) -> Any:
    """Return a row with a value in each field."""
    known = {
        "topic": name, "partition": 123, "run_id": name, "table": name, "check": name, "status": status,
        "log_dir": "/var/lib/kafka/data", "problem": None, "shown": None,
        "kafka": {"versions": "4.3 or later", "evidence": {}},
        "settings": {"cleanup.policy": {"value": ["compact"], "source": f"metadata log at offset 7 of topic {name}"}},
        "counts": {"compacted": LARGE, "refused": LARGE}, "message_format": "v2",
        "start_ms": 0, "end_ms": 1_000_000, "kept_ms": 0,
    }  # fmt: skip
    hints = get_type_hints(kind, include_extras=True)
    return kind(
        **{field.name: known.get(field.name, filled(hints[field.name])) for field in fields(kind) if field.init}
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("screen", SCREENS)
def test_no_command_truncates_or_breaks_names_and_statuses(
    screen: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    command, kind, request = SCREENS[screen]
    drawn: list[str] = []
    laid_out = table._laid_out

    def recording(*given: Any) -> Iterator[str]:
        for line in laid_out(*given):
            drawn.append(plain(line))
            yield line

    monkeypatch.setattr(table, "_laid_out", recording)
    rows = [row_of(kind, name, status) for name in NAMES for status in command.statuses or ("",)]
    assert command.show is not None
    command.show(rows, SimpleNamespace(**request))
    out = capsys.readouterr().out
    assert "\u2026" not in out
    assert all(line in out.split("\n") for line in drawn)
    words = [word for line in drawn for word in re.split(r"[\s;]+", line)]
    for name in NAMES:
        whole = f"{name}-123" if hasattr(kind, "partition") or "partition" in kind.__annotations__ else name
        assert words.count(whole) >= len(command.statuses or ("",))
    if "status" in kind.__annotations__:
        assert all(words.count(status) >= len(NAMES) for status in command.statuses)
    check_width(drawn, width)


@pytest.mark.parametrize("screen", SCREENS)
def test_on_a_terminal_lines_end_between_words(screen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences are also divided between words. If the output is not a terminal, each sentence is one line."""
    command, kind, request = SCREENS[screen]
    why = ErrorText("the partition is moving: run `keytail plan --log-dirs /var/lib/kafka,/mnt/kafka`, then again")
    rows = [
        replace(row_of(kind, name, status), **({"error": why} if hasattr(kind, "error") else {}))
        for name in NAMES for status in command.statuses or ("",)
    ]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    ours, theirs = os.openpty()
    found: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while piece := os.read(ours, 65536):
                found.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert command.show is not None
        command.show(rows, SimpleNamespace(**request))
    reader.join()
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;]*m", "", b"".join(found).decode()).replace("\r", "")
    lines = text.split("\n")
    for line in lines:
        words = re.findall(r"(?:`[^`]*`|\S)+", line.removesuffix(" (in use)"))
        assert cell_len(line) <= 60 or len(words) == 1, line
    if "the partition is moving:" in " ".join(lines):
        assert "`keytail plan --log-dirs /var/lib/kafka,/mnt/kafka`" in text
    else:
        assert command.name in ("audit", "doctor", "describe", "history", "undo")


def plain(line: list[tuple[str, str]]) -> str:
    return "".join(text for text, _ in line)


def check_width(lines: Sequence[str], width: int) -> None:
    """Check that a line is wider than the terminal only if it is a single word, or a name with "(in use)"."""
    for line in lines:
        assert cell_len(line) <= width or len(line.removesuffix(" (in use)").split()) == 1, line


CELL = st.text(st.sampled_from("ab\u4e2d[]\\ "), max_size=30) | st.sampled_from(["", "c" * 130, "1.2 KiB -> 1.1 KiB"])


@given(st.data())
def test_tables_contain_every_cell_at_any_width(data: st.DataObject) -> None:
    headings = ["name", *data.draw(st.lists(st.sampled_from(["status", "log size", "took"]), max_size=3, unique=True))]
    numbers = [False, *(data.draw(st.booleans()) for _ in headings[1:])]
    columns = [Column(heading, str, is_number=number) for heading, number in zip(headings, numbers, strict=True)]
    rows = data.draw(st.lists(st.tuples(*[CELL] * len(columns)), min_size=1, max_size=4))
    width = data.draw(st.integers(40, 130))
    lines = list(map(plain, table._laid_out(columns, rows, width)))
    check_width(lines, width)
    printed = sorted("".join(lines).replace(" ", ""))
    for number, heading in enumerate(headings):
        assert heading in " ".join(lines) or not any(row[number] for row in rows)
    for row in rows:
        for cell in row:
            assert all(printed.count(char) >= cell.count(char) for char in set(cell) - {" "})
            assert all(any(word in line for line in lines) for word in cell.split())


def test_columns_that_do_not_fit_are_printed_below_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [
        Column("partition", lambda row: row[0], is_number=False), Column("log size", lambda row: row[1]),
        Column("status", lambda row: row[2], is_number=False), Column("key", lambda row: row[3], is_number=False),
        Column("took", lambda row: row[4]),
    ]  # fmt: skip
    rows = [
        ("a-0", "1.0 KiB", "ok", "k" * 25, "1.0 s"),
        ("b" * 40, "2.0 KiB", "would-compact (in use)", "", "2.0 s"),
    ]
    shown = [[column.text(row) for column in columns] for row in rows]
    assert list(map(plain, table._laid_out(columns, shown, 60))) == [
        "partition  log size  status                   took",
        "a-0         1.0 KiB  ok                      1.0 s",
        f"    key {'k' * 25}",
        "b" * 40,
        "            2.0 KiB  would-compact (in use)  2.0 s",
    ]
    first = plain(next(table._laid_out(columns, [("a-0", "1" * 45, "ok", "", "")], 60)))
    assert first == "partition  status", "the status must be the first column after the name"
    assert "key" in plain(next(table._laid_out(columns, shown, 160)))


def test_unremarkable_rows_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    row = SimpleNamespace
    rows = [row(name=f"a-{number}", status="sound") for number in range(6)] + [row(name="b-0", status="refused")]
    columns = [table.PARTITION, table.STATUS]

    def is_plain(item: Any) -> bool:
        return item.status == "sound"

    assert table.print_remarkable("Title", columns, rows, is_plain) == rows[6:]
    out = capsys.readouterr().out
    assert "6 more partitions: 6 sound; --verbose lists them." in out
    assert "b-0" in out
    assert "a-0" not in out
    assert table.print_remarkable("Title", columns, rows[1:], is_plain) == rows[1:], (
        "a few rows must be printed, even plain ones"
    )
    assert table.print_remarkable("Title", columns, rows[:6], is_plain) == []
    assert capsys.readouterr().out.endswith("Title\n6 partitions: 6 sound; --verbose lists them.\n")
    before = show.output_style()
    set_output_style(OutputStyle(verbose=True))
    try:
        assert table.print_remarkable("Title", columns, rows, is_plain) == rows
    finally:
        set_output_style(before)


@pytest.mark.parametrize("count", [3, show.MAX_DRAWN + 1])
def test_markup_in_names_is_printed_unchanged(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [SimpleNamespace(name="keytail[report]", status="ok [bold]") for _ in range(count)]
    table.print_rows("Runs in /x[bold]y", [table.PARTITION, table.STATUS], rows)
    out = capsys.readouterr().out
    assert out.startswith("Runs in /x[bold]y\n")
    assert out.count("keytail[report]  ok [bold]\n") == count
