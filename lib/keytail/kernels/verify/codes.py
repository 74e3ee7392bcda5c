"""Codes that the kernels of `verify` return: what a kernel needs, or a finding."""

from __future__ import annotations

DONE, NEED_MORE, NEED_BLOCK, NEED_WRAPPER, NEED_ROOM = range(5)
FIRST_FINDING = 10
(
    CUT,
    SIZE,
    MAGIC,
    CRC,
    ORDER,
    SEGMENT_RANGE,
    NEXT_SEGMENT,
    CODEC,
    COUNT,
    RECORD,
    RECORD_OFFSET,
    RECORD_TIMESTAMP,
    MAX_TIMESTAMP_OFF,
    PRODUCER,
    CONTROL_UNREADABLE,
    INDEX_POSITION,
    INDEX_OFFSET,
    TIME_OFFSET,
    TIME_ENTRY,
) = range(FIRST_FINDING, FIRST_FINDING + 19)
ENDS_THE_WALK = (CUT, SIZE, MAGIC)
