"""All kinds of damage in random logs: undamaged batches are saved, damaged ones are not, and the list of losses is
correct.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from keytail.errors import KeytailError
from keytail.format.batch import BATCH_TABLE
from keytail.format.producers import ProducerEntry, encode_snapshot
from keytail.limits import MAX_RECORD_VARIABLE
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.log.records import block_check
from keytail.rebuild_index.partition import RebuildSettings
from keytail.salvage import scan as salvage_scan
from keytail.salvage.partition import Salvage, salvage_partition
from keytail.salvage.scan import read_around, scan_file
from keytail.salvage.write import NewPartition
from keytail.verify.task import verify_partition
from tests.chance import SEED, chance, draws
from tests.in_pieces import read_in_pieces
from tests.reference import legacy
from tests.reference.batches import Batch, Rec, decode_log, encode_batch, encode_marker
from tests.reference.varints import crc32c

NOW_MS = 1_700_000_000_000
INTERVAL_BYTES = 300
TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"
LOGS = int(os.environ.get("KEYTAIL_SALVAGE_LOGS", "40"))


@dataclass
class Log:
    """Segments by base offset, each with the bytes of its batches in order."""

    segments: dict[int, list[bytes]] = field(default_factory=dict)
    end: int = 0


def random_log(rng: random.Random, *, compacted: bool, sizes: Sequence[int] = (0, 5, 60, 400)) -> Log:
    log, offset, sequences, opened = Log(), rng.choice([0, 100, 2**40]), [0, 0, 0], set()
    for _ in range(rng.randint(1, 5)):
        base, batches = offset, []
        for _ in range(rng.choice([0, 1, 3, 12, 30])):
            if compacted:
                offset += rng.choice([0, 0, 3, 50])
            count, producer = rng.randint(1, 4), rng.choice([None, None, 0, 1, 2])
            records = [
                Rec(offset + i, NOW_MS + offset % 1000, b"k%d" % i, rng.randbytes(rng.choice(sizes)))
                for i in range(count)
            ]
            fields: dict = {"leader_epoch": 3, "codec": rng.choice([0, 0, 0, 1, 2, 3, 4])}
            if producer is not None:
                fields |= {"producer_id": producer, "producer_epoch": 0, "base_sequence": sequences[producer]}
                fields["transactional"] = producer > 0
                sequences[producer] += count
                if producer:
                    opened.add(producer)
            batches.append(encode_batch(records, **fields))
            offset += count
            if opened and rng.random() < 0.3:
                producer = opened.pop()
                commit = rng.random() < 0.6
                marker = encode_marker(
                    offset, NOW_MS, commit=commit, producer_id=producer, producer_epoch=0, leader_epoch=3
                )
                batches.append(marker)
                offset += 1
        log.segments[base] = batches
        offset += 1 if base == offset else 0
    log.end = offset
    return log


def damage(rng: random.Random, data: bytes) -> bytes:
    """Return the data with one kind of damage that a checksum detects: in more than the offset and the leader epoch."""
    batches = [data[batch.position : batch.position + batch.size] for batch in decode_log(data)]
    while True:
        out = _damage(rng, data)
        if not any(item not in out and item[16:] in out for item in batches):
            return out


def _damage(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    at = rng.randrange(len(data))
    size = rng.choice([1, 7, 61, 200, 1000])
    batches = decode_log(data) if rng.random() < 0.5 else []
    match rng.randrange(9):
        case 0:
            batch = rng.choice(decode_log(data))
            out[batch.position + rng.choice([8, 9, 10, 11, *range(16, batch.size)])] ^= 1 << rng.randrange(8)
        case 1:
            out[at : at + size] = bytes(len(out[at : at + size]))
        case 2:
            out[at : at + size] = rng.randbytes(len(out[at : at + size]))
        case 3:
            del out[at : at + size]
        case 4:
            del out[at:]
        case 5:
            out[at:at] = rng.randbytes(size)
        case 6:
            out[at:at] = data[max(0, at - size) : at]  # repeat a part
        case 7:
            out += bytes(size)
        case 8 if batches:
            batch = rng.choice(batches)
            out[batch.position : batch.position + batch.size] = b""
    return bytes(out)


def write(path: Path, contents: dict[int, bytes]) -> None:
    path.mkdir(parents=True)
    for base, data in contents.items():
        (path / f"{base:020d}.log").write_bytes(data)
        (path / f"{base:020d}.index").write_bytes(b"\xff" * 24)  # no reader accepts these bytes
    (path / "partition.metadata").write_text(f"version: 0\ntopic_id: {TOPIC_ID}")
    (path / "leader-epoch-checkpoint").write_text(f"0\n1\n3 {min(contents)}\n")


def salvage(path: Path, to: Path | None, fs: FileSystem = LOCAL, **facts: int) -> Salvage:
    """Salvage the partition in `path`, with these `facts` about its log dir, and return the result."""
    topic, _, number = path.name.rpartition("-")
    key = (topic, int(number))
    known = [{key: facts[name]} if name in facts else {} for name in ("cleaner", "recovery", "start", "high_watermark")]
    log_dir = LogDirFacts(str(path.parent), (), (), False, *known)
    entry = PartitionEntry(*key, str(path.parent), str(path))
    new = None
    if to is not None:
        to.mkdir()
        new = NewPartition(
            fs, str(to), entry, RebuildSettings(INTERVAL_BYTES, 10_485_760, execute=True, run_id="test"), None
        )
    return salvage_partition(fs, log_dir, entry, new)


def read(path: Path) -> dict[int, bytes]:
    return {int(file.stem): file.read_bytes() for file in sorted(path.glob("*.log"))}


def batches_of(path: Path) -> list[Batch]:
    return [batch for data in read(path).values() for batch in decode_log(data)]


def other_findings(path: Path) -> list[str]:
    """Return the findings except the warning about missing offsets between two segments, because some draws omit
    offsets.
    """
    return [str(finding) for finding in verify_partition(LOCAL, str(path)) if finding.kind != "offsets-missing"]


def seeded(number: int) -> random.Random:
    print(f"KEYTAIL_SEED={SEED} log {number}")
    return random.Random(f"{SEED}-{number}")


def check_lists(found: Salvage, log: Log, contents: dict[int, bytes], kept: dict[int, list[bytes]]) -> None:
    """Check that the bytes of the losses are exactly those that were not saved, and their offsets exactly those
    between neighbouring saved batches.
    """
    bases = sorted(contents)
    lost: set[int] = set()
    removed: set[int] = set()
    for number, base in enumerate(bases):
        data, holes = contents[base], []
        at = 0
        wanted_ranges, behind = [], base
        for batch in kept[base]:
            start = data.index(batch, at)
            [decoded] = decode_log(batch)
            if start > at:
                wanted_ranges.append((at, start, behind, decoded.base_offset))
            at, behind = start + len(batch), decoded.last_offset + 1
        if at < len(data):
            wanted_ranges.append((at, len(data), behind, bases[number + 1] if number + 1 < len(bases) else None))
        holes = [loss for loss in found.losses if loss.file == f"{base:020d}.log" and loss.end_byte]
        assert [(loss.start_byte, loss.end_byte) for loss in holes] == [item[:2] for item in wanted_ranges]
        for loss, (_, _, first, end) in zip(holes, wanted_ranges, strict=True):
            if loss.certain:
                assert loss.first_offset == first
                assert end is None or loss.end_offset == end
                lost |= set(range(first, first if loss.end_offset is None else min(loss.end_offset, first + 5000)))
        for batch in log.segments[base]:
            [decoded] = decode_log(batch)
            if batch not in kept[base] and loss_is_known(found, decoded):
                removed |= set(range(decoded.base_offset, decoded.last_offset + 1))
    # A range that is removed from the first byte of one batch to the last byte of another looks like a compaction.
    plain = sum(loss.end_offset - loss.first_offset for loss in found.losses if loss.kind == "gap" and loss.end_offset)
    assert len(removed - lost) <= found.gap_offsets + plain
    for segment in kept.values():
        for batch in segment:
            [decoded] = decode_log(batch)
            assert not lost & set(range(decoded.base_offset, decoded.last_offset + 1))


def loss_is_known(found: Salvage, batch: Batch) -> bool:
    """Return False if the log was truncated at its end and no other file shows its former end."""
    return found.last_batch_end is not None and batch.last_offset < found.last_batch_end


@pytest.mark.parametrize("number", range(LOGS))
def test_undamaged_batches_are_saved_and_damaged_ones_are_not(number: int, tmp_path: Path) -> None:
    rng = seeded(number)
    log = random_log(rng, compacted=rng.random() < 0.5)
    contents = {base: b"".join(batches) for base, batches in log.segments.items()}
    for _ in range(rng.choice([1, 1, 2, 4])):
        base = rng.choice(list(contents))
        if contents[base] and decodes(contents[base]):
            contents[base] = damage(rng, contents[base])
    write(tmp_path / "t-0", contents)
    kept = {base: [segment for segment in log.segments[base] if segment in contents[base]] for base in contents}
    facts = {"high_watermark": log.end} if rng.random() < 0.5 else {}
    before = {path.name: path.read_bytes() for path in (tmp_path / "t-0").iterdir()}
    if not any(kept.values()) and all(contents.values()):
        with pytest.raises(KeytailError, match=r"\[no-good-batch\]"):
            salvage(tmp_path / "t-0", tmp_path / "to", **facts)
        return
    found = salvage(tmp_path / "t-0", tmp_path / "to", **facts)
    if not all(in_order(contents[base], kept[base]) for base in contents):
        # The only intact copy of a batch may be after later batches, if the batch was damaged and a part of the file
        # was repeated.
        assert {batch.crc for batch in batches_of(tmp_path / "to" / "t-0")} <= crcs(kept)
        return
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "t-0").iterdir()}
    check_lists(found, log, contents, kept)
    made = tmp_path / "to" / "t-0"
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["t-0"]
    assert b"".join(read(made).values()) == b"".join(item for base in sorted(kept) for item in kept[base])
    assert other_findings(made) == []
    last = max((base for base in contents if not contents[base] or kept[base]), default=0)
    last_batch = max((batch.last_offset + 1 for batch in batches_of(made)), default=last)
    if facts:
        assert found.log_end_offset == log.end
    assert max(*read(made), last_batch) == found.log_end_offset
    assert found.batches == sum(map(len, kept.values()))
    dry = salvage(tmp_path / "t-0", None, **facts)
    assert (dry.losses, dry.transactions, dry.bytes_kept) == (found.losses, found.transactions, found.bytes_kept)


def in_order(data: bytes, batches: list[bytes]) -> bool:
    at = 0
    for batch in batches:
        at = data.find(batch, at) + len(batch)
        if at < len(batch):
            return False
    return True


def crcs(kept: dict[int, list[bytes]]) -> set[int]:
    return {batch.crc for batches in kept.values() for item in batches for batch in decode_log(item)}


def decodes(data: bytes) -> bool:
    try:
        return bool(decode_log(data))
    except ValueError:
        return False


@pytest.mark.parametrize("number", range(draws(10)))
def test_a_healthy_partition_is_saved_with_the_same_bytes(number: int, tmp_path: Path) -> None:
    rng = seeded(number)
    log = random_log(rng, compacted=number % 2 == 0)
    contents = {base: b"".join(batches) for base, batches in log.segments.items()}
    write(tmp_path / "t-0", contents)
    last = max(contents)
    end = log.end if log.segments[last] else last
    found = salvage(tmp_path / "t-0", tmp_path / "to", high_watermark=end, recovery=end, start=min(contents))
    assert found.certain == [] and found.transactions == []
    assert read(tmp_path / "to" / "t-0") == contents
    assert found.log_end_offset == end
    assert other_findings(tmp_path / "to" / "t-0") == []
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "t-0").glob("*.log")}
    assert times == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "to" / "t-0").glob("*.log")}


# Single kinds of damage


def _batch(offset: int, count: int = 2, value: bytes | None = None, **fields) -> bytes:
    records = [Rec(offset + i, NOW_MS, b"k", value or b"v" * 30 + b"%9d" % offset) for i in range(count)]
    return encode_batch(records, **({"leader_epoch": 3} | fields))


def scan(tmp_path: Path, data: bytes, low: int = 0, high: int = 2**31, fs: FileSystem = LOCAL) -> salvage_scan.FileScan:
    path = tmp_path / "00000000000000000000.log"
    path.write_bytes(data)
    return scan_file(fs, str(path), len(data), low, high)


def bases_of(found: salvage_scan.FileScan) -> list[int]:
    return found.table["base_offset"].tolist()


def with_offset(batch: bytes, offset: int) -> bytes:
    """Return the batch with another base offset, which no checksum covers."""
    return offset.to_bytes(8, "big") + batch[8:]


@pytest.mark.long
@pytest.mark.parametrize(("of", "wrong"), [(6, 9), (6, 4), (6, 5), (6, 7), (6, 2), (0, 1), (0, 5), (11, 10), (11, 3)])
def test_the_batch_without_a_gap_is_chosen_if_two_have_the_same_offsets(
    of: int, wrong: int, tmp_path: Path
) -> None:
    """The header of one of twelve batches has the offset of another one."""
    batches = [_batch(n, 1) for n in range(12)]
    batches[of] = with_offset(batches[of], wrong)
    found = scan(tmp_path, b"".join(batches))
    assert bases_of(found) == [n for n in range(12) if n != of]
    [hole] = found.holes
    assert (hole.start, hole.end) == (of * len(batches[of]), (of + 1) * len(batches[of]))
    assert f"offsets {wrong} to {wrong} are out of order" in hole.why


def test_offsets_of_another_segment_are_rejected(tmp_path: Path) -> None:
    data = b"".join([_batch(10), with_offset(_batch(12), 400), with_offset(_batch(14), 3), _batch(16), _batch(99)])
    found = scan(tmp_path, data, low=10, high=100)
    assert bases_of(found) == [10, 16]
    assert "do not belong to this segment" in found.holes[0].why


def test_a_repeated_range_is_saved_once_and_nothing_is_lost(tmp_path: Path) -> None:
    a, b, c, d = (_batch(n) for n in (0, 2, 4, 6))
    for data in (a + b + c + b + c + d, a + c + b + c + d, a + b + a + c + d):
        found = scan(tmp_path, data)
        assert bases_of(found) == [0, 2, 4, 6]
        assert all(hole.is_empty for hole in found.holes)


def test_a_repeated_batch_in_place_of_another_is_a_loss(tmp_path: Path) -> None:
    """The repeated batch may be a different one with the same contents, whose offset is wrong."""
    write(tmp_path / "t-0", {0: _batch(0) + _batch(2) + _batch(0) + _batch(6)})
    [loss] = salvage(tmp_path / "t-0", None).losses
    assert (loss.first_offset, loss.end_offset, loss.certain) == (4, 6, True)


def test_the_longer_of_two_ranges_in_the_wrong_order_is_saved(tmp_path: Path) -> None:
    batches = [_batch(2 * n) for n in range(10)]
    found = scan(tmp_path, b"".join(batches[:2] + batches[7:9] + batches[2:7] + batches[9:]))
    assert bases_of(found) == [0, 2, 4, 6, 8, 10, 12, 18]


def test_batches_inside_a_damaged_batch_of_valid_length_are_not_saved(tmp_path: Path) -> None:
    """Such batches may be values of records of the damaged batch, because records may contain segments of other
    logs."""
    inner = _batch(3, 1) + _batch(4, 1)
    outer = bytearray(_batch(2, 4, value=inner))
    outer[70] ^= 1
    found = scan(tmp_path, _batch(0) + bytes(outer) + _batch(6))
    assert bases_of(found) == [0, 6]
    found = scan(tmp_path, _batch(0) + bytes(outer))
    assert bases_of(found) == [0]


def test_valid_batches_that_a_damaged_length_skips_are_saved(tmp_path: Path) -> None:
    batches = [_batch(2 * n) for n in range(6)]
    size = len(batches[1]) * 3 - 12
    damaged = batches[1][:8] + size.to_bytes(4, "big") + batches[1][12:]
    found = scan(tmp_path, batches[0] + damaged + b"".join(batches[2:]))
    assert bases_of(found) == [0, 4, 6, 8, 10]


def test_a_search_computes_few_unneeded_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth batch has a length that points into the middle of another one, so each byte after it is examined."""
    monkeypatch.setattr(salvage_scan, "_MIN_SEARCH_BYTES", 0)
    monkeypatch.setattr(salvage_scan, "_SEARCH_TIMES", 1)
    rng, batches = random.Random(1), []
    for n in range(300):
        records = [Rec(20 * n + i, NOW_MS, b"key-%08d" % i, rng.randbytes(80)) for i in range(20)]
        batch = bytearray(encode_batch(records, leader_epoch=3))
        batch[9] ^= n % 10 == 0
        batches.append(bytes(batch))
    found = scan(tmp_path, b"".join(batches))
    assert bases_of(found) == [20 * n for n in range(300) if n % 10]
    assert not found.gave_up


