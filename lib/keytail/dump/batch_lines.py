"""Formats the batches and records of a dump as the lines of Kafka's DumpLogSegments, or as JSON objects.

Kafka's tool prints the same fields (format/DUMP.md). In JSON the fields have the same names. Data that is not UTF-8 is
in base64, under the name with the suffix `_base64`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from keytail.dump.segment import Part
from keytail.dump.templates import Buffers, LineWriter, Literals, Rows, Sink, Span, Template
from keytail.format.batch import CODEC_MASK, CONTROL, DELETE_HORIZON, LOG_APPEND_TIME, TRANSACTIONAL
from keytail.format.codecs.table import CODECS
from keytail.format.coordinator import control_text
from keytail.format.messages import Json
from keytail.kernels.dump import lines as kernels

_BOOLEANS = ("false", "true")
_TYPES = ("CreateTime", "LogAppendTime", "NoTimestampType")
_QUOTED_TYPES = tuple(f'"{name}"' for name in _TYPES)
_CODECS = (*CODECS, *(f"unknown({n})" for n in range(len(CODECS), CODEC_MASK + 1)))
_MARKERS = ("ABORT", "COMMIT")

# A function of a record's key, value and offset that returns key and payload as text (text that is JSON has the type
# Json). A key or payload of None is not printed.
Decoder: TypeAlias = Callable[[bytes | None, bytes | None, int], tuple[str | None, str | None]]
BOTH = frozenset({"key", "payload"})


@dataclass(frozen=True)
class Shown:
    """The parts of records that are written (keys and values with `contents`, other fields with `metadata`), and their
    format. `decoded` are the parts that the decoder decodes, of `key` and `payload`."""

    contents: bool = False
    metadata: bool = True
    json: bool = False
    decoder: Decoder | None = None
    decoded: frozenset[str] = BOTH

    def decodes(self, part: str) -> bool:
        return self.decoder is not None and part in self.decoded


class DumpWriter:
    """Writes the parts of a log to a sink, as lines of Kafka's tool or as JSON objects."""

    def __init__(self, sink: Sink, shown: Shown) -> None:
        self._shown = shown
        literals = Literals()
        if shown.json:
            self._batches = [_json_batch(literals, old) for old in (False, True)]
            self._records = [_json_record(literals, old, shown) for old in (False, True)]
        else:
            self._batches = [_text_batch(literals, old) for old in (False, True)]
            self._records = [_text_record(literals, old, shown) for old in (False, True)]
        self._lines = LineWriter(sink, literals)

    def write(self, part: Part, wanted: np.ndarray | None = None) -> None:
        """Write a part of the log; with `wanted` (one bool per record), only the wanted records."""
        is_old = bool(part.batches["magic"][0] < 2) if len(part.batches) else False
        batches = _batch_rows(part.batches, part.valid)
        if part.records is None:
            self._lines.write(self._batches[is_old], batches)
            return
        first = part.first_record
        if wanted is not None:
            first = np.concatenate(([0], np.cumsum(wanted)))[first]
        records, buffers = self._record_rows(part, slice(None) if wanted is None else wanted)
        if part.continues:
            self._lines.write(self._records[is_old], records, buffers=buffers)
            return
        self._lines.write(self._batches[is_old], batches, (self._records[is_old], records), first, buffers)

    def _record_rows(self, part: Part, wanted: slice | np.ndarray) -> tuple[Rows, Buffers]:
        table = part.records
        assert table is not None
        records, n = table.records, len(table)
        batch_of = records["row"]
        batches = part.batches
        control = (batches["attributes"][batch_of] & CONTROL != 0) & (batches["magic"][batch_of] >= 2)
        where = table.in_arena.astype(np.int8)
        keys = Span(where, records["key_start"], records["key_bytes"].astype(np.int64))
        values = Span(where, table.value_start, records["value_bytes"].astype(np.int64))
        base_sequence = batches["base_sequence"][batch_of].astype(np.int64)
        numbers = {
            "offset": records["offset"],
            "timestamp": records["timestamp_ms"],
            "timestamp type": _timestamp_types(batches)[batch_of],
            "key bytes": keys.sizes,
            "value bytes": values.sizes,
            "sequence": np.where(
                base_sequence >= 0, _wrapped(base_sequence, records["offset"] - batches["base_offset"][batch_of]), -1
            ),
        }
        spans = {"key": keys, "value": values}
        headers = table.headers_start
        spans["headers"] = Span(where, headers, table.body_end - headers)
        extra = _Extra(n)
        if part.legacy is not None:
            numbers |= {"crc": part.legacy.crcs, "valid": part.legacy.valid}
        self._add_control(part, control, numbers, spans, extra)
        if self._shown.contents:
            self._add_contents(part, control, numbers, spans, extra)
        chosen = Rows(
            len(np.arange(n)[wanted]),
            {name: np.asarray(values)[wanted] for name, values in numbers.items()},
            {name: Span(s.where[wanted], s.starts[wanted], s.sizes[wanted]) for name, s in spans.items()},
        )
        return chosen, Buffers(table.raw, table.arena, extra.bytes())

    def _add_control(
        self, part: Part, control: np.ndarray, numbers: dict[str, np.ndarray], spans: dict[str, Span], extra: _Extra
    ) -> None:
        """Add the contents of control records: as columns for markers, as text for other types."""
        n = len(control)
        is_marker = np.zeros(n, np.bool_)
        types, epochs = np.zeros(n, np.int64), np.zeros(n, np.int64)
        texts: list[tuple[int, bytes]] = []
        rows = np.flatnonzero(control)
        if len(rows):
            table = part.records
            assert table is not None
            keys, values = spans["key"], spans["value"]
            short = rows[(keys.sizes[rows] >= 4)]
            for buffer, place in ((table.raw, kernels.IN_RAW), (table.arena, kernels.IN_ARENA)):
                some = short[keys.where[short] == place]
                types[some] = _big_endian(buffer, keys.starts[some] + 2, 2)
                markers = some[(types[some] >= 0) & (types[some] <= 1) & (values.sizes[some] >= 6)]
                is_marker[markers] = True
                epochs[markers] = _big_endian(buffer, values.starts[markers] + 2, 4)
            texts = [
                (int(row), control_text(*_contents(part, spans, int(row)), as_json=self._shown.json).encode())
                for row in rows[~is_marker[rows]]
            ]
        numbers |= {"is marker": is_marker, "marker": types * is_marker, "coordinator epoch": epochs}
        spans["control"] = extra.span(texts)
        numbers["has control"] = spans["control"].sizes > 0

    def _add_contents(
        self, part: Part, control: np.ndarray, numbers: dict[str, np.ndarray], spans: dict[str, Span], extra: _Extra
    ) -> None:
        texts: dict[str, list[tuple[int, bytes]]] = {"key": [], "payload": []}
        offsets = numbers["offset"].tolist()
        decoder = self._shown.decoder
        if decoder is not None and self._shown.decoded:
            for row in np.flatnonzero(~control).tolist():
                for part_name, text in zip(texts, decoder(*_contents(part, spans, row), offsets[row]), strict=True):
                    if text is not None:
                        texts[part_name].append((row, self._decoded(text)))
        for part_name, raw in (("key", "key"), ("payload", "value")):
            if self._shown.decodes(part_name):
                spans[f"decoded {part_name}"] = extra.span(texts[part_name], -1)
                numbers[f"has {part_name}"] = spans[f"decoded {part_name}"].sizes >= 0
            else:
                numbers[f"has {part_name}"] = ~control & (spans[raw].sizes >= 0)
        numbers["is data"] = ~control
        numbers["key and payload"] = numbers["has payload"] & numbers["has key"]
        numbers["payload alone"] = numbers["has payload"] & ~numbers["has key"]

    def _decoded(self, text: str) -> bytes:
        """Return the text of a decoder in UTF-8. For JSON output, text that is not JSON is quoted as a string."""
        return (json.dumps(text) if self._shown.json and not isinstance(text, Json) else text).encode()


