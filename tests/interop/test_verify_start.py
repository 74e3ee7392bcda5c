"""Which losses at the next start `verify` reports, compared with Kafka's loader on the same directory after a clean
shutdown.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keytail.log.fs import LOCAL
from keytail.verify.task import verify_partition
from tests.interop.damages import batches
from tests.interop.kafka import Kafka, KafkaError, step_batch, step_roll

pytestmark = pytest.mark.interop

NOW = 1_700_000_000_000
END = 80
FIRST, CLOSED, LAST = (f"{base:020d}" for base in (0, 20, 40))
OPTIONS: dict[str, Any] = {"configs": {"index.interval.bytes": 300}, "clock_ms": NOW + 1000}


def _write_at(file: Path, at: int, data: bytes) -> None:
    old = file.read_bytes()
    file.write_bytes(old[:at] + data + old[at + len(data) :])


def _in_batch(segment: str, number: int, at: int, data: bytes) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        log = directory / f"{segment}.log"
        _write_at(log, batches(log)[number][0] + at, data)

    return damage


def _in_index(segment: str, offset_more: int, position_more: int) -> Callable[[Path], None]:
    """Change the last entry of an index."""

    def damage(directory: Path) -> None:
        file = directory / f"{segment}.index"
        offset, position = struct.unpack(">ii", file.read_bytes()[-8:])
        _write_at(file, file.stat().st_size - 8, struct.pack(">ii", offset + offset_more, position + position_more))

    return damage


def _cut(segment: str, less: int) -> Callable[[Path], None]:
    return lambda d: (d / f"{segment}.log").write_bytes((d / f"{segment}.log").read_bytes()[:-less])


def _two(first: Callable[[Path], object], then: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        first(directory)
        then(directory)

    return damage


HUGE, FLIPPED = struct.pack(">i", 2**30), b"\xff"
# For each case, the damage, and whether Kafka loses records at the start: it reuses offsets, or truncates a log. None:
# the broker does not start.
CASES: dict[str, tuple[Callable[[Path], object], bool | None]] = {
    "no damage": (lambda d: None, False),
    "batch size in a closed segment": (_in_batch(CLOSED, 3, 8, HUGE), False),
    "size of the last batch": (_in_batch(LAST, -1, 8, HUGE), True),
    "size 0 of the last batch": (_in_batch(LAST, -1, 8, bytes(4)), None),
    "base offset in a closed segment": (_in_batch(CLOSED, 3, 0, struct.pack(">q", 21)), False),
    "base offset of the last batch": (_in_batch(LAST, -1, 0, struct.pack(">q", 41)), True),
    "base offset below the segment": (_in_batch(LAST, -1, 0, struct.pack(">q", 3)), True),
    "a value in a closed segment": (_in_batch(CLOSED, 3, 80, FLIPPED), False),
    "a value in the last batch": (_in_batch(LAST, -1, 80, FLIPPED), False),
    "the magic of the last batch": (_in_batch(LAST, -1, 16, b"\x09"), False),
    "the last segment truncated": (_cut(LAST, 5), True),
    "a closed segment truncated": (_cut(CLOSED, 5), False),
    "zeros at the log end": (lambda d: (d / f"{LAST}.log").open("ab").write(bytes(500)), None),
    "index position in a closed segment": (_in_index(CLOSED, 0, 1), False),
    "index position in the last segment": (_in_index(LAST, 0, 1), True),
    "index position beyond the last segment": (_in_index(LAST, 0, 10**6), True),
    "index offset in the last segment": (_in_index(LAST, 5000, 0), True),
    "index of zeros": (lambda d: (d / f"{LAST}.index").write_bytes(bytes(72)), False),
    "no index": (lambda d: (d / f"{CLOSED}.index").unlink(), False),
    "no index, and a value changed": (
        _two(_in_batch(CLOSED, 3, 80, FLIPPED), lambda d: (d / f"{CLOSED}.index").unlink()),
        True,
    ),
    "no index in the last segment, and a value changed": (
        _two(_in_batch(LAST, 3, 80, FLIPPED), lambda d: (d / f"{LAST}.index").unlink()),
        True,
    ),
    "no segment": (lambda d: [file.unlink() for file in d.glob("0*")], True),
    "a swap file with an unpadded offset": (lambda d: (d / "20.log.swap").write_bytes(b"x" * 100), True),
    "a swap file without an offset": (lambda d: (d / "x.swap").touch(), None),
    "leader epochs out of order": (lambda d: (d / "leader-epoch-checkpoint").write_text("0\n2\n1 0\n0 32\n"), False),
}
# These are reported although the start loses nothing: a later action of the broker loses records, or another case of
# the same finding does.
REPORTED_ANYWAY = {"a swap file without an offset", "size 0 of the last batch"}


@pytest.mark.parametrize("name", CASES)
def test_verify_reports_the_losses_of_the_next_start(kafka: Kafka, fast_dir: Path, name: str) -> None:
    directory = fast_dir / "t-0"
    _write_log(kafka, directory)
    damage, loses = CASES[name]
    damage(directory)
    reported = any(finding.start_loses for finding in verify_partition(LOCAL, str(directory)))
    sizes = {file.name: file.stat().st_size for file in directory.glob("0*.log") if len(file.stem) == 20}
    lost: bool | None
    try:
        loaded = kafka.append(directory, [], settle=False, **OPTIONS)
    except KafkaError:
        lost = None
    else:
        shorter = any((directory / file).stat().st_size < size for file, size in sizes.items())
        lost = loaded.log_end_offset < END or shorter
    assert lost is loses
    assert reported is (bool(loses) or name in REPORTED_ANYWAY)
    shutil.rmtree(directory)


def _write_log(kafka: Kafka, directory: Path) -> None:
    """Write three segments with batches of two records, and an index entry for every second batch."""

    def batch(i: int) -> dict[str, Any]:
        return step_batch([(NOW + i, b"k%d" % i, b"v" * 40), (NOW + i, b"j%d" % i, b"v" * 40)])

    steps = [*map(batch, range(10)), step_roll(), *map(batch, range(10, 20)), step_roll(), *map(batch, range(20, 40))]
    assert kafka.append(directory, steps, **OPTIONS).log_end_offset == END
