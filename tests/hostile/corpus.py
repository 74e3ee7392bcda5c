"""The undamaged inputs: short pieces of the golden logs of a real broker, logs of every format and codec generated
here, and the small files of a log dir.
"""

from __future__ import annotations

import functools
import random
import struct
from dataclasses import dataclass

from keytail.format.producers import ProducerEntry, encode_snapshot
from tests.hostile.mutator import split
from tests.reference import codecs, metadata
from tests.reference.batches import Rec, encode_batch, encode_marker
from tests.reference.indexing import index_files
from tests.reference.legacy import encode_single, encode_wrapper

NOW = 1_750_000_000_000
_PIECE_BYTES = 6000
_METADATA_DIR = "__cluster_metadata-0"


@dataclass(frozen=True)
class Corpus:
    """Undamaged bytes by kind. Records are those of the coordinators' topics and values of the metadata log."""

    logs: tuple[bytes, ...]
    metadata_logs: tuple[bytes, ...]
    indexes: tuple[tuple[bytes, bytes, bytes, bytes], ...]  # log, offset index, time index, transaction index
    snapshots: tuple[bytes, ...]
    texts: tuple[bytes, ...]
    offsets_records: tuple[tuple[bytes | None, bytes | None], ...]
    transaction_records: tuple[tuple[bytes | None, bytes | None], ...]
    metadata_records: tuple[bytes, ...]
    blocks: tuple[tuple[int, bytes, bytes], ...]  # codec, compressed, plain


@functools.cache
def corpus(root: str) -> Corpus:
    """Return the corpus. `root` is an unpacked golden log dir (tests/golden)."""
    logs, metadata_logs, records = _golden(root)
    rng = random.Random("corpus")
    logs += [_made(rng, codec) for codec in (0, 0, 0, 0, 1, 2, 3, 4, 0, 0)]
    logs += [_transactions(rng), _transactions(rng), *_old(rng)]
    metadata_logs.append(_metadata_log())
    return Corpus(
        logs=tuple(log for log in logs if log),
        metadata_logs=tuple(metadata_logs),
        indexes=tuple((log, *index_files(log, base, 100), _txn_index(base)) for log, base in _bases(logs)),
        snapshots=tuple(_snapshot(rng, n) for n in (0, 1, 2, 5)),
        texts=_texts(),
        offsets_records=tuple(records["__consumer_offsets"]),
        transaction_records=tuple(records["__transaction_state"]),
        metadata_records=_metadata_records(),
        blocks=_blocks(rng),
    )


def _golden(root: str) -> tuple[list[bytes], list[bytes], dict[str, list[tuple[bytes | None, bytes | None]]]]:
    from pathlib import Path

    from tests.reference.batches import all_records, decode_log

    logs: list[bytes] = []
    metadata_logs: list[bytes] = []
    records: dict[str, list[tuple[bytes | None, bytes | None]]] = {"__consumer_offsets": [], "__transaction_state": []}
    for directory in sorted(Path(root).iterdir()):
        for file in sorted(directory.glob("*.log")) if directory.is_dir() else ():
            data = file.read_bytes()
            topic = directory.name.rpartition("-")[0]
            if topic in records and data:
                records[topic] += [(rec.key, rec.value) for rec in all_records(decode_log(data))]
            if directory.name == _METADATA_DIR:
                metadata_logs.append(b"".join(split(data)[:12]))
                continue
            parts = split(data)
            first = len(parts) // 2
            for begin in {0, first}:
                piece = b"".join(parts[begin : begin + 5])
                while len(piece) > _PIECE_BYTES and len(split(piece)) > 1:
                    piece = b"".join(split(piece)[:-1])
                if 0 < len(piece) <= 4 * _PIECE_BYTES:
                    logs.append(piece)
    assert logs and metadata_logs and all(records.values())
    rng = random.Random("golden")
    rng.shuffle(logs)
    return logs[:48], metadata_logs, {topic: rng.sample(found, min(60, len(found))) for topic, found in records.items()}


def _records(rng: random.Random, offset: int, n: int) -> list[Rec]:
    found = []
    for _ in range(n):
        headers = tuple((b"h%d" % i, rng.choice((None, b"", b"x" * 9))) for i in range(rng.choice((0, 0, 1, 3))))
        value = None if rng.random() < 0.2 else rng.randbytes(rng.choice((0, 1, 9, 70, 200)))
        key = rng.choice((b"", b"k%d" % rng.randrange(5), b"long" * 20))
        found.append(Rec(offset, NOW - 10_000 + offset + rng.randrange(9), key, value, headers))
        offset += 1 + rng.choice((0, 0, 0, 3))
    return found


