"""Slugs are values that errors pass to rows; a file name that looks like a slug does not add one."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import pickle
from pathlib import Path

import pytest

from keytail import values
from keytail.cli.rows import fields_of
from keytail.compact.out_of_place.output_record import Entries, OutputRecord, decode_record, encode_record
from keytail.console import OutputStyle
from keytail.errors import CorruptLog, ErrorText, Refused, in_words, joined, of_stored, refusal, slugs_of, stored
from keytail.ledger.history import folded_partitions
from keytail.ledger.tables import PARTITIONS, Stamp, as_arrow, partition_fields
from keytail.run.rows import ResultRow
from tests.command_line import Run
from tests.log_dirs import random_records, write_log_dir

LOOKS_LIKE_ONE = "a [unknown-topic-settings]"
SETTINGS = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact")
# The errors are of several kinds: of a listing, with a path, and caused by other errors.
EXPECTED = {
    ("plan", *SETTINGS): ["not-a-regular-file"],
    ("compact", *SETTINGS, "--execute", "--shared-storage"): ["not-a-regular-file"],
    ("compact", *SETTINGS, "--output-dir", "TO", "--execute", "--shared-storage"): ["not-a-regular-file"],
    ("rebuild-index", "--execute", "--shared-storage"): ["not-a-regular-file"],
    ("expire", *SETTINGS, "--execute", "--shared-storage"): ["not-a-regular-file"],
    ("export", "--to", "TO"): ["not-a-regular-file", "unexpected-partition-state"],
}


@pytest.mark.parametrize("arguments", EXPECTED)
def test_a_file_name_adds_no_slug(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    logs = write_log_dir(tmp_path / LOOKS_LIKE_ONE, {"orders-0": random_records(0, 40)})
    (logs / "orders-0" / "00000000000000000100.log").mkdir()
    command, *rest = arguments
    target = [str(tmp_path / "target") if part == "TO" else part for part in rest]
    done = run(command, "--log-dirs", logs, *target, "--output", "json")
    rows = json.loads(done.stdout)
    assert [row["slugs"] for row in rows] == [EXPECTED[arguments]], rows
    assert LOOKS_LIKE_ONE in rows[0]["error"], "the name must be in the text of the error"
    assert all(f"[{slug}]" in rows[0]["error"] for slug in EXPECTED[arguments])


@pytest.mark.parametrize("arguments", [("lookup", "--offset", "0"), ("describe", "--records")])
def test_damage_has_only_the_slug_of_its_error(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    logs = write_log_dir(tmp_path / LOOKS_LIKE_ONE, {"orders-0": random_records(0, 40)})
    first = min((logs / "orders-0").glob("*.log"))
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    [row] = json.loads(run(*arguments, "--log-dirs", logs, "--output", "json").stdout)
    assert (row["slugs"], LOOKS_LIKE_ONE in row["error"]) == (["invalid-crc"], True)


def test_an_audit_reports_the_slugs_of_each_cause(run: Run, tmp_path: Path) -> None:
    replicas = []
    for name in ("one", "two"):
        logs = write_log_dir(tmp_path / name / LOOKS_LIKE_ONE, {"orders-0": random_records(0, 40)})
        (logs / "orders-0" / "00000000000000000100.log").mkdir()
        replicas += ["--replica", f"{name}={logs}"]
    [row] = json.loads(run("audit", *replicas, "--output", "json").stdout)
    assert row["slugs"] == ["not-a-regular-file", "unexpected-partition-state"]


CAUSE = CorruptLog(f"invalid CRC in {LOOKS_LIKE_ONE}", path=f"/logs/{LOOKS_LIKE_ONE}", slug="invalid-crc")
WHY = joined([in_words(CAUSE), refusal("no high watermark", slug="no-high-watermark"), "no error", "", in_words(CAUSE)])
SLUGS = ("invalid-crc", "no-high-watermark")


def test_texts_keep_the_slugs_of_their_parts() -> None:
    assert WHY == f"{CAUSE}; no high watermark [no-high-watermark]; no error; {CAUSE}"
    assert WHY.slugs == SLUGS
    assert ("copied unchanged: " + WHY + ". Nothing was replaced").slugs == SLUGS
    assert in_words(Refused("left out: " + WHY, remedy="Wait", slug="other-cause")).slugs == (*SLUGS, "other-cause")
    assert in_words(Refused(WHY, slug="invalid-crc")).slugs == SLUGS
    assert ErrorText(OSError(f"no file {LOOKS_LIKE_ONE}")).slugs == ()
    assert in_words(OSError(28, "full", LOOKS_LIKE_ONE)).slugs == ("no-space",)
    assert str(in_words(CAUSE)).endswith(" [invalid-crc]")


ROW = ResultRow("t", 0, "/logs", "refused", WHY, problem=Refused(WHY, slug="other-cause"))


@pytest.mark.parametrize(
    "moved",
    [
        lambda row: pickle.loads(pickle.dumps(row)),
        lambda row: values.from_bytes(values.to_bytes(row)),
        copy.deepcopy,
        lambda row: dataclasses.replace(row, status="failed"),
        lambda row: row.unchanged("failed", row.error),
    ],
    ids=["pickle", "values", "copy", "replace", "unchanged"],
)
def test_rows_keep_their_slugs_when_they_are_passed_on(moved) -> None:
    row = moved(ROW)
    assert (row.error, fields_of(row)["slugs"]) == (WHY, SLUGS)
    assert in_words(row.problem).slugs == (*SLUGS, "other-cause")


def test_a_ledger_returns_the_slugs_of_its_rows() -> None:
    stamp = Stamp("run", "host", 0)
    [written] = as_arrow("partitions", [partition_fields(stamp, "outcome", 1, ROW)]).to_pylist()
    [row] = folded_partitions([{**dict.fromkeys(PARTITIONS), **written, "at": datetime.datetime.now(datetime.UTC)}])
    assert fields_of(row)["slugs"] == SLUGS
    assert row.error.replace("\\[", "[") == WHY


def test_only_text_that_looks_like_a_slug_is_escaped_in_storage() -> None:
    assert stored(WHY).count("\\") == 4
    assert slugs_of(of_stored(stored(WHY))) == SLUGS
    assert stored(in_words(CorruptLog("cut [1]", slug="invalid-crc"))) == "cut [1] [invalid-crc]"


def test_the_slugs_of_the_reason_for_a_copy_are_in_its_record() -> None:
    record = OutputRecord("r", "t", 0, "/logs", 1, True, True, (), Entries(), Entries(), (), copied_for=WHY)
    assert decode_record(encode_record(record), "where").copied_for.slugs == SLUGS


def test_json_lines_have_the_slugs_of_their_error() -> None:
    line = OutputStyle(as_json=True).line("keytail: " + in_words(CAUSE), "error", datetime.datetime.now(datetime.UTC))
    assert json.loads(line)["slugs"] == ["invalid-crc"]
