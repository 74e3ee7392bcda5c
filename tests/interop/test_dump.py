"""`dump` prints the same lines and complaints as Kafka's DumpLogSegments for the same files."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from keytail.dump.batch_lines import BOTH
from keytail.dump.decoder_classes import ClassDecoder
from keytail.dump.files import DumpOptions, dump
from keytail.dump.index import IndexChecks
from keytail.dump.report import Report
from keytail.format.decoders import DECODERS
from keytail.log.fs import LOCAL
from tests.chance import SEED
from tests.golden import unpack
from tests.interop.kafka import Dumped, Kafka
from tests.reference.batches import Rec, encode_batch, encode_marker
from tests.reference.indexing import index_files
from tests.reference.legacy import encode_single, encode_wrapper

pytestmark = pytest.mark.interop

KNOWN_TO_KAFKA = (".log", ".index", ".timeindex", ".txnindex", ".snapshot", ".checkpoint")
DECODERS_BY_FLAG = {decoder.flag: decoder.text for decoder in DECODERS}


class Ours:
    """The output of keytail's dump with the flags of Kafka's tool."""

    def __init__(self, files: Sequence[Path], flags: Sequence[str], by_class: ClassDecoder | None = None) -> None:
        out = bytearray()
        message: list[str] = []
        report = Report(out.extend, message.append)
        decoder = next((DECODERS_BY_FLAG[flag] for flag in flags if flag in DECODERS_BY_FLAG), None)
        options = DumpOptions(
            print_data_log="--print-data-log" in flags,
            deep_iteration="--deep-iteration" in flags,
            skip_record_metadata="--skip-record-metadata" in flags,
            index_checks=IndexChecks("--verify-index-only" in flags, "--index-sanity-check" in flags),
            decoder=decoder if by_class is None else by_class.text,
            decoded=BOTH if by_class is None else by_class.decoded,
        )
        dump(LOCAL, [str(file) for file in files], options, report)
        # Kafka's tool decodes bytes of the log as text and encodes them again; so does keytail.
        self.out = out.decode()
        self.said = message
        self.wrong = report.wrong


def kafkas(kafka: Kafka, files: Sequence[Path], flags: Sequence[str]) -> Dumped:
    return kafka.dump("--files", ",".join(map(str, files)), *flags)


def files_of(partition: Path) -> list[Path]:
    return sorted(path for path in partition.iterdir() if path.suffix in KNOWN_TO_KAFKA)


def assert_same(theirs: str, ours: str) -> None:
    """Compare line by line, so that a difference is short."""
    theirs = re.sub(r"((?:key|value)Size\W*: ?)-\d+", r"\1-1", theirs)  # keytail prints another size for null (DUMP.md)
    if theirs == ours:
        return
    for number, (item, other) in enumerate(zip(theirs.split("\n"), ours.split("\n"), strict=False)):
        assert other == item, f"line {number + 1}"
    assert len(ours) == len(theirs)


def complaints(text: str) -> list[str]:
    """Return the sorted lines of standard error, without those about a missing logging binding."""
    return sorted(line for line in text.splitlines() if line and not line.startswith("SLF4J"))


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize(
    "flags", [(), ("--print-data-log",), ("--deep-iteration",), ("--print-data-log", "--skip-record-metadata")]
)
def test_the_log_of_a_broker_is_printed_as_by_kafka(kafka: Kafka, golden: Path, flags: tuple[str, ...]) -> None:
    for partition in sorted(path for path in golden.iterdir() if path.is_dir()):
        files = files_of(partition)
        theirs, ours = kafkas(kafka, files, flags), Ours(files, flags)
        assert theirs.status == 0, theirs.err
        assert_same(theirs.out, ours.out)
        assert complaints("\n".join(ours.said)) == complaints(theirs.err)
        assert not ours.wrong, ours.said


@pytest.mark.parametrize(
    ("topic", "flag"),
    [
        ("__consumer_offsets", "--offsets-decoder"),
        ("__transaction_state", "--transaction-log-decoder"),
        ("__cluster_metadata", "--cluster-metadata-decoder"),
    ],
)
def test_decoded_topics_of_a_broker_are_printed_as_by_kafka(kafka: Kafka, golden: Path, topic: str, flag: str) -> None:
    decoded = 0
    for partition in sorted(golden.glob(f"{topic}-*")):
        files = sorted(partition.glob("*.log"))
        theirs, ours = kafkas(kafka, files, (flag,)), Ours(files, (flag,))
        assert_same(theirs.out, ours.out)
        decoded += ours.out.count('payload: {"')
    assert decoded


@pytest.mark.parametrize("flag", ["--verify-index-only", "--index-sanity-check"])
def test_index_flags_print_the_same_as_kafka(kafka: Kafka, golden: Path, flag: str) -> None:
    for partition in sorted(path for path in golden.iterdir() if path.is_dir()):
        files = [file for file in files_of(partition) if "index" in file.suffix]
        assert_same(kafkas(kafka, files, (flag,)).out, Ours(files, (flag,)).out)


LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "60"))
T0 = 1_700_000_000_000
TEXTS = [b"", b"key-1", "schlüssel".encode(), "鍵🔑".encode(), b'say "hi"\\', b"a\tb\x01\x7f", b"x" * 300]


def random_bytes(rng: random.Random) -> bytes | None:
    """Return UTF-8 text, text truncated at any byte, or any bytes."""
    choice = rng.random()
    if choice < 0.1:
        return None
    if choice < 0.6:
        return rng.choice(TEXTS)
    if choice < 0.8:
        text = "aé鍵🔑".encode() * rng.randint(1, 3)
        return text[rng.randrange(3) : len(text) - rng.randrange(4)]
    lead = bytes(
        rng.choice([0xC2, 0xC0, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF, 0x80, 0xBF, 0xA0, 0x8F, 0x41])
        for _ in range(6)
    )
    return lead[: rng.randint(1, 6)].replace(b"\n", b"")


def random_log(rng: random.Random, *, old: bool) -> bytes:
    """Return a log with batches of every kind, at ascending offsets with gaps."""
    offset, parts = rng.choice([0, 0, 5]), []
    for _ in range(rng.randint(1, 12)):
        records = []
        for _ in range(rng.randint(1, 6)):
            headers = tuple(
                (random_bytes(rng) or b"h", random_bytes(rng)) for _ in range(rng.choice([0, 0, 1, 3]) * (not old))
            )
            records.append(Rec(offset, T0 + rng.randint(-5, 500), random_bytes(rng), random_bytes(rng), headers))
            offset += rng.choice([1, 1, 1, 2, 40])
        codec, append_time = rng.randrange(5), rng.random() < 0.2
        if old and rng.random() < 0.8:
            magic = rng.randrange(2)
            if codec in (0, 4):
                parts += [encode_single(record, magic=magic, append_time=append_time) for record in records]
            else:
                parts.append(encode_wrapper(records, codec, magic=magic))
            continue
        kind = rng.random()
        if kind < 0.1:
            producer = {"producer_id": rng.randrange(5), "producer_epoch": rng.randrange(3)}
            commit, epoch = rng.random() < 0.5, rng.randrange(9)
            parts.append(encode_marker(offset, T0, commit=commit, coordinator_epoch=epoch, **producer))
            offset += 1
        elif kind < 0.2:
            last = offset + rng.randrange(3)
            parts.append(encode_batch([], base_offset=offset, last_offset=last, max_timestamp=T0 + 600, codec=codec))
            offset = last + 1
        else:
            producer = {}
            if rng.random() < 0.4:
                sequence = rng.choice([0, 7, 2**31 - 3])
                producer = {
                    "producer_id": rng.randrange(2**40),
                    "producer_epoch": rng.randrange(9),
                    "base_sequence": sequence,
                }
            parts.append(
                encode_batch(
                    records,
                    codec=codec,
                    timestamp_type=int(append_time),
                    leader_epoch=rng.choice([-1, 0, 7]),
                    transactional=bool(producer) and rng.random() < 0.5,
                    delete_horizon_ms=T0 + 900 if rng.random() < 0.1 else None,
                    last_offset=offset - 1,
                    **producer,
                )
            )
    return b"".join(parts)


def write_segment(folder: Path, log: bytes, interval: int, old: bool) -> list[Path]:
    stem = folder / f"{0:020d}"
    files = [stem.with_suffix(suffix) for suffix in (".log", ".index", ".timeindex")]
    indexes = (b"", b"") if old else index_files(log, 0, interval)
    for file, data in zip(files, (log, *indexes), strict=True):
        file.write_bytes(data)
    return files


def damage(rng: random.Random, files: Sequence[Path]) -> str:
    """Damage one of the files, and return what was done."""
    file = rng.choice([files[0], files[0], *files[1:]])
    data = bytearray(file.read_bytes())
    kind = rng.choice(["flip", "cut", "garbage", "zeros"])
    if not data:
        return "nothing"
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "garbage":
        data += rng.randbytes(rng.randint(1, 90))
    else:
        data += bytes(rng.randint(1, 90))
    file.write_bytes(data)
    return f"{kind} in {file.name}"


def before_the_exception(text: str) -> str:
    """Return what Kafka's tool printed before the batch in which it failed."""
    lines = text.split("\n")[:-1]
    while lines and not lines[-1].startswith(("baseOffset: ", "offset: ", "timestamp: ", "Dumping ", "Log starting")):
        lines.pop()
    return "\n".join(lines)


