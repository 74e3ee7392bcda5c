"""The header of a record batch of version 2 (format/BATCH.md), for kernels: byte positions, and bits of the attributes.

`format/batch.py` has the same header as a dtype, and the same bits; a test compares them. Messages of magic 0 and 1
have only the offset, the length and the magic at the same positions. Of the attribute bits, these messages have the
codec, and messages of magic 1 also have the timestamp type.
"""

BATCH_LENGTH = 8
LEADER_EPOCH = 12
MAGIC = 16
CRC = 17
ATTRIBUTES = 21  # the checksum covers all bytes from the attributes on
LAST_OFFSET_DELTA = 23
BASE_TIMESTAMP = 27
MAX_TIMESTAMP = 35
PRODUCER_ID = 43
PRODUCER_EPOCH = 51
BASE_SEQUENCE = 53
RECORD_COUNT = 57
HEADER_BYTES = 61

LENGTH_PREFIX_BYTES = 12  # the base offset and the length field, which the length does not include

# Bits of the attributes.
CODEC_MASK = 0x07
NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
MAX_CODEC, MAX_OLD_CODEC = ZSTD, LZ4  # maximum codec of magic 2, and of magic 0 and 1
LOG_APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20
DELETE_HORIZON = 0x40
TRANSACTIONAL_OR_CONTROL = TRANSACTIONAL | CONTROL
KNOWN_ATTRIBUTES = 0x7F
# No cleaning changes these attributes, not even when it empties the batch.
PRESERVED_ATTRIBUTES = LOG_APPEND_TIME | TRANSACTIONAL | CONTROL