def test_a_search_that_takes_too_long_is_ended_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input has successive headers of long batches without valid checksums."""
    monkeypatch.setattr(salvage_scan, "_MIN_SEARCH_BYTES", 1 << 20)
    header = bytearray(_batch(5)[:61])
    header[8:12] = (50_000).to_bytes(4, "big")
    write(tmp_path / "t-0", {0: _batch(0) + bytes(header) * 3000 + _batch(7)})
    found = salvage(tmp_path / "t-0", None)
    assert found.batches == 1
    assert any("the search ended" in note for note in found.notes)


@pytest.mark.parametrize("codec", [0, 3])
def test_records_that_contradict_their_header_are_damaged(codec: int, tmp_path: Path) -> None:
    """The checksum of the batch is valid, because the program that wrote the batch was wrong."""
    lying = _batch(2, 3, codec=codec, record_count=2)
    found = scan(tmp_path, _batch(0) + lying + _batch(5))
    assert bases_of(found) == [0, 5]
    assert "records" in found.holes[0].why


def test_an_omitted_batch_with_a_valid_checksum_is_counted(tmp_path: Path) -> None:
    flipped = bytearray(_batch(5))
    flipped[-1] ^= 1
    write(tmp_path / "t-0", {0: _batch(0) + _batch(2, 3, record_count=2) + bytes(flipped) + _batch(7) + _batch(7)})
    found = salvage(tmp_path / "t-0", None)
    assert (found.batches, found.left_out) == (2, 1)
    assert any("1 batches with a valid checksum are left out" in note for note in found.notes)


@pytest.mark.parametrize("codec", range(1, 5))
def test_batches_that_exceed_the_memory_are_saved(
    codec: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are read in pieces; one with a record that is too large for the memory is saved without checking its
    records.
    """
    read_in_pieces(monkeypatch)
    monkeypatch.setenv(MAX_RECORD_VARIABLE, "300")
    small, pieces, huge = _batch(0), _batch(2, 9, b"v" * 90, codec=codec), _batch(11, 2, bytes(400), codec=codec)
    lying = _batch(13, 9, b"v" * 90, codec=codec, record_count=8)
    found = scan(tmp_path, small + pieces + huge + lying + _batch(22))
    assert bases_of(found) == [0, 2, 11, 22]
    assert found.left_out == 1


