"""The command `dump`: its output, its exit status, and that it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keytail.log.lock import hold
from tests.command_line import Run
from tests.log_dirs import records_of, snapshot
from tests.reference.batches import Rec, encode_batch
from tests.reference.indexing import index_files

STRING = "org.apache.kafka.tools.api.StringDecoder"


def objects(text: str, kind: str = "") -> list[dict]:
    found = [json.loads(line) for line in text.splitlines()]
    return [item for item in found if item["type"] == kind] if kind else found


def test_a_partition_directory_is_dumped_file_by_file(run: Run, log_dir: Path) -> None:
    before = snapshot(log_dir)
    result = run("dump", log_dir / "orders-0", "--print-data-log", "--output", "json")
    assert result.exit_code == 0, result.output
    records = records_of(log_dir / "orders-0")
    found = objects(result.stdout, "record")
    assert [item["offset"] for item in found] == [record.offset for record in records]
    assert [item["key"] for item in found] == [record.key.decode() for record in records]
    assert [item["payload"] for item in found] == [record.value and record.value.decode() for record in records]
    assert [Path(item["file"]).suffix for item in objects(result.stdout, "file")] == [
        *([".index", ".log", ".timeindex"] * 4),
        "",
    ]
    assert objects(result.stdout, "leaderEpoch") == [{"type": "leaderEpoch", "epoch": 0, "startOffset": 0}]
    assert snapshot(log_dir) == before
    assert not (log_dir / ".lock").exists()


def test_text_files_and_checkpoints_are_printed(run: Run, log_dir: Path) -> None:
    result = run("dump", "--files", f"{log_dir}/replication-offset-checkpoint,{log_dir}/orders-0/{0:020d}.log")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "topic: orders partition: 0 offset: 400" in lines
    assert "Log starting offset: 0" in lines
    assert any(line.startswith("baseOffset: 0 lastOffset: 9 count: 10 ") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "[no-files-given]"),
        (("/no/such/file.log",), "[no-such-file]"),
        (("/etc/hostname",), "none of the files"),
        (("/etc/hostname", "--from-offset", "5", "--to-offset", "5"), "--to-offset 5 is not above"),
        (("/etc/hostname", "--from-position", "-1"), "not a whole number from 0"),
        (("/etc/hostname", "--offsets-decoder", "--transaction-log-decoder"), "cannot be combined"),
        (("/etc/hostname", "--cluster-metadata-decoder", "--key-decoder-class", STRING), "cannot be combined"),
        (("/etc/hostname", "--key-decoder-class", "StringDecoder"), "[unknown-decoder-class]"),
        (("/etc/hostname", "--value-decoder-class", "com.example.AvroDecoder"), "keytail does not run Java classes"),
        (("/etc/hostname", "--max-message-size", "0"), "not a whole number from 1"),
    ],
)
def test_wrong_usage_is_refused(run: Run, arguments: tuple[str, ...], word: str) -> None:
    result = run("dump", *arguments)
    assert result.exit_code == 2
    assert word in result.stderr


def test_an_empty_directory_is_not_a_partition(run: Run, tmp_path: Path) -> None:
    result = run("dump", tmp_path)
    assert result.exit_code == 2
    assert "contains no file that can be dumped" in result.stderr


def test_a_largest_timestamp_below_minus_one_is_printed_as_by_kafka(run: Run, tmp_path: Path) -> None:
    log = encode_batch([Rec(0, -5000, b"key", b"value")])
    _, time_index = index_files(encode_batch([Rec(0, 1000, b"key", b"value")]), 0, 0)
    for suffix, data in ((".log", log), (".timeindex", time_index)):
        (tmp_path / f"{0:020d}{suffix}").write_bytes(data)
    assert "Index timestamp: 1000, log timestamp: -1\n" in run("dump", tmp_path / f"{0:020d}.timeindex").stderr


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """Write sixty batches of three records, with an index entry for every second batch."""
    folder = tmp_path / "logs" / "one-0"
    folder.mkdir(parents=True)
    batches = [
        encode_batch([Rec(3 * i + k, 1000 + i, b"k%02d" % i, b"v" * 50) for k in range(3)]) for i in range(60)
    ]
    log = b"".join(batches)
    index, time_index = index_files(log, 0, 300)
    for suffix, data in ((".log", log), (".index", index), (".timeindex", time_index)):
        (folder / f"{0:020d}{suffix}").write_bytes(data)
    return folder / f"{0:020d}.log"


def test_a_flipped_byte_is_reported(run: Run, segment: Path) -> None:
    data = bytearray(segment.read_bytes())
    size = len(data) // 60
    data[5 * size + 80] ^= 1
    segment.write_bytes(data)
    text = run("dump", segment)
    assert text.exit_code == 1
    assert [line[-5:] for line in text.stdout.splitlines() if "isvalid" in line].count("false") == 1
    assert f"({segment}, byte position {5 * size}, offset 15)" in text.stderr
    rows = run("dump", segment, "--output", "json")
    assert rows.exit_code == 1
    [problem] = objects(rows.stdout, "problem")
    assert (problem["file"], problem["position"], problem["offset"]) == (str(segment), 5 * size, 15)
    assert rows.stderr == ""


def test_dump_prints_the_records_around_an_unreadable_one(run: Run, segment: Path) -> None:
    spoiled = encode_batch([Rec(180, 5, b"k", b"v"), Rec(181, 5, b"k", b"v")], record_count=3)
    tail = encode_batch([Rec(183, 6, b"k", b"v")])
    segment.write_bytes(segment.read_bytes() + spoiled + tail)
    result = run("dump", segment, "--deep-iteration", "--output", "json")
    assert result.exit_code == 1
    assert [item["offset"] for item in objects(result.stdout, "record")][-3:] == [180, 181, 183]
    [problem] = objects(result.stdout, "problem")
    assert problem["offset"] == 180 and "record 2 of 3" in problem["what"]


@pytest.mark.parametrize("tail", [b"\0" * 40, b"\1" * 10, b"\xff" * 60])
def test_bytes_after_the_last_batch_are_reported(run: Run, segment: Path, tail: bytes) -> None:
    size = len(segment.read_bytes())
    segment.write_bytes(segment.read_bytes() + tail)
    result = run("dump", segment, "--output", "json")
    assert result.exit_code == 1
    assert [item["position"] for item in objects(result.stdout, "problem")] == [size]
    assert len(objects(result.stdout, "batch")) == 60
    # While a broker has the log dir open, the active segment is longer than its contents.
    with hold([str(segment.parent.parent)]):
        result = run("dump", segment, "--output", "json")
    assert result.exit_code == 0
    assert "active segment" in result.stderr
    assert not objects(result.stdout, "problem")


def test_a_range_of_offsets_is_printed(run: Run, segment: Path) -> None:
    result = run("dump", segment, "--deep-iteration", "--from-offset", 61, "--to-offset", 65, "--output", "json")
    assert result.exit_code == 0 and result.stderr == ""
    assert [item["offset"] for item in objects(result.stdout, "record")] == [61, 62, 63, 64]
    assert [item["baseOffset"] for item in objects(result.stdout, "batch")] == [60, 63]


def test_a_range_of_bytes_is_printed(run: Run, segment: Path) -> None:
    size = len(segment.read_bytes()) // 60
    result = run("dump", segment, "--from-position", 10 * size + 1, "--to-position", 12 * size + 1, "--output", "json")
    assert [item["position"] for item in objects(result.stdout, "batch")] == [11 * size, 12 * size]
    result = run("dump", segment, "--max-bytes", 3 * size - 1, "--output", "json")
    assert [item["position"] for item in objects(result.stdout, "batch")] == [0, size]
    assert result.exit_code == 0


def test_a_range_is_read_from_its_index_entry(run: Run, segment: Path) -> None:
    """Damage before the position where reading begins is not reported."""
    data = bytearray(segment.read_bytes())
    data[8:12] = bytes(4)  # no batch has this size: reading from byte 0 would end here
    segment.write_bytes(data)
    flags = ("--from-offset", 100, "--to-offset", 102, "--output", "json")
    result = run("dump", segment, *flags)
    assert result.exit_code == 0
    assert [item["baseOffset"] for item in objects(result.stdout, "batch")] == [99]
    segment.with_suffix(".index").unlink()
    result = run("dump", segment, *flags)
    assert result.exit_code == 1
    assert "read from its start" in result.stderr


@pytest.mark.parametrize("damage", ["swapped", "wrong"])
def test_a_wrong_index_is_not_trusted(run: Run, segment: Path, damage: str) -> None:
    index = segment.with_suffix(".index")
    data = bytearray(index.read_bytes())
    if damage == "swapped":
        data[:8], data[8:16] = data[8:16], data[:8]
    else:
        for at in range(0, len(data), 8):
            data[at + 7] ^= 1  # changes every position by one byte
    index.write_bytes(data)
    result = run("dump", segment, "--from-offset", 150, "--to-offset", 151, "--output", "json")
    assert [item["baseOffset"] for item in objects(result.stdout, "batch")] == [150]
    assert ("not in ascending order" if damage == "swapped" else "where no such batch begins") in result.stderr
    assert "the log is read from its start" in result.stderr
    assert run("dump", index).exit_code == 1


def test_missing_files_beside_an_index_are_not_created(run: Run, segment: Path) -> None:
    segment.with_suffix(".index").unlink()
    assert run("dump", segment.with_suffix(".timeindex")).exit_code == 0
    segment.unlink()
    result = run("dump", segment.with_suffix(".timeindex"))
    assert result.exit_code == 1
    assert "there is no log for the index" in result.stderr
    assert [path.suffix for path in segment.parent.iterdir()] == [".timeindex"]


def test_broken_checkpoints_and_snapshots_are_reported(run: Run, tmp_path: Path) -> None:
    for name, data in [
        ("leader-epoch-checkpoint", b"0\n2\n0 0\n"),
        ("cleaner-offset-checkpoint", b"1\n0\n"),
        (f"{7:020d}.snapshot", b"\0\1\0\0\0\0\0\0\0\0"),
        ("partition.metadata", b"version: 0"),
    ]:
        (tmp_path / name).write_bytes(data)
        result = run("dump", tmp_path / name)
        assert result.exit_code == 1, name
        assert name in result.stderr


def test_an_emptied_batch_is_not_a_mismatch(run: Run, tmp_path: Path) -> None:
    """Kafka's tool reports the time index entry of such a batch as a mismatch with -1."""
    log = encode_batch([], base_offset=0, last_offset=4, max_timestamp=77)
    index, time_index = index_files(log, 0, 0)
    for suffix, data in ((".log", log), (".index", index), (".timeindex", time_index)):
        (tmp_path / f"{0:020d}{suffix}").write_bytes(data)
    assert run("dump", tmp_path).exit_code == 0
    (tmp_path / f"{0:020d}.timeindex").write_bytes(time_index[:7] + b"\x4e" + time_index[8:])
    assert run("dump", tmp_path).exit_code == 1


