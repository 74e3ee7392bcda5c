"""The decision whether a preparation may be committed: each reason against it, and changes that are allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.compact.plan import Selection
from keytail.compact.prepared.committing import Now, reason_to_discard
from tests.compact.prepared.test_record import a_record

DAY_MS = 86_400_000
RECORD = a_record()  # a preparation of offsets 5 to 25, with log end offset 30
SELECTION = Selection(5, 25, 0, 900, 900, 1.0, False, False, True, "")
UNCHANGED = Now(RECORD.prepared_ms, RECORD.basis, SELECTION, RECORD.sources, RECORD.outputs)


def with_basis(**changed: object) -> Now:
    return replace(UNCHANGED, basis=replace(RECORD.basis, **changed))


def test_an_unchanged_partition_is_committed() -> None:
    assert not reason_to_discard(RECORD, UNCHANGED)


@given(st.integers(30, 2**62), st.integers(0, 9), st.integers(0, 38), st.booleans())
def test_changes_after_the_log_end_do_not_matter(end: int, epochs: int, age_ms: int, due: bool) -> None:
    """The broker has appended, been elected leader again, and rolled segments, and more segments became cleanable."""
    basis = replace(
        RECORD.basis,
        log_end_offset=end,
        leader_epochs=(*RECORD.basis.leader_epochs, *((9 + n, end) for n in range(epochs))),
    )
    selection = replace(SELECTION, first_uncleanable_offset=end, eligible=due, blocker="" if due else "not due")
    now = replace(UNCHANGED, now_ms=RECORD.prepared_ms + age_ms, basis=basis, selection=selection)
    assert not reason_to_discard(RECORD, now)


@pytest.mark.parametrize("epochs", [(), ((5, 30),), ((5, 31),)], ids=["removed", "replaced by another", "appended to"])
def test_an_epoch_without_records_may_disappear(epochs: tuple[tuple[int, int], ...]) -> None:
    """A leader stores its epoch before it appends; if it appends nothing, the broker removes the epoch when it starts
    again or becomes a follower.
    """
    known = RECORD.basis.leader_epochs
    record = replace(RECORD, basis=replace(RECORD.basis, leader_epochs=(*known, (4, 30))))
    assert not reason_to_discard(record, with_basis(leader_epochs=(*known, *epochs)))


def test_a_slightly_earlier_clock_is_tolerated() -> None:
    assert not reason_to_discard(RECORD, replace(UNCHANGED, now_ms=RECORD.prepared_ms - 60_000))


def expiring(expiration_ms: int) -> Now:
    return with_basis(config=replace(RECORD.basis.config, producer_id_expiration_ms=expiration_ms))


def test_producers_may_expire_sooner_than_when_prepared() -> None:
    """Then more of their last batches were retained than necessary, for instance because the setting was not known."""
    assert not reason_to_discard(RECORD, expiring(RECORD.basis.config.producer_id_expiration_ms - 1))


REASONS: dict[str, tuple[Now, str]] = {
    "no sources": (replace(UNCHANGED, sources=()), "does not exist any more"),
    "a checkpoint": (with_basis(cleaner_checkpoint=5), "the cleaner's checkpoint is 5; when prepared, it was None"),
    "the log start": (with_basis(log_start_offset=6), "the log start offset is 6"),
    "the log end": (with_basis(log_end_offset=29), "the log was truncated"),
    "an epoch below the log end": (with_basis(leader_epochs=((0, 0), (3, 5), (4, 29))), "leader epoch 4 begins at 29"),
    "an epoch's start": (with_basis(leader_epochs=((0, 0), (3, 6))), "epoch 3 begins at offset 6; when prepared,"),
    "an epoch removed": (with_basis(leader_epochs=((0, 0),)), "leader epoch 3 does not exist any more"),
    "the policy": (
        with_basis(config=replace(RECORD.basis.config, cleanup_policy=frozenset({"compact"}))),
        "settings were changed after the preparation: cleanup.policy",
    ),
    "the expiration": (
        expiring(RECORD.basis.config.producer_id_expiration_ms + 1),
        "settings were changed after the preparation: producer.id.expiration.ms",
    ),
    "keyless records": (with_basis(drop_keyless=False), "prepared with --drop-keyless"),
    "the format": (with_basis(message_format="keep"), "--message-format"),
    "the version": (with_basis(by_file_time=True), "--broker-version"),
    "a replica": (with_basis(removal_limit_offset=10), "--replica"),
    "nothing cleanable": (replace(UNCHANGED, selection=None), "nothing can be cleaned"),
    "less cleanable": (
        replace(UNCHANGED, selection=replace(SELECTION, first_uncleanable_offset=24, limit="open transaction")),
        "now cleaning is limited to offset 24 (open transaction)",
    ),
    "no outputs": (replace(UNCHANGED, outputs=()), "does not exist"),
    "a time in the future": (replace(UNCHANGED, now_ms=RECORD.prepared_ms - 60_001), "1 min in the future"),
    "its age": (replace(UNCHANGED, now_ms=RECORD.prepared_ms + 39), "half of delete.retention.ms"),
}


@pytest.mark.parametrize("name", REASONS)
def test_each_reason_discards_the_preparation(name: str) -> None:
    now, text = REASONS[name]
    assert text in reason_to_discard(RECORD, now)


@pytest.mark.parametrize(("retention_ms", "limit_ms"), [(2 * DAY_MS, DAY_MS), (1000, 500), (1, 0), (0, DAY_MS)])
def test_a_preparation_may_be_half_as_old_as_tombstones_are_retained(retention_ms: int, limit_ms: int) -> None:
    basis = replace(RECORD.basis, config=replace(RECORD.basis.config, delete_retention_ms=retention_ms))
    record = replace(RECORD, basis=basis)

    def after(age_ms: int) -> Now:
        return replace(UNCHANGED, basis=basis, now_ms=RECORD.prepared_ms + age_ms)

    assert not reason_to_discard(record, after(limit_ms))
    assert "ago; the limit is" in reason_to_discard(record, after(limit_ms + 1))
