"""Producer snapshots are rebuilt from older ones and the log, but never from a log that may lack a producer."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format.producers import ProducerEntry, encode_snapshot, parse_snapshot
from keytail.log.fs import LOCAL
from keytail.log.records.chunk import SegmentReader
from keytail.rebuild_index.snapshots import (
    SnapshotRow,
    SnapshotSurvey,
    make_snapshots,
    put_snapshot,
    survey_snapshots,
    wanted_snapshots,
)
from tests.chance import draws
from tests.log.test_producers import as_loaded, batch, entries_of, logs, write
from tests.reference import producers as reference
from tests.reference.batches import Batch, decode_log


def state_at(batches: Sequence[Batch], offset: int, start: int = 0, known: dict | None = None) -> list[ProducerEntry]:
    """Return the state by the reference model: `known` at `start`, followed by the batches from there on."""
    state = reference.Producers(dict(known or {}))
    for found in batches:
        if start <= found.last_offset < offset:
            state.take(found)
    return sorted(entries_of(state.known), key=lambda entry: entry.producer_id)


def damaged(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def made(
    path: Path,
    segments: dict[int, bytes],
    snapshots: dict[int, bytes],
    end: int,
    *,
    log_start: int = 0,
    clean: bool = True,
) -> tuple[SnapshotSurvey, dict[int, tuple[SnapshotRow, bytes]]]:
    facts = write(path, segments, snapshots)
    wanted = wanted_snapshots(sorted(segments), log_start, end, clean_shutdown=clean)
    survey = survey_snapshots(LOCAL, str(path), sorted(snapshots), wanted)
    rows = make_snapshots(LOCAL, SegmentReader(LOCAL), str(path), facts, log_start, survey)
    return survey, {row.offset: (row, data) for row, data in rows}


@settings(deadline=None, max_examples=draws(150))
@given(logs(), st.randoms(use_true_random=False), st.booleans())
def test_each_snapshot_equals_the_state_of_the_model_or_is_refused_for_a_gap(
    tmp_path_factory: pytest.TempPathFactory, raw_batches: list[bytes], rng: random.Random, first_gone: bool
) -> None:
    batches = [decode_log(raw)[0] for raw in raw_batches]
    end = batches[-1].last_offset + 1 if batches else 0
    bases = [0, *(found.base_offset for found in batches[1:] if rng.random() < 0.3)]
    segments = dict.fromkeys(bases, b"")
    for raw, found in zip(raw_batches, batches, strict=True):
        segments[max(base for base in bases if base <= found.base_offset)] += raw
    complete = 0
    for found in batches:
        if found.base_offset != complete or len(found.records) != found.last_offset - found.base_offset + 1:
            break
        complete = found.last_offset + 1
    right = {offset: state_at(batches, offset) for offset in {*bases[1:], end} if offset}
    there = {offset: encode_snapshot(entries) for offset, entries in right.items() if rng.random() < 0.4}
    bad = {offset for offset in there if rng.random() < 0.2}
    there |= {offset: damaged(there[offset]) for offset in bad}
    if first_gone and len(bases) > 1:
        del segments[bases[0]]
        bases, complete = bases[1:], -1
    good = sorted(offset for offset in there if offset not in bad and offset >= bases[0])
    survey, found_rows = made(tmp_path_factory.mktemp("t"), segments, there, end, log_start=bases[0])

    wanted = {offset for offset in {*bases[1:], end} if offset > bases[0]}
    assert set(survey.to_make) == wanted - (there.keys() - bad)
    assert set(found_rows) == set(survey.to_make)
    for offset, (row, data) in found_rows.items():
        assert row.was == ("damaged" if offset in bad else "missing")
        older = max((item for item in good if item < offset), default=None)
        assert row.source == older
        if older is None and offset > complete:
            assert row.problem and not data
            continue
        known = as_loaded(right[older]) if older is not None else {}
        assert not row.problem, row
        assert parse_snapshot(data) == state_at(batches, offset, older or 0, known) == right[offset]
        assert row.producers == len(right[offset])


DATA = {0: batch("data", 0, count=2), 2: batch("txn", 2, 2), 3: batch("COMMIT", 3, 2) + batch("data", 4, 3)}


def test_the_snapshots_that_a_broker_needs_are_rebuilt() -> None:
    assert wanted_snapshots([0, 5, 9], 0, 12, clean_shutdown=True) == (5, 9, 12)
    assert wanted_snapshots([0, 5, 9], 0, 9, clean_shutdown=True) == (5, 9)
    assert wanted_snapshots([0, 5, 9], 0, 12, clean_shutdown=False) == (5, 9)
    # a broker that starts deletes snapshots that are not above the log start offset
    assert wanted_snapshots([0, 5, 9], 5, 12, clean_shutdown=True) == (9, 12)
    assert wanted_snapshots([0], 0, 0, clean_shutdown=True) == ()


def test_a_cleaned_log_without_snapshots_is_refused_with_the_first_missing_offset(tmp_path: Path) -> None:
    for name, segments, removed in (
        ("a gap between batches", {**DATA, 0: batch("data", 0)}, 1),
        ("a gap within a batch", {**DATA, 0: batch("emptied", 0, count=1)}, 0),
        ("a gap before the first", {0: batch("data", 1), **{base: log for base, log in DATA.items() if base}}, 0),
    ):
        _, rows = made(tmp_path / name, segments, {}, 5)
        assert [row.problem.rpartition(": ")[2] for row, _ in rows.values()] == [f"offset {removed} is missing"] * 3, (
            name
        )
    _, rows = made(tmp_path / "raised", DATA, {}, 5, log_start=1)
    assert {row.problem.rpartition(": ")[2] for row, _ in rows.values()} == {"the log begins at offset 1"}


def test_a_gap_between_the_last_batch_and_the_next_base_offset_is_refused(tmp_path: Path) -> None:
    _, rows = made(tmp_path, {0: batch("data", 0), 3: b""}, {}, 3)
    assert rows[3][0].problem.endswith("offset 1 is missing")


def test_batches_after_an_older_snapshot_must_be_present(tmp_path: Path) -> None:
    """Batches between a snapshot and the first segment may have been deleted."""
    older = encode_snapshot(state_at([], 0))
    segments = {3: DATA[3], 5: b""}
    _, rows = made(tmp_path, segments, {2: older}, 5, log_start=3)
    assert rows[5][0].source is None and "the log begins at offset 3" in rows[5][0].problem


def test_rebuilding_stops_at_damage_and_continues_after_a_valid_snapshot(tmp_path: Path) -> None:
    segments = {**DATA, 2: damaged(DATA[2]), 5: batch("data", 5, 9), 6: b""}
    at_five = encode_snapshot(state_at(decode_log(b"".join(DATA.values())), 5))
    _, rows = made(tmp_path, segments, {5: at_five}, 6)
    assert list(rows) == [2, 3, 6]
    assert not rows[2][0].problem
    assert "invalid CRC" in rows[3][0].problem and "00000000000000000002.log" in rows[3][0].problem
    assert rows[6][0].source == 5 and [entry.producer_id for entry in parse_snapshot(rows[6][1])] == [1, 2, 3, 9]


def test_after_a_crash_the_truncated_tail_is_not_needed(tmp_path: Path) -> None:
    _, rows = made(tmp_path, {**DATA, 3: DATA[3][:-7]}, {}, 4, clean=False)
    assert sorted(rows) == [2, 3] and not any(row.problem for row, _ in rows.values())


def test_valid_snapshots_are_unchanged_even_if_the_log_differs(tmp_path: Path) -> None:
    other = encode_snapshot([ProducerEntry(77, 0, 0, 1, 0, 5, -1, -1)])
    survey, rows = made(tmp_path, DATA, {2: other, 3: damaged(other), 4: b"", 5: other, 9: other}, 5)
    assert survey == SnapshotSurvey((2, 5, 9), (), (3,))
    assert [entry.producer_id for entry in parse_snapshot(rows[3][1])] == [2, 77]


def test_a_snapshot_is_durable_before_it_gets_its_name_and_has_the_owner_and_mode_of_the_log(tmp_path: Path) -> None:
    write(tmp_path, DATA, {3: b"damaged"})
    log = tmp_path / f"{3:020d}.log"
    log.chmod(0o640)
    for offset in (2, 3):
        put_snapshot(
            LOCAL, str(tmp_path), offset, encode_snapshot([]), like=LOCAL.stat(str(log)), run_id="r", attempt="a"
        )
        path = tmp_path / f"{offset:020d}.snapshot"
        assert parse_snapshot(path.read_bytes()) == [] and path.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == sorted(
        [f"{base:020d}.log" for base in DATA] + [f"{offset:020d}.snapshot" for offset in (2, 3)]
    )
