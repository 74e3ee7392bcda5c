"""`dump` beside Kafka's own DumpLogSegments on the same files: the same lines, and the same complaints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from keytail.format.coordinator import offsets_text, transaction_text
from keytail.inspection.dump import DumpOptions, dump
from keytail.inspection.dump_index import IndexChecks
from keytail.inspection.dump_report import Report
from keytail.log.fs import LOCAL
from tests.golden import unpack
from tests.interop.kafka import Dumped, Kafka

pytestmark = pytest.mark.interop

KNOWN_TO_KAFKA = (".log", ".index", ".timeindex", ".txnindex", ".snapshot", ".checkpoint")
DECODERS = {"--offsets-decoder": offsets_text, "--transaction-log-decoder": transaction_text}


class Ours:
    """What our dump wrote, with the flags that Kafka's tool got."""

    def __init__(self, files: Sequence[Path], flags: Sequence[str]) -> None:
        out = bytearray()
        said: list[str] = []
        report = Report(out.extend, said.append)
        decoder = next((DECODERS[flag] for flag in flags if flag in DECODERS), None)
        options = DumpOptions(
            print_data_log="--print-data-log" in flags,
            deep_iteration="--deep-iteration" in flags,
            skip_record_metadata="--skip-record-metadata" in flags,
            index_checks=IndexChecks("--verify-index-only" in flags, "--index-sanity-check" in flags),
            decoder=decoder,
        )
        dump(LOCAL, [str(file) for file in files], options, report)
        # Kafka's tool reads bytes as text and prints it again; so do we, for lines that hold others' bytes.
        self.out = out.decode()
        self.said = said
        self.wrong = report.wrong


def kafkas(kafka: Kafka, files: Sequence[Path], flags: Sequence[str]) -> Dumped:
    return kafka.dump("--files", ",".join(map(str, files)), *flags)


def files_of(partition: Path) -> list[Path]:
    return sorted(path for path in partition.iterdir() if path.suffix in KNOWN_TO_KAFKA)


def assert_same(theirs: str, ours: str) -> None:
    """Line by line, so that a difference is short."""
    if theirs == ours:
        return
    for number, (one, other) in enumerate(zip(theirs.split("\n"), ours.split("\n"), strict=False)):
        assert other == one, f"line {number + 1}"
    assert len(ours) == len(theirs)


def complaints(text: str) -> list[str]:
    """Lines of standard error in any order of files, without those of a missing logging binding."""
    return sorted(line for line in text.splitlines() if line and not line.startswith("SLF4J"))


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize(
    "flags", [(), ("--print-data-log",), ("--deep-iteration",), ("--print-data-log", "--skip-record-metadata")]
)
def test_what_a_broker_wrote(kafka: Kafka, golden: Path, flags: tuple[str, ...]) -> None:
    for partition in sorted(path for path in golden.iterdir() if path.is_dir()):
        files = files_of(partition)
        theirs, ours = kafkas(kafka, files, flags), Ours(files, flags)
        assert theirs.status == 0, theirs.err
        assert_same(theirs.out, ours.out)
        assert complaints("\n".join(ours.said)) == complaints(theirs.err)
        assert not ours.wrong, ours.said


@pytest.mark.parametrize(
    ("topic", "flag"),
    [("__consumer_offsets", "--offsets-decoder"), ("__transaction_state", "--transaction-log-decoder")],
)
def test_decoded_topics_of_a_broker(kafka: Kafka, golden: Path, topic: str, flag: str) -> None:
    decoded = 0
    for partition in sorted(golden.glob(f"{topic}-*")):
        files = sorted(partition.glob("*.log"))
        theirs, ours = kafkas(kafka, files, (flag,)), Ours(files, (flag,))
        assert_same(theirs.out, ours.out)
        decoded += ours.out.count('payload: {"version"')
    assert decoded


@pytest.mark.parametrize("flag", ["--verify-index-only", "--index-sanity-check"])
def test_index_flags(kafka: Kafka, golden: Path, flag: str) -> None:
    for partition in sorted(path for path in golden.iterdir() if path.is_dir()):
        files = [file for file in files_of(partition) if "index" in file.suffix]
        assert_same(kafkas(kafka, files, (flag,)).out, Ours(files, (flag,)).out)
