"""The offset and time index of a segment in plain Python, from the bytes of its log alone.

A segment that was written without interruption has these indexes, after a broker's appends and after its recovery.
Shares no code with keytail.
"""

from __future__ import annotations

import struct

from tests.reference.batches import HEADER

OFFSET_ENTRY = struct.Struct(">ii")  # relative offset, byte position of the batch
TIME_ENTRY = struct.Struct(">qi")  # timestamp, relative offset


def index_files(
    log: bytes, base_offset: int, index_interval_bytes: int, *, segment_index_bytes: int = 10_485_760
) -> tuple[bytes, bytes]:
    """Return the trimmed bytes of `.index` and `.timeindex`. Raises ValueError if an index would be full."""
    offset_index: list[tuple[int, int]] = []
    time_index: list[tuple[int, int]] = []
    largest, offset_of_largest = -1, base_offset
    since_last = position = 0

    def add_time(room_needed: bool) -> None:
        if room_needed and len(time_index) >= segment_index_bytes // TIME_ENTRY.size - 1:
            raise ValueError("time index is full")
        if largest > (time_index[-1][0] if time_index else -1):
            time_index.append((largest, offset_of_largest - base_offset))

    while position < len(log):
        header = HEADER.unpack_from(log.ljust(position + HEADER.size), position)
        size, last_offset, max_timestamp = header[1] + 12, header[0] + header[6], header[8]
        if header[3] < 2:
            last_offset = header[0]
            max_timestamp = struct.unpack_from(">q", log, position + 18)[0] if header[3] else -1
        if max_timestamp > largest:
            largest, offset_of_largest = max_timestamp, last_offset
        if since_last > index_interval_bytes:
            if len(offset_index) >= segment_index_bytes // OFFSET_ENTRY.size:
                raise ValueError("offset index is full")
            offset_index.append((last_offset - base_offset, position))
            add_time(room_needed=True)
            since_last = 0
        since_last += size
        position += size
    add_time(room_needed=False)
    return (
        b"".join(OFFSET_ENTRY.pack(*entry) for entry in offset_index),
        b"".join(TIME_ENTRY.pack(*entry) for entry in time_index),
    )