def test_lack_of_memory_is_not_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(block_check, "decompress", no_memory)
    with pytest.raises(MemoryError):
        scan(tmp_path, _batch(0, codec=4))


def test_zeros_at_the_end_of_the_last_file_are_not_a_loss(tmp_path: Path) -> None:
    write(tmp_path / "t-0", {0: _batch(0), 2: _batch(2) + bytes(5000)})
    found = salvage(tmp_path / "t-0", None, high_watermark=4)
    assert [(loss.kind, loss.certain) for loss in found.losses] == [("zeros", False)]
    found = salvage(tmp_path / "t-0", None, high_watermark=9)
    assert [(loss.first_offset, loss.end_offset, loss.certain) for loss in found.losses] == [(4, 9, True)]


def test_magic_0_and_1_are_found_and_mixed_with_2(tmp_path: Path) -> None:
    rec = [Rec(n, NOW_MS, b"k%d" % n, b"v" * 30) for n in range(8)]
    parts = [
        legacy.encode_single(rec[0], magic=0),
        legacy.encode_single(rec[1], magic=0),
        legacy.encode_single(rec[2]),
        legacy.encode_wrapper(rec[3:5], 1),
        legacy.encode_single(rec[5]),
        _batch(6),
    ]
    assert bases_of(scan(tmp_path, b"".join(parts))) == [0, 1, 2, 3, 5, 6]
    for number, base in enumerate((0, 1, 2, 3, 5, 6)):
        for at in (8, 11, 20, len(parts[number]) - 1):
            spoiled = bytearray(parts[number])
            spoiled[at] ^= 4
            found = scan(tmp_path, b"".join([*parts[:number], bytes(spoiled), *parts[number + 1 :]]))
            assert bases_of(found) == [n for n in (0, 1, 2, 3, 5, 6) if n != base], (number, at)


