"""Declares the header of record batches (v2), and the batch table of chunks.

BATCH.md beside this file specifies the layout and its rules, with an example byte by byte.
"""

from __future__ import annotations

import numpy as np

# The 61 header bytes of every v2 batch, exactly as on disk (BATCH.md, "Header").
BATCH_HEADER = np.dtype(
    [
        ("base_offset", ">i8"),
        ("batch_length", ">i4"),  # bytes after this field
        ("partition_leader_epoch", ">i4"),
        ("magic", "i1"),
        ("crc", ">u4"),  # CRC-32C from `attributes` to the end of the batch
        ("attributes", ">i2"),
        ("last_offset_delta", ">i4"),
        ("base_timestamp", ">i8"),
        ("max_timestamp", ">i8"),
        ("producer_id", ">i8"),
        ("producer_epoch", ">i2"),
        ("base_sequence", ">i4"),
        ("record_count", ">i4"),
    ]
)
assert BATCH_HEADER.fields is not None
HEADER_BYTES = BATCH_HEADER.itemsize
# The size of `base_offset` and `batch_length`, which `batch_length` does not include.
LENGTH_PREFIX_BYTES = BATCH_HEADER.fields["partition_leader_epoch"][1]
CRC_START = BATCH_HEADER.fields["attributes"][1]
MIN_RECORD_OVERHEAD_BYTES = 14  # the smallest `batch_length` that readers accept, for any magic

CODEC_MASK = 0x07
LOG_APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20
DELETE_HORIZON = 0x40
# A bit that only tables have: a message of magic 0 or 1 is rebuilt, not copied, when the magic is kept (LEGACY.md 5).
NOT_COPIED = 0x80

NO_TIMESTAMP = -1
NO_PRODUCER_ID = -1
NO_SEQUENCE = -1
NO_CONTROL_TYPE = -1

# The batch table has one row per batch, in native byte order. This table is the input of every processing step
# (`log/records/chunk.py`).
BATCH_TABLE = np.dtype(
    [
        ("position", "i8"),  # byte position of the batch in its segment file
        ("base_offset", "i8"),
        ("last_offset", "i8"),
        ("base_timestamp_ms", "i8"),  # the delete horizon if the attribute DELETE_HORIZON is set
        ("max_timestamp_ms", "i8"),
        ("producer_id", "i8"),
        ("size_bytes", "i4"),  # the size of the whole batch, including its length prefix
        ("crc", "u4"),
        ("leader_epoch", "i4"),
        ("base_sequence", "i4"),
        ("record_count", "i4"),
        ("coordinator_epoch", "i4"),  # epoch in a transaction marker's first record; -1 elsewhere
        ("attributes", "i2"),
        ("producer_epoch", "i2"),
        ("control_type", "i2"),  # type of a control batch's first record; -1 elsewhere
        ("magic", "i1"),
    ],
    align=True,
)
