"""The defects that the fuzz found, each with its smallest input."""

from __future__ import annotations

import os
import random
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keytail.dump.files import DumpOptions, dump
from keytail.dump.report import Report
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.format import legacy
from keytail.format.batch import BATCH_TABLE
from keytail.kernels import batches
from keytail.log.checkpoint import read_offsets
from keytail.log.cluster.metadata import read_metadata
from keytail.log.files.existing import MAX_SMALL_BYTES
from keytail.log.fs import LOCAL
from keytail.log.log_end import log_end
from keytail.run.tasks import run_attempt
from keytail.verify.task import verify_partition
from tests.hostile.directories import run
from tests.hostile.in_memory import InMemory
from tests.hostile.mutator import with_checksum
from tests.hostile.parsers import DIR, LOG, read_log
from tests.reference import metadata
from tests.reference.batches import Rec, encode_batch
from tests.reference.legacy import encode_message, encode_single, encode_wrapper

T0 = 1_700_000_000_000
MAX = 2**63 - 1


def with_offset(batch: bytes, offset: int) -> bytes:
    """Return the batch with another base offset, which the checksum does not cover."""
    return struct.pack(">q", offset) + batch[8:]


ONE, TWO = (encode_batch([Rec(i, T0, b"k", b"v") for i in range(n)]) for n in (1, 2))


@pytest.mark.parametrize(("batch", "offset"), [(TWO, MAX), (TWO, MAX - 1), (ONE, MAX)])
def test_a_batch_with_an_offset_beyond_the_largest_is_damage_for_every_reader(batch: bytes, offset: int) -> None:
    """The last offset of the batch overflowed to a negative number, so that the next batch could have a lower offset.
    """
    log = with_offset(batch, offset) + ONE
    damage = read_log(log)
    assert isinstance(damage, CorruptLog)
    assert damage.byte_position == 0
    findings = verify_partition(InMemory({LOG: log}), DIR).findings
    assert {"offset-order"} <= {finding.kind for finding in findings if finding.byte_position == 0}
    assert log_end(InMemory({LOG: log}), LOG, 0).end_position == 0


def test_the_largest_possible_offsets_are_read() -> None:
    found = read_log(with_offset(TWO, MAX - 2))
    assert isinstance(found, list)
    assert [rec.offset for rec in found] == [MAX - 2, MAX - 1]


@pytest.mark.parametrize("offset", [MAX, -1])
def test_a_message_of_an_old_format_with_an_invalid_offset_is_corrupt(offset: int) -> None:
    assert isinstance(read_log(encode_message(offset, b"k", b"v")), CorruptLog)


def test_compressed_records_beyond_the_largest_offset_are_reported() -> None:
    batch = encode_batch([Rec(0, T0, b"k", b"v"), Rec(1, T0, b"k", b"v")], codec=1)
    findings = verify_partition(InMemory({LOG: with_offset(batch, MAX)}), DIR).findings
    assert "offset-order" in {finding.kind for finding in findings}


@pytest.mark.long
def test_old_messages_before_a_damaged_one_must_have_ascending_offsets() -> None:
    """A wrapper whose records begin below the previous message was accepted if a later message was damaged."""
    first = encode_single(Rec(9, T0, b"k", b"v"), magic=0)
    back = encode_wrapper([Rec(3, -1, b"k", b"v"), Rec(10, -1, b"k", b"v")], 1, magic=0)
    damaged = encode_wrapper([Rec(11, -1, b"k", b"v")], 1, magic=0)
    damaged = damaged[:-1] + bytes([damaged[-1] ^ 1])
    log = np.frombuffer(first + back + damaged, np.uint8)
    table, out = np.empty(3, BATCH_TABLE), np.zeros(4, np.int64)
    batches.index_batches(log, len(log), 0, -1, table, out)
    assert out[batches.ROWS] == 3
    with pytest.raises(legacy.LegacyProblem) as found:
        legacy.summarize_rows(log, 0, table)
    assert found.value.row == 1


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 20, "0" * 5000 + "9" * 20])
def test_a_checkpoint_with_a_number_of_thousands_of_digits_is_corrupt(number: str) -> None:
    path = f"{DIR}/checkpoint"
    with pytest.raises(CorruptLog, match="line 3"):
        read_offsets(InMemory({path: f"0\n1\nt 0 {number}\n".encode()}), path)


def test_leading_zeros_of_a_number_are_ignored() -> None:
    path = f"{DIR}/checkpoint"
    for text, value in (("0" * 5000 + "7", 7), ("+0", 0), ("-007", -7), (str(-(2**63)), -(2**63))):
        assert read_offsets(InMemory({path: f"0\n1\nt 0 {text}\n".encode()}), path) == {("t", 0): value}