def test_keys_and_payloads_are_decoded_by_classes(run: Run, tmp_path: Path) -> None:
    log = tmp_path / f"{0:020d}.log"
    found = [(b"\0\0\1\0", b"\xff" * 8), (b"k", None), (None, b"short"), (b"\xff\xff\xff\xfe+", b"{\0\0\0\0\0\0\0")]
    log.write_bytes(encode_batch([Rec(i, 0, key, value) for i, (key, value) in enumerate(found)]))
    classes = ("--key-decoder-class", "kafka.serializer.IntegerDecoder")
    classes += ("--value-decoder-class", "org.apache.kafka.tools.api.LongDecoder")
    rows = objects(run("dump", log, *classes, "--output", "json").stdout, "record")
    assert [(row.get("key"), row.get("payload")) for row in rows] == [
        (256, -1),
        ("Error at offset 1, skipping. The key has 1 bytes, but the decoder requires 4", None),
        (None, "Error at offset 2, skipping. The payload has 5 bytes, but the decoder requires 8"),
        (-2, int.from_bytes(b"{" + bytes(7), "big")),
    ]
    assert "key: 256 payload: -1\n" in run("dump", log, *classes).stdout


def test_one_decoder_leaves_the_other_part_as_text(run: Run, tmp_path: Path) -> None:
    log = tmp_path / f"{0:020d}.log"
    log.write_bytes(encode_batch([Rec(0, 0, b'{"not json', b"\xfe\xff"), Rec(1, 0, None, b"")]))
    flags = ("--key-decoder-class", STRING, "--value-decoder-class", "kafka.serializer.DefaultDecoder")
    rows = objects(run("dump", log, *flags, "--output", "json").stdout, "record")
    assert [(row["key"], row["payload"]) for row in rows] == [('{"not json', "/v8="), (None, "")]
    assert 'key: {"not json payload: /v8=\n' in run("dump", log, *flags).stdout


