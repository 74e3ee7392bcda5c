"""Random segments for tests of repacking, and the outputs of the merger for them."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from keytail.compact.repack.merger import Merger
from keytail.compact.repack.producers import Forgotten
from keytail.compact.repack.task import Repacking, RepackTask
from keytail.format.compression import compress
from keytail.log.fs import LOCAL
from keytail.log.partition import SegmentFacts
from keytail.log.records.chunk import SegmentReader
from tests.compact.logs import RandomLog, random_log, task_for, write_log
from tests.reference.batches import Rec, encode_batch, encode_marker
from tests.reference.cleaner import Aborted, Segment
from tests.reference.legacy import decode_any_log, encode_single, encode_wrapper
from tests.reference.repack import Rules, markers, repack
from tests.reference.varints import longer_varint

NOW = 1_700_000_000_000


@dataclass
class Collected:
    """The output of a merger."""

    parts: list[bytes] = field(default_factory=list)
    tables: list[np.ndarray] = field(default_factory=list)
    is_changed: bool = False

    def unchanged(self, data: np.ndarray, table: np.ndarray) -> None:
        self.parts.append(data.tobytes())
        self.tables.append(table.copy())

    def changed(self, data: np.ndarray, table: np.ndarray) -> None:
        self.unchanged(data, table)
        self.is_changed = True


def merged(path: Path, log: bytes, rules: Rules, **sizes: int) -> Collected:
    """Repack the bytes of one segment, which are written to `path`."""
    path.write_bytes(log)
    reader = SegmentReader(LOCAL, **sizes)
    kept = np.array(sorted(rules.kept), np.int64)
    repacking = Repacking(rules.batch_bytes, rules.codec)
    merger = Merger(reader, repacking, rules.max_message_bytes, kept, forgotten_by(rules))
    out = Collected()
    merger.repack(reader.chunks(str(path), len(log)), out)
    return out


def forgotten_by(rules: Rules) -> Forgotten:
    """Return the producers that the rules forget, and the markers of their transactions."""
    ends = [(at, kind, id_) for kind, of in enumerate((rules.aborts, rules.commits)) for id_, at in of]
    columns = [np.array(column, np.int64) for column in zip(*sorted(ends), strict=True)] if ends else [NO_IDS] * 3
    wanted = np.isin(columns[2], sorted(rules.forgotten))
    return Forgotten(np.array(sorted(rules.forgotten), np.int64), *(column[wanted] for column in columns))


def forgetting(log: bytes, rules: Rules, ids: Collection[int]) -> Rules:
    """Return the rules with these producers forgotten, and with the markers of the log."""
    commits, aborts = markers(decode_any_log(log))
    return replace(rules, forgotten=ids, commits=commits, aborts=aborts)


def expected(log: bytes, rules: Rules) -> bytes:
    return repack(log, rules, lambda codec, block: bytes(compress(codec, block)))


_bytes = st.one_of(st.none(), st.binary(max_size=6), st.integers(0, 60).map(lambda n: b"v" * n))
_headers = st.lists(st.tuples(st.sampled_from([b"", b"h"]), _bytes), max_size=2).map(tuple)


@st.composite
def _records(draw: st.DrawFn, offset: int) -> list[Rec]:
    found = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        timestamp = draw(st.sampled_from([NOW, NOW + 1, NOW - 5000, NOW + 10**7, -1, 0]))
        found.append(Rec(offset, timestamp, draw(_bytes), draw(_bytes), draw(_headers)))
        offset += draw(st.sampled_from([1, 1, 1, 3, 200]))
    return found


@st.composite
def _messages(draw: st.DrawFn, records: Sequence[Rec]) -> bytes:
    """Return the records as messages, without their headers."""
    return encode_messages(records, draw(st.integers(0, 3)), draw(st.integers(0, 1)))


def encode_messages(records: Sequence[Rec], codec: int, magic: int) -> bytes:
    """Return the records as one compressed message, or as messages without a codec."""
    if magic == 0:
        records = [replace(record, timestamp=-1) for record in records]
    if codec:
        return encode_wrapper(records, codec, magic=magic)
    return b"".join(encode_single(record, magic=magic) for record in records)


OTHER_KINDS = (
    "other", "horizon", "append time", "producer", "transaction", "sequence", "marker", "empty", "old timestamp",
    "unknown attribute", "long varints", "message",
)  # fmt: skip
OF_PRODUCERS = ("plain", *["producer"] * 3, *["transaction"] * 3, "marker", *OTHER_KINDS)
NO_IDS = np.empty(0, np.int64)


@st.composite
def segments(draw: st.DrawFn, kinds: Sequence[str] = ("plain",) * 12 + OTHER_KINDS) -> bytes:
    """Return a segment with batches of these kinds; of all kinds, most of which may be merged with a neighbour."""
    offset, parts = draw(st.sampled_from([0, 7, 2**40])), []
    codec = draw(st.integers(0, 4))
    usual = {"leader_epoch": 3, "codec": codec}
    for _ in range(draw(st.integers(0, 14))):
        kind = draw(st.sampled_from(kinds))
        records = draw(_records(offset))
        last = records[-1].offset + draw(st.sampled_from([0, 0, 0, 2]))
        more: dict = {**usual, "last_offset": last, "base_offset": offset}
        if kind == "other":
            more |= draw(st.sampled_from([{"leader_epoch": 4}, {"codec": (codec + 1) % 5}]))
        elif kind == "horizon":
            more["delete_horizon_ms"] = draw(st.sampled_from([NOW - 1, NOW + 1]))
        elif kind == "append time":
            more |= {"timestamp_type": 1, "max_timestamp": draw(st.sampled_from([NOW, NOW + 1]))}
        elif kind == "sequence":
            more["base_sequence"] = 0
        elif kind in ("producer", "transaction"):
            more |= {"producer_id": draw(st.integers(0, 1)), "producer_epoch": 0, "base_sequence": 5}
            more["transactional"] = kind == "transaction"
        elif kind == "old timestamp":
            records[-1] = Rec(records[-1].offset, -2, b"k", b"v")
        elif kind == "unknown attribute":
            more["extra_attributes"] = 0x100
        elif kind == "long varints":
            more["spell"] = longer_varint
        if kind == "marker":
            commit = draw(st.booleans())
            producer_id = draw(st.integers(0, 1))
            of = {"producer_id": producer_id, "producer_epoch": 0, "leader_epoch": 3}
            parts.append(encode_marker(offset, NOW, commit=commit, **of))
            last = offset
        elif kind == "empty":
            parts.append(encode_batch([], **{**more, "codec": 0, "max_timestamp": NOW}))
        elif kind == "message":
            parts.append(draw(_messages(records)))
            last = records[-1].offset
        else:
            parts.append(encode_batch(records, **more))
        offset = last + 1 + draw(st.sampled_from([0, 0, 0, 1, 10]))
    return b"".join(parts)


def rules() -> st.SearchStrategy[Rules]:
    return st.builds(
        Rules,
        batch_bytes=st.sampled_from([0, 1, 60, 150, 400, 10**6]),
        max_message_bytes=st.sampled_from([100, 200, 400, 10**6, 10**6]),
        codec=st.sampled_from([None, None, 0, 1, 2, 3, 4]),
    )


def log_of(rng: random.Random, codecs: Sequence[int] = (0,)) -> RandomLog:
    """Return a random log with some transactions and some messages of magic 0 and 1, whose segments have transaction
    indexes."""
    log = random_log(rng, NOW, codecs=codecs)
    segments = [replace(segment, log=_with_messages(rng, segment.log)) for segment in log.segments]
    return replace_segments(log, [replace(segment, aborted=aborted_entries(rng, segment)) for segment in segments])


def _with_messages(rng: random.Random, log: bytes) -> bytes:
    """Return the log with messages in place of some of the batches that have records and no producer."""
    parts, share = [], rng.choice([0, 0.3])
    for batch in decode_any_log(log):
        parts.append(log[batch.position : batch.position + batch.size])
        if batch.producer_id < 0 and batch.records and rng.random() < share:
            codec, magic = rng.randrange(4), rng.randrange(2)
            parts[-1] = encode_messages([replace(record, headers=()) for record in batch.records], codec, magic)
    return b"".join(parts)


def replace_segments(log: RandomLog, segments: list[Segment]) -> RandomLog:
    return RandomLog(segments, log.batch_ends, log.log_end_offset, log.producers)


def aborted_entries(rng: random.Random, segment: Segment) -> tuple[Aborted, ...]:
    batches = decode_any_log(segment.log)
    some = [batch for batch in batches if rng.random() < 0.2]
    return tuple(Aborted(9, max(0, b.base_offset - 3), b.last_offset, b.last_offset + 1) for b in some)


def written(path: str, log: RandomLog) -> tuple[SegmentFacts, ...]:
    """Write the segments and their transaction indexes; return the facts of a survey."""
    facts = write_log(path, log.segments)
    found = []
    for fact, segment in zip(facts, log.segments, strict=True):
        data = b"".join(entry.encode() for entry in segment.aborted)
        if data:
            Path(path, f"{segment.base_offset:020d}.txnindex").write_bytes(data)
        found.append(fact._replace(txn_index_bytes=len(data) or None))
    return tuple(found)


def task_of(
    path: str,
    log: RandomLog,
    facts: tuple[SegmentFacts, ...],
    rules: Rules,
    forget_after_ms: int | None = None,
    **fields: Any,
) -> RepackTask:
    config = {"index_interval_bytes": 64, "max_message_bytes": rules.max_message_bytes, **fields.pop("config", {})}
    common = task_for(path, log, facts, NOW, first_dirty=0, config=config, **fields)
    repacking = Repacking(rules.batch_bytes, rules.codec, forget_after_ms=forget_after_ms)
    return RepackTask(**{**vars(common), "repacking": repacking})


def files_in(path: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}
