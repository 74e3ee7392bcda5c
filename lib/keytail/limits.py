"""Defines the limit for the size of a record in memory, which a flag can change."""

from __future__ import annotations

import os

# The limit is an environment variable, so that every process of a run has it; Spark's executors get the variable
# through `spark.executorEnv`.
MAX_RECORD_VARIABLE = "KEYTAIL_MAX_RECORD_BYTES"
MAX_RECORD_BYTES = 64 << 20


def max_record_bytes() -> int:
    """Return the largest uncompressed size in bytes of a record, or of all messages in a compressed message (magic 0
    or 1).

    Larger batches are decompressed in pieces, but each record must fit into memory as a whole. A record of magic 2
    of at most `pieces.PIECE_BYTES`, or in a batch of at most `pieces.WHOLE_BLOCK_BYTES`, is read with any limit.
    """
    return int(os.environ.get(MAX_RECORD_VARIABLE) or MAX_RECORD_BYTES)