def longest_chain(rows: list[tuple[int, int]]) -> int:
    """Return the length of a longest chain of increasing offsets without overlap."""
    best: list[int] = []
    for j, (base, _) in enumerate(rows):
        best.append(1 + max((best[i] for i in range(j) if rows[i][1] < base), default=0))
    return max(best)


def test_a_batch_with_a_wrong_base_offset_is_the_one_that_is_left_out() -> None:
    """In a log without gaps, no other batch is left out for it."""
    rng = chance()
    for _ in range(2000):
        sizes = [rng.randint(1, 9) for _ in range(rng.randint(3, 9))]
        bases = [100 + sum(sizes[:number]) for number in range(len(sizes))]
        wrong = rng.randrange(1, len(sizes) - 1)
        shift = rng.choice([-1, 1]) * rng.randint(1, 12)
        table = np.zeros(len(sizes), BATCH_TABLE)
        table["base_offset"], table["last_offset"] = bases, np.add(bases, sizes) - 1
        table["base_offset"][wrong] += shift
        table["last_offset"][wrong] += shift
        keep = salvage_scan._chain(table, 100)
        assert np.flatnonzero(~keep).tolist() == [wrong], (sizes, wrong, shift)


def test_a_longest_chain_of_increasing_offsets_is_saved() -> None:
    rng = seeded(0)
    for _ in range(200):
        rows = [(base := rng.randrange(40), base + rng.randrange(4)) for _ in range(rng.randint(2, 30))]
        table = np.zeros(len(rows), salvage_scan.BATCH_TABLE)
        table["base_offset"], table["last_offset"] = zip(*rows, strict=True)
        keep = salvage_scan._chain(table, 0)
        kept = [row for row, taken in zip(rows, keep, strict=True) if taken]
        assert all(item[1] < two[0] for item, two in itertools.pairwise(kept))
        assert len(kept) == longest_chain(rows), rows


