"""Byte positions of the fields in the header of a record batch of version 2 (format/BATCH.md), for kernels.

`format/batch.py` has the same header as a dtype; a test compares the two. Messages of magic 0 and 1 have the
offset, the length and the magic at the same positions, and nothing else.
"""

BATCH_LENGTH = 8
LEADER_EPOCH = 12
MAGIC = 16
CRC = 17
ATTRIBUTES = 21  # the checksum covers all bytes from here on
LAST_OFFSET_DELTA = 23
BASE_TIMESTAMP = 27
MAX_TIMESTAMP = 35
PRODUCER_ID = 43
PRODUCER_EPOCH = 51
BASE_SEQUENCE = 53
RECORD_COUNT = 57
HEADER_BYTES = 61

LENGTH_PREFIX_BYTES = 12  # the base offset and the length, which the length does not count
