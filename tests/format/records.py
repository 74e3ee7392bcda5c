"""Records as format/record.py decodes them, encoded by the reference model."""

from __future__ import annotations

from keytail.format.record import Record
from tests.reference import batches


def encode_record(record: Record) -> bytes:
    rec = batches.Rec(record.offset_delta, record.timestamp_delta, record.key, record.value, record.headers)
    return batches.encode_record(rec, 0, 0)
