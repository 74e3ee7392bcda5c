"""How far the logs of replicas agree."""

from __future__ import annotations

import numpy as np

from keytail.cut.agreement import Agreement, agreement
from keytail.cut.transactions import Piece, merged
from keytail.format.batch import BATCH_TABLE, DELETE_HORIZON


def table(*batches: tuple[int, int, int], **fields: int) -> np.ndarray:
    """Return a table of whole batches, each given by its base offset, last offset and leader epoch."""
    made = np.zeros(len(batches), BATCH_TABLE)
    for row, (base, last, epoch) in zip(made, batches, strict=True):
        row["base_offset"], row["last_offset"], row["leader_epoch"] = base, last, epoch
        row["record_count"], row["crc"], row["magic"] = last - base + 1, 1000 * base + epoch, 2
    for name, value in fields.items():
        made[name][-1] = value
    return made


A_LOG = table((0, 4, 0), (5, 5, 0), (6, 9, 1))


def both(a: np.ndarray, a_end: int, b: np.ndarray, b_end: int) -> Agreement:
    found = agreement(a, a_end, b, b_end)
    assert agreement(b, b_end, a, a_end) == found
    return found


def test_logs_agree_up_to_the_end_of_the_shorter_log() -> None:
    assert both(A_LOG, 10, A_LOG, 10) == Agreement(10)
    assert both(A_LOG, 10, A_LOG[:2], 6) == Agreement(6)
    assert both(A_LOG, 10, A_LOG[:0], 0) == Agreement(0)


def test_logs_agree_up_to_the_first_offset_with_different_epochs() -> None:
    assert both(A_LOG, 10, table((0, 4, 0), (5, 7, 2)), 8) == Agreement(5, epoch_differs=True)
    assert both(A_LOG, 10, table((0, 4, 0), (5, 5, 0), (6, 6, 2), (7, 9, 1)), 10) == Agreement(6, epoch_differs=True)


def test_records_that_compaction_removed_are_no_difference() -> None:
    cleaned = table((0, 4, 0), (6, 9, 1))
    assert both(A_LOG, 10, cleaned, 10) == Agreement(10)
    emptied = A_LOG.copy()
    emptied["record_count"][0], emptied["crc"][0] = 2, 7
    assert both(A_LOG, 10, emptied, 10) == Agreement(10)
    horizon = table((0, 4, 0), crc=7, attributes=DELETE_HORIZON)
    assert both(table((0, 4, 0), attributes=DELETE_HORIZON), 5, horizon, 5) == Agreement(5)


def test_a_batch_of_several_others_has_their_epochs() -> None:
    """As after a repack."""
    assert both(A_LOG, 10, table((0, 5, 0), (6, 9, 1)), 10) == Agreement(10)
    assert both(A_LOG, 10, table((0, 9, 0)), 10) == Agreement(6, epoch_differs=True)


def test_different_bytes_in_the_same_batch_are_found() -> None:
    other = table((0, 4, 0), (5, 5, 0), (6, 9, 1), crc=7)
    assert both(A_LOG, 10, other, 10) == Agreement(10, bytes_differ_at=6)
    assert both(A_LOG[:2], 6, other, 10) == Agreement(6)


def test_pieces_are_merged_from_replicas_that_were_compacted_at_different_times() -> None:
    cleaned = [Piece(7, 5, None, 4, 5, True, 20), Piece(8, 6, 1), Piece(9, 12, 2, 3, 14, True, 30)]
    full = [Piece(7, 1, 3, 4, 5, True, 20), Piece(8, 6, 1), Piece(9, 8, 2)]
    assert merged(cleaned, [full], 10) == [
        Piece(7, 1, 3, 4, 5, True, 20), Piece(8, 6, 1), Piece(9, 8, 2, 3, 14, True, 30),
    ]  # fmt: skip
    assert merged(full, [cleaned[:2]], 10) == full
    assert merged([], [full], 10) == full