def known(text: str) -> list[str]:
    """Return the complaints in a form common to both tools, without those about timestamps of emptied batches, which
    Kafka misses.
    """
    found = [line for line in complaints(text) if not line.startswith("Found timestamp mismatch")]
    ours_alone = ("log timestamp: -1", "(/", "read from its start")
    return [line for line in found if not any(part in line for part in ours_alone)]


@pytest.mark.parametrize("old", [False, True], ids=["magic 2", "magic 0 and 1 too"])
def test_random_logs_are_printed_as_by_kafka(kafka: Kafka, fast_dir: Path, old: bool) -> None:
    for number in range(LOGS):
        seed = f"{SEED}-{old}-{number}"
        rng = random.Random(seed)
        folder = fast_dir / str(number)
        folder.mkdir()
        files = write_segment(folder, random_log(rng, old=old), rng.choice([0, 1, 200, 4096]), old)
        done = damage(rng, files) if number % 2 else ""
        for flags in (("--print-data-log",), ()):
            for file in files:
                theirs, ours = kafkas(kafka, [file], flags), Ours([file], flags)
                try:
                    if theirs.status == 0:
                        assert_same(theirs.out, ours.out)
                        assert known("\n".join(ours.said)) == known(theirs.err)
                    else:
                        assert ours.out.startswith(before_the_exception(theirs.out))
                        # For each time index entry, Kafka's tool reads the rest of the log; keytail does not.
                        assert ours.wrong or not done.endswith(file.name)
                    if not done:
                        assert not ours.wrong, ours.said
                except AssertionError as difference:
                    difference.add_note(f"KEYTAIL_SEED={SEED}: {seed} {flags} {file.name} {done}\n{theirs.err[:900]}")
                    raise