class _Extra:
    """A buffer for generated text, which spans can refer to as they do to the log's buffers."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pieces: list[bytes] = []
        self._used = 0

    def span(self, texts: Sequence[tuple[int, bytes]], absent: int = 0) -> Span:
        """Add texts by row number and return their span; rows without a text have the size `absent`."""
        starts, sizes = np.zeros(self._count, np.int64), np.full(self._count, absent, np.int64)
        for row, text in texts:
            starts[row], sizes[row] = self._used, len(text)
            self._used += len(text)
            self._pieces.append(text)
        return Span(np.full(self._count, kernels.IN_EXTRA, np.int8), starts, sizes)

    def bytes(self) -> np.ndarray:
        return np.frombuffer(bytearray().join(self._pieces), np.uint8)  # the array is writable, like the other arenas


def _contents(part: Part, spans: dict[str, Span], row: int) -> tuple[bytes | None, bytes | None]:
    table = part.records
    assert table is not None
    found = []
    for span in (spans["key"], spans["value"]):
        buffer = table.arena if span.where[row] == kernels.IN_ARENA else table.raw
        start, size = int(span.starts[row]), int(span.sizes[row])
        found.append(None if size < 0 else buffer[start : start + size].tobytes())
    return found[0], found[1]


def _big_endian(buffer: np.ndarray, starts: np.ndarray, size: int) -> np.ndarray:
    """Return the signed numbers of `size` (2 or 4) bytes at `starts`, as int64."""
    raw = buffer[starts[:, None] + np.arange(size)] if len(starts) else np.zeros((0, size), np.uint8)
    return np.ascontiguousarray(raw).view(f">i{size}").reshape(-1).astype(np.int64)


def _wrapped(sequence: np.ndarray, increment: np.ndarray) -> np.ndarray:
    """Return sequence + increment, where 0 follows 2^31 - 1. Invalid increments in a damaged header overflow like
    Java's int."""
    largest = np.int32(2**31 - 1)
    sequence, increment = sequence.astype(np.int32), increment.astype(np.int32)
    beyond = sequence > largest - increment
    return np.where(beyond, increment - (largest - sequence) - np.int32(1), sequence + increment)