class BadPages(FileSystem):
    """A failing disk on which some bytes of every log file cannot be read."""

    bad: tuple[tuple[int, int], ...] = ()

    def read_into(self, fd, buffer, position):
        end = position + len(memoryview(buffer).cast("B"))
        if any(start < end and position < stop for start, stop in self.bad):
            raise OSError(errno.EIO, "Input/output error", "disk")
        return super().read_into(fd, buffer, position)


def test_unreadable_pages_are_skipped(tmp_path: Path) -> None:
    batches = [_batch(2 * n, value=b"v" * 900) for n in range(40)]
    size = len(batches[0])
    data = b"".join(batches)
    fs = BadPages()
    fs.bad = ((8192, 12288), (20480, 20481))
    raw, unreadable = read_around_file(tmp_path, data, fs)
    assert unreadable == [(8192, 12288), (20480, 24576)]
    assert bytes(raw[:8192]) == data[:8192] and not raw[8192:12288].any() and bytes(raw[24576:]) == data[24576:]
    found = scan(tmp_path, data, fs=fs)
    hit = {n for n in range(40) for a, b in unreadable if n * size < b and a < (n + 1) * size}
    assert bases_of(found) == [2 * n for n in range(40) if n not in hit]
    assert [hole.why for hole in found.holes] == ["cannot be read; damaged at 2 places"] * 2


