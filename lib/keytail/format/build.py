"""Builds a record batch from a few records, for scripts and examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from keytail.format.codecs.table import NONE
from keytail.format.columns import BytesColumn
from keytail.format.encode import MAX_BATCH_BYTES, Encoding, RecordColumns, encode_batches

PlainRecord: TypeAlias = tuple[int, bytes | None, bytes | None]  # timestamp in ms, key, value


def build_batch(
    records: Sequence[PlainRecord], *, base_offset: int = 0, leader_epoch: int = 0, codec: int = NONE
) -> bytes:
    """Return a version 2 batch of `records` at consecutive offsets, as a producer without idempotence would send it.

    Raises ValueError if there is no record.
    """
    if not records:
        raise ValueError("a batch has at least one record")
    times, keys, values = zip(*records, strict=True)
    columns = RecordColumns(np.array(times, np.int64), BytesColumn.of(keys), BytesColumn.of(values))
    encoding = Encoding(leader_epoch, codec, batch_bytes=MAX_BATCH_BYTES)
    [(data, _)] = encode_batches(columns, encoding, base_offset)
    return data.tobytes()
