"""The combined states of parts of a log give the transaction indexes of a pass over the whole log."""

from __future__ import annotations

import random

import numpy as np
import pytest

from keytail.format.batch import BATCH_TABLE, CONTROL, TRANSACTIONAL
from keytail.log.transactions import NATIVE_ENTRY
from keytail.rebuild_index import aborted
from keytail.rebuild_index.aborted import Needed, asked_offsets, right_entries
from tests.chance import SEED, draws
from tests.reference.cleaner import Aborted
from tests.reference.transactions import Event, broker_entries
from tests.reference.transactions import right_entries as reference_entries

_CONTROL_TYPE = {"ABORT": 0, "COMMIT": 1, "other control": 2, "emptied control": -1}


def random_events(rng: random.Random, count: int, *, cleaned: bool) -> list[Event]:
    """Return events of few producers, so that transactions interleave; in a cleaned log most data and some markers
    are removed.
    """
    offset, events = 0, []
    aborts = rng.choice([0.0, 0.1, 0.5])
    for _ in range(count):
        kind = rng.choice(["plain", "data", "data", "marker"])
        if kind == "marker":
            others = ["COMMIT", "COMMIT", "other control", "emptied control"]
            kind = "ABORT" if rng.random() < aborts else rng.choice(others)
        last = offset + rng.choice([0, 0, 2]) * (kind in ("plain", "data"))
        events.append(Event(kind, rng.randint(1, 4), offset, last))
        offset = last + 1 + rng.choice([0, 0, 3])
    if cleaned:
        events = [event for event in events if event.is_control or rng.random() < 0.4]
    return events


def table_of(events: list[Event]) -> np.ndarray:
    table = np.zeros(len(events), BATCH_TABLE)
    table["control_type"] = -1
    for row, event in zip(table, events, strict=True):
        row["base_offset"], row["last_offset"], row["producer_id"] = (
            event.base_offset, event.last_offset, event.producer_id,
        )  # fmt: skip
        row["record_count"] = event.kind != "emptied control"
        if event.kind != "plain":
            row["attributes"] = TRANSACTIONAL | (CONTROL if event.is_control else 0)
        row["control_type"] = _CONTROL_TYPE.get(event.kind, -1)
    return table


def entries_of(known: list[Aborted]) -> np.ndarray:
    entries = np.zeros(len(known), NATIVE_ENTRY)
    for row, item in zip(entries, known, strict=True):
        row["producer_id"], row["first_offset"] = item.producer_id, item.first_offset
        row["last_offset"], row["last_stable_offset"] = item.last_offset, item.last_stable_offset
    return np.sort(entries, order=["first_offset", "last_offset"])


def as_model_entries(entries: np.ndarray) -> list[Aborted]:
    return [
        Aborted(int(e["producer_id"]), int(e["first_offset"]), int(e["last_offset"]), int(e["last_stable_offset"]))
        for e in entries
    ]


def in_parts(rng: random.Random, events: list[Event], known: np.ndarray, log_start: int) -> list[np.ndarray]:
    """Split the log at random into parts, each read in chunks, and return the rows that are needed of each part."""
    cuts = sorted(rng.randint(0, len(events)) for _ in range(rng.choice([0, 1, 3, 10])))
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, len(events)], strict=True):
        needed = Needed(asked_offsets(known), log_start)
        chunk = rng.randint(1, 12)
        for at in range(begin, end, chunk):
            needed.add(table_of(events[at : min(at + chunk, end)]))
        parts.append(needed.rows())
    return parts


@pytest.mark.parametrize("case", range(draws(60)))
def test_combined_parts_equal_the_model_of_the_whole(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(f"{SEED} {case}")
    monkeypatch.setattr(aborted, "_MANY_ROWS", rng.choice([3, 1 << 16]))
    events = random_events(rng, rng.randint(1, 120), cleaned=case % 2 == 1)
    known = [] if rng.random() < 0.3 else broker_entries(events)
    for number, item in enumerate(known):
        if rng.random() < 0.4:
            known[number] = Aborted(
                item.producer_id,
                max(item.first_offset - rng.choice([0, 1, 5]), 0),
                item.last_offset,
                item.last_stable_offset - rng.choice([0, 1, 4]),
            )
    log_start = 0 if rng.random() < 0.5 or not events else rng.randint(0, events[-1].last_offset)
    entries = entries_of(known)
    parts = in_parts(rng, events, entries, log_start)
    found = as_model_entries(right_entries(parts, entries, 0, log_start))
    assert [item for item in found if item.last_offset >= log_start] == reference_entries(events, known, log_start)
    below = reference_entries(events, known, 0)
    assert [item for item in found if item.last_offset < log_start] == [o for o in below if o.last_offset < log_start]


def test_a_log_that_was_never_cleaned_needs_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in range(40):
        rng = random.Random(f"{SEED} whole {case}")
        events = random_events(rng, 100, cleaned=False)
        none = np.empty(0, NATIVE_ENTRY)
        parts = in_parts(rng, events, none, 0)
        assert as_model_entries(right_entries(parts, none, 0, 0)) == broker_entries(events)


def test_the_state_of_a_part_is_small() -> None:
    """Only the first batch and the marker of a long transaction are stored, and of many committed ones a few rows per
    producer.
    """
    data = [Event("data", 1, n, n) for n in range(1000)]
    needed = Needed(np.empty(0, np.int64), 0)
    needed.add(table_of([*data, Event("ABORT", 1, 1000, 1000)]))
    assert needed.rows()["base_offset"].tolist() == [0, 1000]
    committed = [Event("data" if n % 2 == 0 else "COMMIT", 1, n, n) for n in range(1000)]
    needed = Needed(np.empty(0, np.int64), 0)
    needed.add(table_of(committed))
    assert needed.rows()["base_offset"].tolist() == [0, 1, 999]