def read_around_file(tmp_path: Path, data: bytes, fs: FileSystem) -> tuple[np.ndarray, list[tuple[int, int]]]:
    path = tmp_path / "00000000000000000000.log"
    path.write_bytes(data)
    return read_around(fs, str(path), len(data))


def test_the_end_of_a_file_that_became_shorter_is_a_loss(tmp_path: Path) -> None:
    path = tmp_path / "00000000000000000000.log"
    path.write_bytes(_batch(0) + _batch(2))
    found = scan_file(LOCAL, str(path), path.stat().st_size + 100, 0, 10)
    assert bases_of(found) == [0, 2]
    assert "the file ends" in found.holes[0].why


def _transaction(offset: int, producer: int, sequence: int = 0, **fields) -> bytes:
    fields = {"producer_id": producer, "producer_epoch": 0, "base_sequence": sequence, "transactional": True} | fields
    return _batch(offset, 1, **fields)


def test_a_lost_marker_leaves_its_transaction_open_and_is_reported(tmp_path: Path) -> None:
    marker = bytearray(encode_marker(2, NOW_MS, commit=True, producer_id=7, producer_epoch=0))
    marker[70] ^= 1
    log = [_transaction(0, 7), _transaction(1, 8), bytes(marker), _batch(3)]
    log += [encode_marker(5, NOW_MS, commit=False, producer_id=8, producer_epoch=0), _batch(6)]
    write(tmp_path / "t-0", {0: b"".join(log)})
    found = salvage(tmp_path / "t-0", tmp_path / "to", high_watermark=8)
    reported = [(item.producer_id, item.first_offset, item.at_offset) for item in found.transactions]
    assert reported == [(7, 0, 2), (8, 1, 2), (7, 0, None)]
    assert [(loss.first_offset, loss.end_offset) for loss in found.certain] == [(2, 3)]
    assert (tmp_path / "to" / "t-0" / "00000000000000000000.txnindex").stat().st_size == 34


def test_missing_segments_and_log_ends_known_from_other_files_are_losses(tmp_path: Path) -> None:
    write(tmp_path / "t-0", {10: _batch(10), 12: _batch(12), 20: _batch(20), 30: _batch(30)})
    (tmp_path / "t-0" / f"{12:020d}.log").unlink()
    found = salvage(tmp_path / "t-0", tmp_path / "to", start=4, high_watermark=40)
    reported = [(loss.kind, loss.first_offset, loss.end_offset, loss.certain) for loss in found.losses]
    assert reported == [
        ("head", 4, 10, True),
        ("missing-segment", 12, 20, True),
        ("gap", 22, 30, False),
        ("tail", 32, 40, True),
    ]
    assert (found.log_start_offset, found.last_batch_end, found.log_end_offset) == (10, 32, 40)
    assert list(read(tmp_path / "to" / "t-0")) == [10, 20, 30, 40]
    assert other_findings(tmp_path / "to" / "t-0") == []


