"""`leader-epoch-checkpoint` compared with the epochs in a log."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.format.batch import BATCH_TABLE
from keytail.log.checkpoint import read_epochs
from keytail.log.fs import LOCAL
from keytail.rebuild_index.epochs import EpochsPlan, epochs_seen, plan_epochs, write_plan


def table_of(batches: list[tuple[int, int]]) -> np.ndarray:
    table = np.zeros(len(batches), BATCH_TABLE)
    table["leader_epoch"] = [epoch for epoch, _ in batches]
    table["base_offset"] = [base for _, base in batches]
    return table


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    """Return the epochs that leaders recorded, the remaining batches (epoch, base offset), and the log end."""
    entries, batches, epoch, offset = [], [], 0, 0
    for gap, count in draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=8)):
        epoch += gap
        if entries and entries[-1][1] == offset:
            entries.pop()  # the leader appended nothing
        entries.append((epoch, offset))
        for _ in range(count):
            batches.append((epoch, offset))
            offset += draw(st.integers(1, 3))
    kept = [batch for batch in batches if draw(st.booleans())]
    return entries, kept, offset


def as_a_broker(entries: list[tuple[int, int]], batches: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the entries after assigning newer epochs and truncating the end, as in Kafka's LeaderEpochFileCache."""
    cache = list(entries)
    for epoch, base in batches:
        if epoch >= 0 and (not cache or epoch > cache[-1][0]):
            while cache and (cache[-1][0] >= epoch or cache[-1][1] >= base):
                cache.pop()
            cache.append((epoch, base))
    if cache and cache[-1][1] >= end:
        cache = [entry for entry in cache if entry[1] < end]
    return cache


@given(histories(), st.data())
def test_the_entries_are_those_of_a_broker_and_none_below_the_end_is_lost(history, data: st.DataObject) -> None:
    entries, batches, end = history
    known = entries[: data.draw(st.integers(0, len(entries)))]
    end = data.draw(st.integers(0, end))
    batches = [(epoch, base) for epoch, base in batches if base < end]
    cut = data.draw(st.integers(0, len(batches)))
    seen = epochs_seen(table_of(batches[:cut])) + epochs_seen(table_of(batches[cut:]))
    plan = plan_epochs(known, seen, end)
    assert plan.problem == ""
    assert list(plan.entries) == as_a_broker(known, batches, end)
    assert [entry for entry in known if entry[1] < end] == list(plan.entries[: len(plan.entries) - len(plan.added)])
    assert plan.dropped == tuple(entry for entry in known if entry[1] >= end)
    again = plan_epochs(plan.entries, seen, end)
    assert not again.changes and again.entries == plan.entries


def test_only_epochs_above_all_earlier_ones_are_found() -> None:
    batches = [(-1, 0), (3, 1), (3, 5), (2, 6), (7, 9), (-1, 10), (5, 11), (8, 12)]
    assert epochs_seen(table_of(batches)) == [(3, 1), (7, 9), (8, 12)]
    assert epochs_seen(table_of(batches), latest=3) == [(7, 9), (8, 12)]
    assert epochs_seen(table_of([])) == []


@pytest.mark.parametrize("seen", [(6, 100), (6, 40)])
def test_a_later_epoch_that_would_move_an_entry_is_a_problem(seen: tuple[int, int]) -> None:
    plan = plan_epochs([(0, 0), (5, 100)], [seen], 200)
    assert plan.entries == ((0, 0), (5, 100)) and not plan.changes
    assert plan.problem.startswith(f"the log has epoch 6 at offset {seen[1]}")


OUT_OF_ORDER = [[(5, 100), (3, 150)], [(5, 100), (5, 150)], [(5, 100), (6, 100)], [(5, 9), (6, 3)]]


@pytest.mark.parametrize("entries", OUT_OF_ORDER)
def test_entries_out_of_order_are_a_problem(entries: list[tuple[int, int]]) -> None:
    plan = plan_epochs(entries, [(9, 160)], 120)
    assert plan.problem and plan.entries == tuple(entries) and not plan.changes


def test_the_file_keeps_owner_and_mode_and_is_not_written_without_a_change(tmp_path: Path) -> None:
    path = tmp_path / "leader-epoch-checkpoint"
    path.write_text("0\n2\n0 0\n5  100\n")
    path.chmod(0o640)
    before = path.stat()
    write_plan(LOCAL, str(tmp_path), plan_epochs(read_epochs(LOCAL, str(path)), [(5, 120)], 130))
    write_plan(LOCAL, str(tmp_path), EpochsPlan((), added=((0, 0),), problem="why"))
    assert path.stat().st_ino == before.st_ino
    write_plan(LOCAL, str(tmp_path), plan_epochs(read_epochs(LOCAL, str(path)), [(7, 40)], 90))
    assert path.read_text() == "0\n2\n0 0\n7 40\n"
    assert path.stat().st_mode == before.st_mode
    assert os.listdir(tmp_path) == [path.name]
