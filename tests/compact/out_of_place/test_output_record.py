"""The record beside a partition that was written out of place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from keytail.compact.out_of_place.output_record import (
    Entries,
    OutputRecord,
    PlacedFile,
    SeenFile,
    decode_record,
    encode_record,
)
from keytail.errors import CorruptLog

NAME = f"{0:020d}.log"
RECORD = OutputRecord(
    "run", "t", 0, "/logs", 1, True, True,
    (SeenFile(NAME, 5, 6),), Entries(), Entries(), (PlacedFile(NAME, "", 5, "aa"),),
)  # fmt: skip


def test_a_written_record_is_read_back() -> None:
    assert decode_record(encode_record(RECORD), "where") == RECORD


@pytest.mark.parametrize("name", ["../other", "/etc/shadow", 5])
@pytest.mark.parametrize("of", ["source_files", "files"])
def test_a_record_names_files_of_its_directory_only(of: str, name: object) -> None:
    fields: Any = json.loads(encode_record(RECORD))
    fields[of][0][0] = name
    with pytest.raises(CorruptLog, match="cannot be read"):
        decode_record(json.dumps(fields).encode(), "where")