def test_a_lost_first_segment_moves_the_log_start_and_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "t-0", {10: bytes(500), 20: _batch(20)})
    found = salvage(tmp_path / "t-0", tmp_path / "to", start=10, high_watermark=22)
    assert [(loss.kind, loss.first_offset, loss.end_offset) for loss in found.losses] == [("damaged", 10, 20)]
    assert found.log_start_offset == 20
    assert any("started at offset 10 and now starts at 20" in note for note in found.notes)
    assert list(read(tmp_path / "to" / "t-0")) == [20]


def test_a_valid_snapshot_is_kept_and_a_wrong_one_rebuilt(tmp_path: Path) -> None:
    log = [_batch(0, producer_id=5, producer_epoch=0, base_sequence=0), _batch(2, producer_id=5, producer_epoch=0,
           base_sequence=2), _batch(4, producer_id=5, producer_epoch=0, base_sequence=4)]  # fmt: skip
    write(tmp_path / "t-0", {0: log[0], 2: log[1], 4: log[2]})
    entry = ProducerEntry(5, 0, 1, 1, 1, NOW_MS, -1, -1)
    (tmp_path / "t-0" / f"{2:020d}.snapshot").write_bytes(right := encode_snapshot([entry]))
    (tmp_path / "t-0" / f"{4:020d}.snapshot").write_bytes(b"no snapshot")
    salvage(tmp_path / "t-0", tmp_path / "to")
    made = tmp_path / "to" / "t-0"
    assert (made / f"{2:020d}.snapshot").read_bytes() == right
    wanted = encode_snapshot([ProducerEntry(5, 0, 3, 3, 1, NOW_MS, -1, -1)])
    assert (made / f"{4:020d}.snapshot").read_bytes() == wanted
    assert sorted(path.name for path in made.glob("*.snapshot")) == [f"{n:020d}.snapshot" for n in (2, 4, 6)]
    assert other_findings(made) == []


def test_a_snapshot_that_covers_lost_batches_is_kept_and_used(tmp_path: Path) -> None:
    lost = bytearray(_batch(2, producer_id=9, producer_epoch=0, base_sequence=0))
    lost[70] ^= 1
    write(tmp_path / "t-0", {0: _batch(0) + bytes(lost), 4: _batch(4), 6: _batch(6)})
    entry = ProducerEntry(9, 0, 1, 3, 1, NOW_MS, -1, -1)
    (tmp_path / "t-0" / f"{4:020d}.snapshot").write_bytes(encode_snapshot([entry]))
    salvage(tmp_path / "t-0", tmp_path / "to")
    made = tmp_path / "to" / "t-0"
    for offset in (4, 6, 8):
        assert (made / f"{offset:020d}.snapshot").read_bytes() == encode_snapshot([entry]), offset
    assert other_findings(made) == []


@pytest.mark.parametrize(
    ("left", "logs", "note"),
    [
        ({"0.log.swap": 0}, [0], "a .swap file replaces it"),
        ({"0.log.swap": 0, "0.index.cleaned": None}, [0, 10, 20], "unfinished replacement"),
        ({"0.log.cleaned": 0}, [0, 10, 20], ""),
        ({"30.log.deleted": 30}, [0, 10, 20], "a broker removes it"),
        ({"foo.log": None}, [0, 10, 20], "no broker writes files of this name"),
    ],
)
def test_leftovers_are_treated_as_by_a_broker(
    left: dict[str, int | None], logs: list[int], note: str, tmp_path: Path
) -> None:
    """A `.swap` output that extends to offset 30 replaces all three segments."""
    path = tmp_path / "t-0"
    write(path, {base: _batch(base) for base in (0, 10, 20)})
    for name, base in left.items():
        stem, _, suffix = name.partition(".")
        number = f"{int(stem):020d}" if stem.isdecimal() else stem
        data = b"" if base is None else _batch(base) + _batch(28)
        (path / f"{number}.{suffix}").write_bytes(data)
    found = salvage(path, tmp_path / "to")
    assert list(read(tmp_path / "to" / "t-0")) == logs
    assert any(note in reported for reported in found.notes)
    assert (len(batches_of(tmp_path / "to" / "t-0")) == 2) == (logs == [0])


