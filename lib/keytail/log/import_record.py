"""Encodes and parses the record that an import writes to the directory of a partition for later runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from keytail.format.json_object import parse_object

_VERSION = 1

Progress = Literal["begun", "done"]


@dataclass(frozen=True, slots=True)
class ImportRecord:
    """The last import into a partition directory: the offsets [base_offset, end_offset).

    `first_crc` is the checksum of the first batch. `progress` is "begun" before the commit, "done" when the import is
    complete.
    """

    import_id: str
    base_offset: int
    end_offset: int
    segment_bases: tuple[int, ...]
    first_crc: int
    records: int
    progress: Progress

    def encode(self) -> bytes:
        fields = {
            "version": _VERSION,
            "import_id": self.import_id,
            "base_offset": self.base_offset,
            "end_offset": self.end_offset,
            "segments": self.segment_bases,
            "first_crc": self.first_crc,
            "records": self.records,
            "progress": self.progress,
        }
        return (json.dumps(fields) + "\n").encode()


def parse_record(data: bytes) -> ImportRecord:
    """Return the record that `ImportRecord.encode` encoded as `data`. Raises ValueError for any other data."""
    try:
        fields = parse_object(data)
        if fields["version"] != _VERSION or fields["progress"] not in ("begun", "done"):
            raise ValueError("it was written by another version of keytail")
        return ImportRecord(
            str(fields["import_id"]),
            int(fields["base_offset"]),
            int(fields["end_offset"]),
            tuple(int(base) for base in fields["segments"]),
            int(fields["first_crc"]),
            int(fields["records"]),
            fields["progress"],
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"a field is missing or has another type: {error}") from error
