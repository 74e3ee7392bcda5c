"""Reasons below a table: equal reasons of several partitions are printed once."""

from __future__ import annotations

import pytest

from keytail.cli import rows
from keytail.errors import CORRUPT_REMEDY, CorruptLog


def printed(capsys: pytest.CaptureFixture[str], *reasons: tuple[str, str, str]) -> list[str]:
    rows.print_reasons(reasons)
    return capsys.readouterr().out.splitlines()


def test_equal_reasons_are_printed_in_one_line_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(
        capsys,
        *((f"events-{n}", "skipped", "without compact") for n in range(1200)),
        ("users-0", "skipped", "other"),
        ("users-1", "refused", "without compact"),
        ("a-0", "skipped", "twice"),
        ("b-0", "skipped", "twice"),
    )
    assert found == [
        "users-1 refused: without compact",
        "1,200 partitions (events-0, events-1, events-2 and 1,197 more) skipped: without compact",
        "users-0 skipped: other",
        "2 partitions (a-0, b-0) skipped: twice",
    ]


def test_reasons_that_differ_only_in_a_number_are_printed_once_with_the_largest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = [("a-0", 90), ("b-12", 1000), ("c-1", 200)]
    found = printed(capsys, *((name, "refused", f"{name} needs {need} bytes in /logs") for name, need in texts))
    assert found == [
        "3 partitions (a-0, b-12, c-1) refused: b-12 needs 1000 bytes in /logs (of b-12; similar for the others)"
    ]


def test_places_of_damage_are_never_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, *((f"a-{n}", "corrupt", f"invalid CRC at byte position {n}") for n in range(3)))
    assert found == [f"a-{n} corrupt: invalid CRC at byte position {n}" for n in range(3)]


@pytest.mark.parametrize(
    ("text", "number"), [("dirty ratio 0.25", 0.25), ("1,200 bytes.", 1200.0), ("of Kafka 4.3.1", None)]
)
def test_numbers_in_a_reason_are_extracted(text: str, number: float | None) -> None:
    assert rows._numbers(text) == ([] if number is None else [number])


def test_the_remedy_for_corrupt_partitions_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    errors = [CorruptLog(f"bad byte {n}", path=f"/logs/a-{n}", remedy=CORRUPT_REMEDY, slug="bad") for n in range(3)]
    found = printed(capsys, *((f"a-{n}", "corrupt", str(error)) for n, error in enumerate(errors)))
    assert found[:3] == [f"a-{n} corrupt: bad byte {n} (/logs/a-{n}) [bad]" for n in range(3)]
    assert "\n".join(found[3:]).replace("\n", " ").strip() == f"For each of these 3 errors: {CORRUPT_REMEDY}"
    assert CORRUPT_REMEDY in " ".join(printed(capsys, ("a-0", "corrupt", str(errors[0]))))