def test_a_metadata_batch_with_two_billion_offsets_needs_little_memory() -> None:
    path = f"/logs/__cluster_metadata-0/{0:020d}.log"
    log = encode_batch([Rec(0, T0, None, metadata.topic("t", 1))], last_offset=2**31 - 1)
    before = _peak_kib()
    with pytest.raises(Refused, match="gaps"):
        read_metadata(InMemory({path: log}), os.path.dirname(path), 1, ())
    assert _peak_kib() - before < 1 << 20


def _peak_kib() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def dumped(log: bytes) -> tuple[bool, list[str]]:
    message: list[str] = []
    report = Report(lambda part: None, message.append)
    dump(InMemory({LOG: log}), [LOG], DumpOptions(print_data_log=True), report)
    return report.wrong, message


@pytest.mark.parametrize("magic", [3, 127, 200])
def test_a_dump_reports_an_unknown_magic_byte(magic: int) -> None:
    wrong, message = dumped(with_checksum(ONE[:16] + bytes([magic]) + ONE[17:]))
    assert wrong
    assert any("magic" in text for text in message)


def test_a_dump_reports_bytes_after_a_batch_without_records() -> None:
    empty = encode_batch([], base_offset=0, last_offset=0) + b"x"
    assert dumped(with_checksum(empty[:8] + struct.pack(">i", len(empty) - 12) + empty[12:]))[0]


def test_a_dump_reports_a_wrong_checksum_of_an_inner_message() -> None:
    inner = encode_message(0, b"k", b"v", magic=0, crc=7)
    wrong, message = dumped(encode_wrapper([Rec(0, -1, b"k", b"v")], 1, magic=0, inner=inner))
    assert wrong
    assert any("inside" in text for text in message)


def test_a_sparse_file_of_any_size_needs_little_memory(tmp_path: Path) -> None:
    """A file above MAX_SMALL_BYTES is refused without being read."""
    for size_bytes in (MAX_SMALL_BYTES + 1, 1 << 40):
        file = tmp_path / "checkpoint"
        file.touch()
        os.truncate(file, size_bytes)
        with pytest.raises(OSError, match="File is larger than"):
            LOCAL.read_bytes(str(file))


def test_an_error_of_the_system_is_printed_without_a_traceback() -> None:
    def task(payload: Any, attempt: str) -> None:
        raise payload

    for error in (PermissionError(13, "Permission denied", "/x"), MemoryError()):
        outcome = run_attempt(task, error, "a")
        assert isinstance(outcome.problem, KeytailError)
        assert not outcome.trace


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are text on macOS")
def test_names_that_are_not_text_are_reported(tmp_path: Path) -> None:
    partition = tmp_path / "logs" / "t-0"
    partition.mkdir(parents=True)
    (partition / f"{0:020d}.log").write_bytes(ONE)
    with open(os.fsencode(partition) + b"/\xff.log", "wb") as file:
        file.write(ONE)
    for arguments in (
        ["verify", "--log-dirs", str(partition.parent)],
        ["rebuild-index", "--log-dirs", str(partition.parent)],
    ):
        answer = run(arguments)
        assert answer.status in (1, 3)
        assert b"udcff" in answer.out
    answer = run(["dump", str(partition) + "/\udcff.log"])
    assert answer.status == 2


@pytest.mark.parametrize("offset", [2**62, 2**62 + 1, 2**63 - 3])
def test_a_proof_reports_the_position_of_an_invalid_offset(tmp_path: Path, offset: int) -> None:
    """The proof looked for an output segment after the last one, and failed with a traceback."""
    partition = tmp_path / "logs" / "t-0"
    partition.mkdir(parents=True)
    for base, log in ((0, ONE), (1, with_offset(ONE, offset)), (7, b"")):
        for suffix in (".log", ".index", ".timeindex"):
            (partition / f"{base:020d}{suffix}").write_bytes(log if suffix == ".log" else b"")
    (partition.parent / ".kafka_cleanshutdown").write_text("{}")
    answer = run(
        ["compact", "--log-dirs", str(partition.parent), "--topics-have-no-overrides", "--high-watermark", "log-end",
         "--topic-config", "t:cleanup.policy=compact", "--force", "--execute", "--output", "json"]
    )  # fmt: skip
    [row] = answer.rows()
    assert row["status"] == "corrupt", row["error"]
    assert f"byte position 0, offset {offset}" in row["error"]
    assert "Traceback" not in answer.err


def test_random_bytes_are_reported_as_corrupt() -> None:
    rng = random.Random(1)
    for _ in range(50):
        assert isinstance(read_log(rng.randbytes(rng.randrange(1, 300))), CorruptLog)