def test_metadata_is_decoded(run: Run, tmp_path: Path) -> None:
    log = tmp_path / f"{0:020d}.log"
    topic = b"\x01\x02\x00" + b"\x07orders" + bytes(16) + b"\x00"
    log.write_bytes(encode_batch([Rec(0, 0, None, topic), Rec(1, 0, None, b"\x01\x63\x00?"), Rec(2, 0, None, b"")]))
    result = run("dump", log, "--cluster-metadata-decoder", "--output", "json")
    assert result.exit_code == 0
    rows = [row["payload"] for row in objects(result.stdout, "record")]
    data = {"name": "orders", "topicId": "AAAAAAAAAAAAAAAAAAAAAA"}
    assert rows[0] == {"type": "TOPIC_RECORD", "version": 0, "data": data}
    assert rows[1] == "Error at 1, skipping. unknown record type 99, version 0"
    assert rows[2].startswith("Error at 2, skipping. ")


def test_batches_above_max_message_size_are_reported(run: Run, tmp_path: Path) -> None:
    log, index = (tmp_path / f"{0:020d}{suffix}" for suffix in (".log", ".index"))
    log.write_bytes(b"".join(encode_batch([Rec(offset, 0, b"k", b"v" * 99)]) for offset in range(9)))
    index.write_bytes(index_files(log.read_bytes(), 0, 200)[0])
    assert run("dump", index, "--max-message-size", str(2**31 - 1)).exit_code == 0
    result = run("dump", index, "--max-message-size", "61")
    entries = objects(run("dump", index, "--output", "json").stdout, "offsetIndexEntry")
    assert entries
    assert result.exit_code == 1
    assert result.stderr.count("more than --max-message-size 61") == len(entries)
    assert result.stdout.count("offset: ") == len(entries)