def _timestamp_types(batches: np.ndarray) -> np.ndarray:
    types = (batches["attributes"] & LOG_APPEND_TIME != 0).astype(np.int64)
    return np.where(batches["magic"] == 0, 2, types)


def _batch_rows(batches: np.ndarray, valid: np.ndarray) -> Rows:
    attributes, base_sequence = batches["attributes"], batches["base_sequence"].astype(np.int64)
    span = batches["last_offset"] - batches["base_offset"]
    numbers = {name: batches[name] for name in batches.dtype.names or ()}
    numbers |= {
        "last_sequence": np.where(base_sequence == -1, -1, _wrapped(base_sequence, span)),
        "transactional": attributes & TRANSACTIONAL != 0,
        "control": attributes & CONTROL != 0,
        "horizon": attributes & DELETE_HORIZON != 0,
        "no horizon": attributes & DELETE_HORIZON == 0,
        "timestamp type": _timestamp_types(batches),
        "codec": attributes & CODEC_MASK,
        "valid": valid,
    }
    return Rows(len(batches), numbers)


def _text_batch(literals: Literals, old: bool) -> Template:
    line = Template(literals)
    if old:
        line.number("offset: ", "last_offset")
    else:
        line.number("baseOffset: ", "base_offset").number(" lastOffset: ", "last_offset")
        line.number(" count: ", "record_count").number(" baseSequence: ", "base_sequence")
        line.number(" lastSequence: ", "last_sequence").number(" producerId: ", "producer_id")
        line.number(" producerEpoch: ", "producer_epoch").number(" partitionLeaderEpoch: ", "leader_epoch")
        line.word(" isTransactional: ", "transactional", _BOOLEANS).word(" isControl: ", "control", _BOOLEANS)
        line.text(" deleteHorizonMs: OptionalLong.empty", "no horizon")
        line.number(" deleteHorizonMs: OptionalLong[", "base_timestamp_ms", "horizon").text("]", "horizon")
    line.number(" position: ", "position").word(" ", "timestamp type", _TYPES).number(": ", "max_timestamp_ms")
    line.number(" size: ", "size_bytes").number(" magic: ", "magic").word(" compresscodec: ", "codec", _CODECS)
    return line.number(" crc: ", "crc").word(" isvalid: ", "valid", _BOOLEANS).text("\n")


