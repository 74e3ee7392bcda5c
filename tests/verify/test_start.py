"""The findings after which a start would lose records: the table of VERIFY.md, and its application.

tests/interop/test_verify_start.py checks that real Kafka loses records only in these cases.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import keytail.verify
from keytail.log.fs import LOCAL
from keytail.verify.finding_kinds import KINDS
from keytail.verify.findings import MAX_PER_FILE, Findings
from keytail.verify.scope import Claims
from keytail.verify.task import verify_partition
from tests.verify.test_truths import _name, _segments, _write

PAGE = Path(keytail.verify.__file__).with_name("VERIFY.md")
WORDS = {"yes": "yes", "no": "no", "at the end": "at-end"}
RECOVERED = {"cut", "size", "zeros", "magic", "checksum", "offset-range"}
LAST, CLOSED = 40, 10


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    section = PAGE.read_text().split("## What a start would lose")[1].split("\n## ")[0]
    of_page = {
        kind: WORDS.get(verdict)
        for kinds, verdict in re.findall(r"^\| (`.*?`) \| (.*?) \|", section, re.MULTILINE)
        for kind in re.findall(r"`([a-z-]+)`", kinds)
    }
    assert of_page.pop("more") is None
    assert of_page == {name: kind.start_loses for name, kind in KINDS.items() if name != "more"}
    recovered = {name for name, kind in KINDS.items() if kind.recovered is not None and kind.recovered.start_loses}
    assert recovered == RECOVERED


def _loses(
    kind: str, base: int, suffix: str = ".log", *, recovered: bool = False, unindexed: int | None = None
) -> bool:
    facts = {"left": 1, "size": 1, "position": 1, "entry": 8, "count": 1, "magic": 9}
    findings = Findings("t-0", last=_name(LAST, ""))
    if unindexed is not None:
        findings.unindexed = frozenset({_name(unindexed, "")})
    findings.add(kind, _name(base, suffix), 0, 0, recovered=recovered, **facts)
    return findings.found[0].start_loses


@pytest.mark.parametrize(
    "kind, suffix, closed, last, recovered",
    [
        ("size", ".log", False, True, True),
        ("offset-order", ".log", False, True, None),
        ("offset-range", ".log", False, True, True),
        ("index-position", ".index", False, True, False),
        ("checksum", ".log", False, False, True),
        ("cut-active", ".log", True, True, False),
        ("time-index-zeros", ".timeindex", True, True, False),
        ("index-zeros", ".index", False, False, False),
        ("record", ".log", False, False, None),
    ],
)
def test_the_file_of_a_finding_decides_whether_a_start_loses_records(
    kind: str, suffix: str, closed: bool, last: bool, recovered: bool | None
) -> None:
    assert _loses(kind, CLOSED, suffix) is closed
    assert _loses(kind, LAST, suffix) is last
    if recovered is not None:
        assert _loses(kind, CLOSED, suffix, recovered=True) is recovered
        assert _loses(kind, LAST, suffix, unindexed=LAST) is recovered
        assert _loses(kind, CLOSED, suffix, unindexed=LAST) is closed
    else:
        assert _loses(kind, CLOSED, suffix, recovered=True) is closed


def test_findings_that_are_only_counted_are_considered() -> None:
    for kinds, loses in ((["checksum"], False), (["checksum", "offset-order"], True)):
        findings = Findings("t-0", last=_name(LAST, ""))
        for kind in [*["checksum"] * MAX_PER_FILE, *kinds]:
            findings.add(kind, _name(LAST, ".log"), 0, 0)
        findings.close()
        assert [f.start_loses for f in findings.found] == [False] * MAX_PER_FILE + [loses]
        assert findings.found[-1].kind == "more"


def test_a_report_has_the_last_segment_and_the_segments_without_an_index(tmp_path: Path) -> None:
    segments = _segments()
    whole = segments[20][1]
    segments[20][1] = whole[:-1] + bytes([whole[-1] ^ 1])
    segments.pop(40)
    _write(tmp_path, segments)
    for name in tmp_path.glob(_name(40, "*")):
        name.unlink()
    assert [(f.kind, f.start_loses) for f in verify_partition(LOCAL, str(tmp_path))] == [("checksum", False)]
    (tmp_path / _name(20, ".index")).unlink()
    assert {f.kind: f.start_loses for f in verify_partition(LOCAL, str(tmp_path))} == {
        "checksum": True,
        "index-missing": False,
    }
    claims = Claims(clean_shutdown=False, recovery_point=0)
    assert ("checksum", True) in [(f.kind, f.start_loses) for f in verify_partition(LOCAL, str(tmp_path), claims)]
