"""Random steps on a partition: appends with transactions, compactions, index rebuilds, retention, and kills of each of
these commands at random moments. After every step, a broker must find the appended records.

`KEYTAIL_STEPS` is the number of steps (`make soak`: 60 for each of 20 partitions). `KEYTAIL_SEED` repeats the draws;
the state of a run at a kill also depends on the machine.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from keytail.main.main import app
from tests.chance import SEED
from tests.growing_log import GrowingLog
from tests.kills.forks import run_in_child
from tests.reference import loader
from tests.reference.batches import Rec, decode_log

pytestmark = pytest.mark.long

STEPS = int(os.environ.get("KEYTAIL_STEPS", "20"))
LIVES = int(os.environ.get("KEYTAIL_LIVES", "1"))
SEGMENT_SUFFIXES = (".log", ".index", ".timeindex", ".txnindex")


def test_a_broker_finds_the_appended_records_after_every_step(tmp_path: Path) -> None:
    for number in range(LIVES):
        seed = f"{SEED}/{number}"
        partition = RandomPartition(random.Random(seed), tmp_path / str(number))
        for step in range(5 * STEPS):
            if step >= STEPS and partition.kills:  # on a fast machine, all runs may end before their kills
                break
            try:
                partition.step()
                partition.check()
            except AssertionError as error:
                steps = ", ".join(partition.history)
                raise AssertionError(
                    f"KEYTAIL_SEED={SEED}, partition {number}, step {step} ({steps}): {error}"
                ) from error
        print(f"partition {number} of seed {SEED}: {', '.join(partition.history)}")
        assert partition.kills, "no run was killed"


@dataclass
class RandomPartition:
    """One partition, its steps so far, and the log that a broker must find."""

    rng: random.Random
    log_dir: Path
    history: list[str] = field(default_factory=list)
    kills: int = 0
    run_s: float = 0.0

    def __post_init__(self) -> None:
        self.log = GrowingLog(self.rng, self.log_dir, now_ms=int(time.time() * 1000) - 3_600_000)
        self.log.grow(40)
        self.write()

    def write(self) -> None:
        """Write the log as a killed broker leaves it, without `.kafka_cleanshutdown`."""
        self.log.write()
        (self.log_dir / ".kafka_cleanshutdown").unlink()

    def step(self) -> None:
        chance = self.rng.random()
        if chance < 0.3:
            self.append()
        elif chance < 0.7:
            self.run("compact", "--force", "--topic-config", "t:segment.bytes=1048576")
        elif chance < 0.85:
            self.lose_indexes()
            self.run("rebuild-index")
        else:
            log_bytes = sum(path.stat().st_size for path in self.log.path.glob("*.log"))
            self.run("expire", "--topic-config", f"t:retention.bytes={int(log_bytes * self.rng.uniform(0.5, 0.95))}")
            self.log.start = self.log_start_offset()

    def log_start_offset(self) -> int:
        """Return the log start offset that a broker determines: not below the first segment."""
        checkpoint = self.log_dir / "log-start-offset-checkpoint"
        lines = checkpoint.read_text().splitlines()[2:] if checkpoint.exists() else []
        return max([min(loader.load(self.log.path).segments), *(int(line.split()[2]) for line in lines)])

    def append(self) -> None:
        self.history.append("append")
        self.start_broker()
        self.log.grow(self.rng.randint(1, 30))
        if self.rng.random() < 0.5:
            self.log.settle()
        self.write()

    def start_broker(self) -> None:
        """Change the files as a broker does at its start after a killed run, by the model of its loader."""
        loaded = loader.load(self.log.path)
        for path in self.log.path.iterdir():
            # If the offset index is missing, a broker rebuilds the transaction index with the same content.
            if path.suffix in (*SEGMENT_SUFFIXES[:3], ".swap", ".cleaned", ".deleted"):
                path.unlink()
        for base, segment in loaded.segments.items():
            parts = (segment.log, segment.index, segment.time_index, segment.txn_index)
            for suffix, data in zip(SEGMENT_SUFFIXES, parts, strict=True):
                if data is not None:
                    (self.log.path / f"{base:020d}{suffix}").write_bytes(data)

    def lose_indexes(self) -> None:
        for path in sorted(self.log.path.glob("*index")):
            if path.suffix in (".index", ".timeindex") and self.rng.random() < 0.3:
                path.unlink() if self.rng.random() < 0.5 else path.write_bytes(bytes(path.stat().st_size))

    def run(self, command: str, *flags: str) -> None:
        """Run the command in a child, and kill it in half of the cases."""
        words = [
            command, "--log-dirs", str(self.log_dir), "--execute", "--output", "json", *flags,
            "--topic-config", "t:cleanup.policy=compact,delete", "--topic-config", "t:retention.ms=-1",
            "--topic-config", f"t:delete.retention.ms={self.rng.choice([0, 1, 10**9])}",
            *([] if command == "rebuild-index" else ["--topics-have-no-overrides"]),
        ]  # fmt: skip
        kill_after_s = self.rng.uniform(0, self.run_s) if self.run_s and self.rng.random() < 0.5 else None
        started_s = time.monotonic()
        killed = run_in_child(lambda: _invoke(words), kill_after_s)
        if kill_after_s is None:
            self.run_s = time.monotonic() - started_s
        self.kills += killed
        self.history.append(f"{command}{' killed' if killed else ''}")
        if not killed and kill_after_s is None:
            left = [path.name for path in self.log.path.iterdir() if path.suffix in (".swap", ".clean", ".deleted")]
            assert not left, f"scratch files remain: {left}"

    def check(self) -> None:
        """Check that no record was added, that the latest committed record of each key and the log end offset are
        correct, and that aborted data is in the transaction index.
        """
        loaded = loader.load(self.log.path)
        appended = {item.record.offset: item for item in self.log._appended}
        found: dict[int, Rec] = {}
        entries = [entry for segment in loaded.segments.values() for entry in _aborted(segment.txn_index or b"")]
        is_rebuilt = any(segment.index is None for segment in loaded.segments.values())
        last_offset = -1
        for _, segment in sorted(loaded.segments.items()):
            for batch in decode_log(segment.log):
                last_offset = batch.last_offset
                if batch.control:
                    continue
                hidden = any(pid == batch.producer_id and first <= batch.base_offset <= last
                             for pid, first, last in entries)  # fmt: skip
                for record in batch.records:
                    if record.offset < self.log.start:
                        continue
                    item = appended.get(record.offset)
                    assert item is not None and item.record == record, f"{record} was not appended"
                    is_right = hidden == item.aborted or is_rebuilt
                    assert is_right, f"offset {record.offset}: aborted: {item.aborted}, not visible: {hidden}"
                    found[record.offset] = record
        assert last_offset == self.log.end - 1, f"the log end offset is {last_offset + 1}, not {self.log.end}"
        for key, (record, _) in self.log.latest().items():
            assert record.offset in found, f"the latest record of {key!r} at offset {record.offset} is lost"


def _aborted(txn_index: bytes) -> list[tuple[int, int, int]]:
    """Return producer id, first and last offset of each entry (34 bytes) of a transaction index."""
    fields = [txn_index[at : at + 34] for at in range(0, len(txn_index), 34)]
    return [tuple(int.from_bytes(entry[at : at + 8], "big") for at in (2, 10, 18)) for entry in fields]


def _invoke(words: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    # This partition has no producer snapshots, and after a compaction they cannot be rebuilt from the log.
    refused = words[0] == "rebuild-index" and "producer snapshots missing" in result.output
    assert result.exit_code == 0 or refused, f"{' '.join(words)}: {result.output} {result.exception!r}"