def _json_batch(literals: Literals, old: bool) -> Template:
    line = Template(literals).text('{"type":"batch"')
    if old:
        line.number(',"offset":', "last_offset")
    else:
        line.number(',"baseOffset":', "base_offset").number(',"lastOffset":', "last_offset")
        line.number(',"count":', "record_count").number(',"baseSequence":', "base_sequence")
        line.number(',"lastSequence":', "last_sequence").number(',"producerId":', "producer_id")
        line.number(',"producerEpoch":', "producer_epoch").number(',"partitionLeaderEpoch":', "leader_epoch")
        line.word(',"isTransactional":', "transactional", _BOOLEANS).word(',"isControl":', "control", _BOOLEANS)
        line.text(',"deleteHorizonMs":null', "no horizon")
        line.number(',"deleteHorizonMs":', "base_timestamp_ms", "horizon")
    line.number(',"position":', "position").word(',"timestampType":', "timestamp type", _QUOTED_TYPES)
    line.number(',"maxTimestamp":', "max_timestamp_ms").number(',"size":', "size_bytes").number(',"magic":', "magic")
    line.word(',"compresscodec":', "codec", [f'"{name}"' for name in _CODECS])
    return line.number(',"crc":', "crc").word(',"isvalid":', "valid", _BOOLEANS).text("}\n")


def _text_record(literals: Literals, old: bool, shown: Shown) -> Template:
    line = Template(literals)
    if shown.metadata:
        line.number("| offset: ", "offset").word(" ", "timestamp type", _TYPES).number(": ", "timestamp")
        line.number(" keySize: ", "key bytes").number(" valueSize: ", "value bytes")
        if old:
            line.word(" isValid: ", "valid", _BOOLEANS).number(" crc: ", "crc")
        else:
            line.number(" sequence: ", "sequence").span(" headerKeys: ", "headers", kernels.HEADER_KEYS)
        line.word(" endTxnMarker: ", "marker", _MARKERS, "is marker")
        line.number(" coordinatorEpoch: ", "coordinator epoch", "is marker")
        line.span("", "control", kernels.BYTES, "has control")
    if shown.contents:
        lead = " " if shown.metadata else "| "
        key = "decoded key" if shown.decodes("key") else "key"
        payload = "decoded payload" if shown.decodes("payload") else "value"
        line.span(f"{lead}key: ", key, kernels.TEXT, "has key")
        line.span(" payload: ", payload, kernels.TEXT, "key and payload")
        line.span(f"{lead}payload: ", payload, kernels.TEXT, "payload alone")
    return line.text("\n")


def _json_record(literals: Literals, old: bool, shown: Shown) -> Template:
    line = Template(literals).number('{"type":"record","offset":', "offset")
    if shown.metadata:
        line.word(',"timestampType":', "timestamp type", _QUOTED_TYPES).number(',"timestamp":', "timestamp")
        line.number(',"keySize":', "key bytes").number(',"valueSize":', "value bytes")
        if old:
            line.word(',"isValid":', "valid", _BOOLEANS).number(',"crc":', "crc")
        else:
            line.number(',"sequence":', "sequence")
            headers = kernels.JSON_HEADERS if shown.contents else kernels.JSON_HEADER_KEYS
            line.span(',"headers":', "headers", headers)
        line.word(',"endTxnMarker":', "marker", [f'"{name}"' for name in _MARKERS], "is marker")
        line.number(',"coordinatorEpoch":', "coordinator epoch", "is marker")
        line.span("", "control", kernels.BYTES, "has control")
    for part, raw in (("key", "key"), ("payload", "value")) if shown.contents else ():
        if shown.decodes(part):
            line.span(f',"{part}":', f"decoded {part}", kernels.BYTES, f"has {part}")
        else:
            line.json_value(part, raw, "is data")
    return line.text("}\n")
