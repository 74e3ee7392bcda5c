"""Each function damages one intact partition, and returns what `verify` must report and a check whether Kafka also
detects the damage.

It takes a random generator and the partition's directory, and returns None if the damage is impossible in this log.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keytail.format.producers import encode_snapshot, parse_snapshot
from tests.interop.kafka import Kafka, KafkaError
from tests.reference.batches import with_bytes

# Offsets that are not consecutive, as in every cleaned log, are not a complaint.
_DUMP_SIGNS = (
    "Mismatches in",
    "Found timestamp mismatch",
    "Found out of order timestamp",
    "indexed offsets are not found",
    "Exception",
)

Witness = Callable[[Kafka, Path], bool]


@dataclass(frozen=True)
class Damage:
    """The damage of one file. Each of `kinds` is a correct finding; `byte_position` is None if the whole file is
    concerned; `witness` returns whether Kafka also detects it.
    """

    kinds: tuple[str, ...]
    path: Path
    byte_position: int | None = None
    witness: Witness | None = None


def batches(log: Path) -> list[tuple[int, bytes]]:
    """Return the position and the bytes of each batch of an intact segment."""
    data, at, found = log.read_bytes(), 0, []
    while at < len(data):
        size = 12 + struct.unpack_from(">i", data, at + 8)[0]
        found.append((at, data[at : at + size]))
        at += size
    return found


def _pick(rng: random.Random, partition: Path, suffix: str, *, least_bytes: int = 1) -> Path | None:
    files = [file for file in sorted(partition.glob(f"*{suffix}")) if file.stat().st_size >= least_bytes]
    return rng.choice(files) if files else None


def _batch(rng: random.Random, partition: Path, *, magic: int | None = None) -> tuple[Path, int, bytes] | None:
    log = _pick(rng, partition, ".log")
    found = [] if log is None else [b for b in batches(log) if magic is None or b[1][16] == magic]
    return None if log is None or not found else (log, *rng.choice(found))


def _write_at(path: Path, at: int, data: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:at] + data + old[at + len(data) :])


def _recovery_truncates(log: Path) -> Witness:
    return lambda kafka, partition: kafka.recover(partition, int(log.stem)).truncated_bytes > 0


def _dump_complains(file: Path, *flags: str) -> Witness:
    def witness(kafka: Kafka, partition: Path) -> bool:
        done = kafka.dump("--files", file, *flags)
        return done.status != 0 or any(sign in done.err for sign in _DUMP_SIGNS)

    return witness


def _does_not_load(kafka: Kafka, partition: Path) -> bool:
    try:
        kafka.load(partition)
    except KafkaError:
        return True
    return False


# Batches


def flipped_bit(rng: random.Random, partition: Path) -> Damage | None:
    chosen = _batch(rng, partition)
    if chosen is None:
        return None
    log, position, batch = chosen
    at = rng.randrange(17 if batch[16] == 2 else 12, len(batch))
    _write_at(log, position + at, bytes([batch[at] ^ 1 << rng.randrange(8)]))
    kinds = ("checksum", "magic", "size", "legacy", "record")
    return Damage(kinds, log, position, _recovery_truncates(log) if at != 16 else None)


def wrong_length(rng: random.Random, partition: Path) -> Damage | None:
    chosen = _batch(rng, partition)
    if chosen is None:
        return None
    log, position, batch = chosen
    stated = len(batch) - 12
    wrong = rng.choice([0, -1, 5, 13, 2**31 - 1, stated - 1, stated + 1, stated ^ 1 << rng.randrange(31)])
    _write_at(log, position + 8, struct.pack(">i", wrong))
    return Damage(("size", "cut", "cut-active", "checksum", "record"), log, position, _recovery_truncates(log))


def truncated_file(rng: random.Random, partition: Path) -> Damage | None:
    chosen = _batch(rng, partition)
    if chosen is None:
        return None
    log, position, batch = chosen
    log.write_bytes(log.read_bytes()[: position + rng.randrange(1, len(batch))])
    return Damage(("cut", "cut-active"), log, position, _recovery_truncates(log))


def zeros_after(rng: random.Random, partition: Path) -> Damage | None:
    log = _pick(rng, partition, ".log")
    if log is None:
        return None
    size = log.stat().st_size
    log.write_bytes(log.read_bytes() + bytes(rng.randrange(17, 5000)))
    return Damage(("zeros",), log, size, _recovery_truncates(log))


def wrong_max_timestamp(rng: random.Random, partition: Path) -> Damage | None:
    chosen = _batch(rng, partition, magic=2)
    if chosen is None or chosen[2][22] & 0x08 or struct.unpack_from(">i", chosen[2], 57)[0] == 0:
        return None
    log, position, batch = chosen
    (max_ms,) = struct.unpack_from(">q", batch, 35)
    data = struct.pack(">q", max_ms + rng.choice([-1, 1, 10**9]))
    _write_at(log, position, with_bytes(batch, 35, data))
    return Damage(("max-timestamp",), log, position)


def wrong_record_count(rng: random.Random, partition: Path) -> Damage | None:
    chosen = _batch(rng, partition, magic=2)
    if chosen is None:
        return None
    log, position, batch = chosen
    (count,) = struct.unpack_from(">i", batch, 57)
    if count == 0 or batch[22] & 0x20:
        return None
    stated = count + rng.choice([-1, 1])
    _write_at(log, position, with_bytes(batch, 57, struct.pack(">i", stated)))
    kinds = ("record-count", "record", "decompress", "max-timestamp")
    # Kafka does not read the records of a batch whose header declares none.
    return Damage(kinds, log, position, _dump_complains(log, "--deep-iteration") if stated else None)


def wrong_leader_epoch(rng: random.Random, partition: Path) -> Damage | None:
    chosen = _batch(rng, partition, magic=2)
    if chosen is None:
        return None
    log, position, batch = chosen
    (epoch,) = struct.unpack_from(">i", batch, 12)
    later = [b for file in sorted(partition.glob("*.log")) for at, b in batches(file) if (file, at) > (log, position)]
    if epoch < 0 or not any(b[16] == 2 and struct.unpack_from(">i", b, 12)[0] >= 0 for b in later):
        return None  # in the last batch, a higher epoch could be that of a new leader
    _write_at(log, position + 12, struct.pack(">i", epoch + rng.choice([5, 1 << 20])))
    return Damage(("leader-epoch",), log, position)


# Indexes


def _entry(rng: random.Random, partition: Path, suffix: str, size: int) -> tuple[Path, int, bytes] | None:
    file = _pick(rng, partition, suffix, least_bytes=size)
    if file is None:
        return None
    i = rng.randrange(file.stat().st_size // size)
    return file, size * i, file.read_bytes()[size * i : size * (i + 1)]


def index_position(rng: random.Random, partition: Path) -> Damage | None:
    chosen = _entry(rng, partition, ".index", 8)
    if chosen is None:
        return None
    file, at, entry = chosen
    offset, position = struct.unpack(">ii", entry)
    _write_at(file, at, struct.pack(">ii", offset, position + rng.choice([-1, 1])))
    return Damage(("index-position", "index-order"), file, at, _dump_complains(file))


def index_offset(rng: random.Random, partition: Path) -> Damage | None:
    """Change the entry's offset to one before the batch that it points to, so that a search for the offset misses its
    batch.

    The offset after the batch is not used: if the next batch ends there, brokers before 4.0 write this offset for both
    batches.
    """
    chosen = _entry(rng, partition, ".index", 8)
    if chosen is None:
        return None
    file, at, entry = chosen
    _, position = struct.unpack(">ii", entry)
    (base_offset,) = struct.unpack_from(">q", file.with_suffix(".log").read_bytes(), position)
    before = struct.unpack_from(">i", file.read_bytes(), at - 8)[0] if at else -1
    offset = base_offset - 1 - int(file.stem)
    if offset <= before:
        return None
    _write_at(file, at, struct.pack(">ii", offset, position))
    return Damage(("index-offset",), file, at, _dump_complains(file))


def time_entry(rng: random.Random, partition: Path) -> Damage | None:
    chosen = _entry(rng, partition, ".timeindex", 12)
    if chosen is None:
        return None
    file, at, entry = chosen
    timestamp, offset = struct.unpack(">qi", entry)
    before = struct.unpack_from(">q", file.read_bytes(), at - 12)[0] if at else -1
    if timestamp - 1 <= max(before, 0):
        return None
    _write_at(file, at, struct.pack(">qi", timestamp - 1, offset))
    return Damage(("time-entry",), file, at, _dump_complains(file))


def zeroed_time_index(rng: random.Random, partition: Path) -> Damage | None:
    file = _pick(rng, partition, ".timeindex", least_bytes=12)
    if file is None or struct.unpack_from(">q", file.read_bytes())[0] == 0:
        return None
    base = int(file.stem)
    file.write_bytes(bytes(file.stat().st_size))

    def witness(kafka: Kafka, partition: Path) -> bool:
        loaded = kafka.load(partition, records=False)
        return next(s.largest_timestamp_ms for s in loaded.segments if s.base_offset == base) <= 0

    is_active = file.stem == sorted(partition.glob("*.log"))[-1].stem
    return Damage(("time-index-zeros",), file, 0, None if is_active else witness)


def lost_index(rng: random.Random, partition: Path) -> Damage | None:
    file = _pick(rng, partition, ".log")
    if file is None:
        return None
    suffix, kind = rng.choice([(".index", "index-missing"), (".timeindex", "time-index-missing")])
    file.with_suffix(suffix).unlink()
    return Damage((kind,), file.with_suffix(suffix))


def lost_aborted_entry(rng: random.Random, partition: Path) -> Damage | None:
    chosen = _entry(rng, partition, ".txnindex", 34)
    if chosen is None:
        return None
    file, at, _ = chosen
    data = file.read_bytes()
    file.write_bytes(data[:at] + data[at + 34 :])
    return Damage(("txn-no-entry",), file)


def other_aborted_entry(rng: random.Random, partition: Path) -> Damage | None:
    chosen = _entry(rng, partition, ".txnindex", 34)
    if chosen is None:
        return None
    file, at, entry = chosen
    version, producer, first, last, stable = struct.unpack(">hqqqq", entry)
    kind = rng.choice(["txn-no-marker", "txn-first-offset", "txn-stable-offset"])
    if kind == "txn-no-marker":
        producer += 1
    elif kind == "txn-first-offset":
        first += 1
    else:
        stable = last + 1 + rng.randrange(1, 100)
    _write_at(file, at, struct.pack(">hqqqq", version, producer, first, last, stable))
    return Damage((kind,), file, at)


# Other files


def snapshot_bit(rng: random.Random, partition: Path) -> Damage | None:
    file = _pick(rng, partition, ".snapshot")
    if file is None:
        return None
    at = rng.randrange(file.stat().st_size)
    _write_at(file, at, bytes([file.read_bytes()[at] ^ 1 << rng.randrange(8)]))

    def witness(kafka: Kafka, partition: Path) -> bool:
        return any("Failed to load producer snapshot" in line for line in kafka.load(partition).messages)

    newest = file == sorted(partition.glob("*.snapshot"))[-1]
    return Damage(("snapshot",), file, 0, witness if newest else None)


def snapshot_entry(rng: random.Random, partition: Path) -> Damage | None:
    """Change a field of an entry. Each field can be derived from the log, if the log has never been cleaned."""
    file = _pick(rng, partition, ".snapshot", least_bytes=56)
    if file is None:
        return None
    entries = parse_snapshot(file.read_bytes())
    i = rng.randrange(len(entries))
    fields = vars(entries[i]).copy()
    if fields["last_offset"] < 0:
        return None
    if rng.random() < 0.5:
        fields["last_sequence"] += 1
    elif fields["current_txn_first_offset"] >= 0:
        fields["current_txn_first_offset"] = -1
    else:
        return None
    entries[i] = type(entries[i])(**fields)
    file.write_bytes(encode_snapshot(entries))
    return Damage(("snapshot-entry",), file, 10 + 46 * i)


def epochs_line(rng: random.Random, partition: Path) -> Damage | None:
    file = partition / "leader-epoch-checkpoint"
    lines = file.read_text().splitlines()
    if not lines:
        return None
    at = rng.randrange(len(lines))
    lines[at] = rng.choice(["x", "1 2 3 4", "", "9" * 30])
    file.write_text("\n".join(lines) + "\n")
    return Damage(("epochs-unreadable",), file, None, _does_not_load)


def epochs_moved(rng: random.Random, partition: Path) -> Damage | None:
    """Move any entry but the first one, so that the first batch of its epoch belongs to the previous epoch."""
    file = partition / "leader-epoch-checkpoint"
    lines = file.read_text().splitlines()
    if len(lines) < 4:
        return None
    at = rng.randrange(3, len(lines))
    epoch, start = map(int, lines[at].split())
    behind = int(lines[at + 1].split()[1]) if at + 1 < len(lines) else start + 2
    if start + 1 >= behind:
        return None
    lines[at] = f"{epoch} {start + 1}"
    file.write_text("\n".join(lines) + "\n")
    return Damage(("epochs-wrong",), file)


def fatal_name(rng: random.Random, partition: Path) -> Damage | None:
    name = rng.choice(["foo.log", "garbage.index", "x.swap", "old.snapshot", "a.cleaned"])
    (partition / name).write_bytes(b"")
    return Damage(("fatal-name",), partition / name, None, _does_not_load)


def log_start_beyond(rng: random.Random, partition: Path) -> Damage | None:
    file = partition.parent / "log-start-offset-checkpoint"
    file.write_text("0\n1\nt 0 9000000000000000000\n")
    return Damage(("log-start",), file)


def high_watermark_beyond(rng: random.Random, partition: Path) -> Damage | None:
    file = partition.parent / "replication-offset-checkpoint"
    file.write_text("0\n1\nt 0 9000000000000000000\n")
    return Damage(("high-watermark",), file)


ANYWHERE = (
    flipped_bit, wrong_length, truncated_file, zeros_after, wrong_max_timestamp, wrong_record_count, index_position,
    index_offset, time_entry, zeroed_time_index, lost_index, snapshot_bit, epochs_line, fatal_name,
    log_start_beyond, high_watermark_beyond,
)  # fmt: skip
# The changes of these functions are detectable only in a log that was never cleaned.
NEVER_CLEANED = (wrong_leader_epoch, lost_aborted_entry, other_aborted_entry, snapshot_entry, epochs_moved)