@pytest.mark.parametrize("content", [None, b"version: 0\ntopic_id", b""])
def test_without_a_topic_id_the_reaction_of_a_broker_is_reported(content: bytes | None, tmp_path: Path) -> None:
    write(tmp_path / "t-0", {0: _batch(0)})
    (tmp_path / "t-0" / "partition.metadata").unlink()
    if content is not None:
        (tmp_path / "t-0" / "partition.metadata").write_bytes(content)
    (tmp_path / "t-0" / "leader-epoch-checkpoint").write_bytes(b"0\n2\n1 0")
    found = salvage(tmp_path / "t-0", tmp_path / "to")
    assert any("stray" in note for note in found.notes)
    assert any("leader-epoch-checkpoint is rebuilt" in note for note in found.notes)
    assert (tmp_path / "to" / "t-0" / "leader-epoch-checkpoint").read_bytes() == b"0\n1\n3 0\n"
    assert not (tmp_path / "to" / "t-0" / "partition.metadata").exists()


class FullForMetadata(FileSystem):
    """A file system that is full when the topic ID is to be written."""

    def write(self, fd, buffer):
        if bytes(buffer).startswith(b"version: 0\ntopic_id"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, buffer)


def test_a_topic_id_that_cannot_be_written_is_not_an_error_of_the_source(tmp_path: Path) -> None:
    write(tmp_path / "t-0", {0: _batch(0)})
    with pytest.raises(OSError, match="No space left"):
        salvage(tmp_path / "t-0", tmp_path / "to", fs=FullForMetadata())


class Stops(FileSystem):
    """Raises KeyboardInterrupt before change number `left`, and at each change after it."""

    left = 0

    def _change(self, operation, arguments, action):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super()._change(operation, arguments, action)


@pytest.mark.long
def test_a_stop_at_any_time_leaves_no_partition_or_a_complete_one(tmp_path: Path) -> None:
    write(tmp_path / "t-0", {0: _batch(0) + _batch(2), 4: _batch(4), 6: _batch(7, leader_epoch=4)})
    for count in range(1000):
        fs, to = Stops(), tmp_path / f"to-{count}"
        fs.left = count
        try:
            salvage(tmp_path / "t-0", to, fs, high_watermark=12)
        except KeyboardInterrupt:
            names = [path.name for path in to.iterdir()]
            assert names in ([], ["t-0.test.unfinished"], ["t-0"])
            if names != ["t-0"]:
                continue
        assert other_findings(to / "t-0") == []
        assert list(read(to / "t-0")) == [0, 4, 6, 12]
        if fs.left >= 0:
            assert count > 20
            return
    raise AssertionError("the run did not end")


class Unopened(FileSystem):
    """A file system on which the second log cannot be opened."""

    number = errno.EIO

    def open_read(self, path):
        if path.endswith(f"{2:020d}.log"):
            raise OSError(self.number, os.strerror(self.number), path)
        return super().open_read(path)


@pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EACCES, errno.EMFILE, errno.ENOENT])
def test_only_errors_of_the_disk_are_losses(tmp_path: Path, number: int) -> None:
    write(tmp_path / "t-0", {0: _batch(0), 2: _batch(2), 4: _batch(4)})
    fs = Unopened()
    fs.number = number
    if number in (errno.EIO, errno.EUCLEAN, errno.EBADMSG):
        [loss] = salvage(tmp_path / "t-0", None, fs=fs).certain
        assert (loss.first_offset, loss.end_offset) == (2, 4)
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            salvage(tmp_path / "t-0", None, fs=fs)


def test_a_log_that_is_a_symbolic_link_is_not_read(tmp_path: Path) -> None:
    """The link's target may be readable, so the result must not be mistaken for the complete log."""
    write(tmp_path / "t-0", {0: _batch(0), 2: _batch(2), 4: _batch(4)})
    log = tmp_path / "t-0" / f"{2:020d}.log"
    log.rename(tmp_path / "elsewhere.log")
    log.symlink_to(tmp_path / "elsewhere.log")
    found = salvage(tmp_path / "t-0", None, high_watermark=6)
    assert (found.left_out, found.unread_files) == (0, 1)
    assert any("the log of this segment is not a regular file" in loss.why for loss in found.losses)


def test_a_batch_with_an_unknown_attribute_after_damage_is_found(tmp_path: Path) -> None:
    """The checksum of the batch is valid, and the meaning of the bit concerns only the broker."""
    batch = bytearray(_batch(2))
    batch[21] = 1
    batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")
    assert bases_of(scan(tmp_path, _batch(0) + b"junk" * 20 + bytes(batch) + _batch(4))) == [0, 2, 4]
