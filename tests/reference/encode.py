"""Divides records into batches, and builds the columns that represent them: the reference model of the encoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference.batches import Rec, encode_batch

MANY = 2**31 - 1


def cut(records: Sequence[Rec], batch_bytes: int, batch_records: int = MANY) -> list[list[Rec]]:
    """Divide records into batches: a record is added to a batch if the uncompressed batch does not exceed
    `batch_bytes`.
    """
    batches: list[list[Rec]] = []
    for rec in records:
        if batches and len(batches[-1]) < batch_records and len(encode_batch([*batches[-1], rec])) <= batch_bytes:
            batches[-1].append(rec)
        else:
            batches.append([rec])
    return batches


def encode(
    records: Sequence[Rec], batch_bytes: int, batch_records: int = MANY, *, codec: int = 0, leader_epoch: int = 0
) -> list[bytes]:
    """Return the encoded batches in order."""
    groups = cut(records, batch_bytes, batch_records)
    return [encode_batch(group, codec=codec, leader_epoch=leader_epoch) for group in groups]


def bytes_arrays(values: Sequence[bytes | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return data, offsets and validity of a column."""
    offsets = np.zeros(len(values) + 1, np.int64)
    offsets[1:] = np.cumsum([len(value or b"") for value in values])
    data = np.frombuffer(b"".join(value or b"" for value in values), np.uint8)
    return data, offsets, np.array([value is not None for value in values], np.bool_)


def headers_arrays(records: Sequence[Rec]) -> tuple[np.ndarray, tuple, tuple]:
    """Return the offsets, and the columns of keys and of values."""
    offsets = np.zeros(len(records) + 1, np.int64)
    offsets[1:] = np.cumsum([len(rec.headers) for rec in records])
    pairs = [pair for rec in records for pair in rec.headers]
    return offsets, bytes_arrays([key for key, _ in pairs]), bytes_arrays([value for _, value in pairs])
