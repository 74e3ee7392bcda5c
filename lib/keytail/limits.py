"""How much of a log one task holds in memory at most, where a command line may raise it."""

from __future__ import annotations

import os

# In the environment, so that every process of a run has it, and Spark's executors by `spark.executorEnv`.
MAX_RECORD_VARIABLE = "KEYTAIL_MAX_RECORD_BYTES"
MAX_RECORD_BYTES = 64 << 20


def max_record_bytes() -> int:
    """Uncompressed bytes of the largest record that is opened, and of all messages in a compressed one of magic 0 or 1.

    Batches of more are opened in pieces, but a record is held as a whole.
    """
    return int(os.environ.get(MAX_RECORD_VARIABLE) or MAX_RECORD_BYTES)
