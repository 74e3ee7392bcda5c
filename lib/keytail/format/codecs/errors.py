"""Defines the errors of codecs for data that Kafka's readers refuse, and for data that need too much memory."""

from __future__ import annotations

from typing import NoReturn, TypeAlias

from keytail.errors import Refused

Buffer: TypeAlias = bytes | bytearray | memoryview
NO_LIMIT_BYTES = 2**63 - 1
PART_BYTES = 1 << 20
LARGER_REMEDY = (
    "The data are not damaged, and the partition was not changed. Raise --max-record-bytes if each task has about 5 "
    "times as much memory, or leave this partition to the broker's log cleaner"
)
_WINDOW_REMEDY = (
    "The compression window is larger than 128 MiB, which Kafka's own readers also refuse; no flag changes this limit. "
    "The partition was not changed: check the compression settings of the producer"
)


class TooLarge(Refused):
    """Raised for data that are not damaged, but need more memory than allowed here or by Kafka's own readers."""

    default_slug = "too-large"


def raise_too_large(limit_bytes: int) -> NoReturn:
    raise TooLarge(f"the data decompress to more than {limit_bytes} bytes", remedy=LARGER_REMEDY)


def of_library(codec: str, problem: Exception) -> Exception:
    """Return the exception to raise for an error of a codec's library: MemoryError; TooLarge; or ValueError, for data
    that cannot be decompressed."""
    text = str(problem)
    if "not enough memory" in text or "llocation" in text:
        return MemoryError(f"{codec}: {text}")
    if "too much memory" in text:  # a window of more than 128 MiB, the limit of Kafka's reader
        return TooLarge(f"{codec}: {text}", remedy=_WINDOW_REMEDY)
    return ValueError(f"{codec}: {text}")
