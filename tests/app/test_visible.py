"""Names with control characters reach a terminal as text, whoever tells of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from keytail.app import rows as show
from keytail.app.progress import Reporter
from keytail.errors import CorruptLog, in_words, visible
from keytail.spark.rows import ResultRow

EVIL = "/logs/t\x1b[2Jx\r\x07\x9b31m\x7f\u202eabc-0"
SEEN = r"/logs/t\x1b[2Jx\x0d\x07\x9b31m\x7f\u202eabc-0"


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    assert not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2066\u2028" for c in visible(text))
    if text.isprintable():
        assert visible(text) == text


def test_errors_tables_and_progress_show_them(capfd: pytest.CaptureFixture[str]) -> None:
    row = ResultRow(EVIL, 0, EVIL, "refused", error=f"no: {EVIL}")
    show.error_console().print(f"[bold red]keytail:[/] {in_words(CorruptLog('cut', path=EVIL))}", soft_wrap=True)
    show.print_table([row, ResultRow("b", 0, "/other", "refused")], EVIL)
    with Reporter("compact", [("a-0", 1)]) as reporter:
        reporter.done(EVIL, "refused", 1, EVIL)
        reporter.note(EVIL)
    out, err = capfd.readouterr()
    both = out + err
    assert not set("\x1b\r\x07\x9b\x7f\u202e") & set(both)
    assert out.replace("\n", "").count(SEEN) >= 3
    assert err.count(SEEN) == 4


def test_a_terminal_gets_styles_of_ours_only(capfd: pytest.CaptureFixture[str]) -> None:
    console = show.output_console()
    console._force_terminal = True
    table = Table()
    table.add_column("[bold]a[/]")
    table.add_row("\x1b]0;owned\x07")
    console.print(table)
    out = capfd.readouterr().out
    assert r"\x1b]0;owned\x07" in out
    assert "\x1b]0" not in out


def test_a_newline_in_a_path_makes_no_line() -> None:
    assert "\n" not in in_words(CorruptLog("cut", path="/logs/t\nkeytail: all done"))