def _made(rng: random.Random, codec: int) -> bytes:
    offset, parts = rng.choice((0, 0, 100, 2**31 - 5, 2**33)), []
    for _ in range(rng.choice((2, 3, 6))):
        records = _records(rng, offset, rng.choice((1, 2, 5, 12)))
        fields = {"producer_id": 7, "producer_epoch": 1, "base_sequence": 3} if rng.random() < 0.3 else {}
        if rng.random() < 0.2:
            fields["delete_horizon_ms"] = NOW - rng.choice((1, -1))
        if rng.random() < 0.2:
            fields["timestamp_type"] = 1
        parts.append(encode_batch(records, codec=codec, leader_epoch=4, **fields))
        offset = records[-1].offset + 1
        if rng.random() < 0.2:
            parts.append(encode_batch([], base_offset=offset, last_offset=offset + 3, producer_id=7, producer_epoch=1))
            offset += 4
    return b"".join(parts)


def _transactions(rng: random.Random) -> bytes:
    offset, parts = 0, []
    for n in range(4):
        producer = {"producer_id": 5 + n % 2, "producer_epoch": 2}
        records = _records(rng, offset, 2)
        parts.append(encode_batch(records, base_sequence=n, transactional=True, codec=rng.choice((0, 4)), **producer))
        offset = records[-1].offset + 1
        if n != 3:
            parts.append(encode_marker(offset, NOW - 9_000, commit=n % 2 == 0, **producer))
            offset += 1
    return b"".join(parts)


def _old(rng: random.Random) -> list[bytes]:
    """Return messages of magic 0 and 1, single and compressed, and a log that continues with batches."""
    logs = []
    for magic in (0, 1, 1):
        records = [Rec(rec.offset, rec.timestamp if magic else -1, rec.key, rec.value) for rec in _records(rng, 0, 8)]
        singles = b"".join(encode_single(rec, magic=magic) for rec in records[:3])
        wrapped = encode_wrapper(records[3:6], rng.choice((1, 2, 3)), magic=magic)
        times = {"append_time": NOW} if magic and rng.random() < 0.5 else {}
        last = encode_wrapper(records[6:], rng.choice((1, 2, 3)), magic=magic, **times)  # type: ignore[arg-type]
        logs.append(singles + wrapped + last)
        behind = _records(rng, records[-1].offset + 1, 3)
        logs.append(singles + wrapped + encode_batch(behind))
    return logs


def _bases(logs: list[bytes]) -> list[tuple[bytes, int]]:
    found = []
    for log in logs:
        if len(log) > 16 and log[16] == 2:
            found.append((log, struct.unpack_from(">q", log)[0]))
    return found[-30:]


def _txn_index(base: int) -> bytes:
    return b"".join(struct.pack(">hqqqq", 0, 5 + n, base + n, base + n + 2, base + n + 3) for n in range(3))


def _snapshot(rng: random.Random, n: int) -> bytes:
    return encode_snapshot(
        [ProducerEntry(5 + i, 1, 9, 10 + i, 2, NOW - 1000, -1, rng.choice((-1, 3))) for i in range(n)]
    )


def _texts() -> tuple[bytes, ...]:
    return (
        b"0\n3\nt 0 12\nt 1 0\nother.topic 7 9223372036854775807\n",
        b"0\n1\nt 0 3\n",
        b"0\n0\n",
        b"0\n3\n0 0\n1 5\n4 12\n",
        b"0\n1\n0 0\n",
        b"version: 0\ntopic_id: 7mhJCRwVQ4KCFAnHbZmcmg\n",
    )


def _metadata_records() -> tuple[bytes, ...]:
    return (
        metadata.topic("t", 1), metadata.partition(1, 0), metadata.change(1, 0, (1, 2)),
        metadata.topic_config("t", "cleanup.policy", "compact"), metadata.topic_config("t", "cleanup.policy", None),
        metadata.remove(1),
    )  # fmt: skip


def _metadata_log() -> bytes:
    parts = []
    for n, value in enumerate(_metadata_records()):
        parts.append(encode_batch([Rec(n, NOW, None, value)], leader_epoch=1))
    return b"".join(parts)


def _blocks(rng: random.Random) -> tuple[tuple[int, bytes, bytes], ...]:
    plain = [b"", b"a", bytes(3000), rng.randbytes(500), b"abc" * 40_000, rng.randbytes(70_000)]
    return tuple((codec, codecs.compress(codec, data), data) for codec in (1, 2, 3, 4) for data in plain)
