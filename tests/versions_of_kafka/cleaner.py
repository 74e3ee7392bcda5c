"""Compares keytail with the cleaner classes of Kafka 2.4 to 3.9 on random logs of tests/interop, in one JVM per
version.

Logs are written, and results read, by the classes of 4.3.1. The rounds are run by the class of the version, at a fixed
clock, so that delete horizons are equal to the millisecond.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from keytail.format.batch import DELETE_HORIZON
from tests.compact.test_keep_magic import contents
from tests.interop.broker import tool
from tests.interop.kafka import Cleanable, Cleaned, Kafka, broker_class_path, compiled, compiling, slots_for
from tests.interop.rounds import Again, Case, Circumstances, Difference, Mode, Outcome
from tests.reference.batches import Batch, Rec
from tests.reference.legacy import decode_any_log

HERE = Path(__file__).parent
HARNESS = HERE.parent / "interop" / "java" / "keytail" / "harness"
EMPTIED = "emptied batches that only keytail keeps"
# In 4.x, the names of internal settings differ.
OLD_NAMES = {"internal.segment.bytes": "segment.bytes"}


class OldCleaner(Kafka):
    """The harness of an older version. Only `clean_from` is available; the other inherited commands are not."""

    def __init__(self, version: str) -> None:
        super().__init__()
        self.version = version
        path = broker_class_path(version)
        with compiling():
            classes = compiled([HERE / "cleaner_java" / "CleanOnce.java", HARNESS / "FixedClock.java"], path)
        flags = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
        class_path = os.pathsep.join([path, str(classes)])
        self._command = [tool("java"), *flags, quiet, "-cp", class_path, "keytail.harness.CleanOnce"]

    def clean_from(self, partition: Path, choice: Cleanable, *, map_max_entries: int | None, **options: Any) -> Cleaned:
        """Run one round over the range of `choice`, and remove `.deleted` files."""
        configs = {OLD_NAMES.get(name, name): value for name, value in options.pop("configs").items()}
        if "segment.bytes" in configs:  # Kafka requires at least 14; every batch is larger
            configs["segment.bytes"] = max(14, int(configs["segment.bytes"]))
        request = {
            "dir": str(partition),
            "command": "clean",
            **self._options(configs=configs, **options),
            "first_dirty_offset": choice.first_dirty_offset,
            "first_uncleanable_offset": choice.first_uncleanable_offset,
            "map_slots": 4096 if map_max_entries is None else slots_for(map_max_entries),
        }
        answer = self.request(request)
        chosen = {item.name: getattr(choice, item.name) for item in fields(Cleanable)}
        known = {item.name for item in fields(Cleaned)}
        return Cleaned(**chosen, cleaned=True, **{name: answer[name] for name in known & answer.keys() - chosen.keys()})


Rule = Literal["equal", "may keep the last", "keeps longer"]


class CaseOfVersion(Case):
    """A random log whose rounds are compared with those of an older cleaner, batch by batch.

    With the rule "equal", all batches and their headers must be equal. With "may keep the last", keytail may also have
    an emptied batch at the end of the range (CLEANING.md 6.1b). With "keeps longer", all records with values must be
    equal, and keytail may have more tombstones, markers and emptied batches.
    """

    keeps_magic = True

    def __init__(
        self,
        cleaner: OldCleaner,
        kafka: Kafka,
        home: Path,
        seen: Counter[str],
        mode: Mode = "each",
        again: Again | None = None,
        *,
        rule: Rule = "equal",
    ) -> None:
        super().__init__(kafka, home, seen, mode, again)
        self._cleaner = cleaner
        self._rule = rule

    def _kafka_round(self, now: Circumstances) -> Cleaned:
        partition, opening = self.kafka / "t-0", self._opening(now)
        choice = self.harness.cleanable(partition, checkpoint=now.checkpoint, **opening)
        if not choice.cleanable_bytes:
            return Cleaned(**{item.name: getattr(choice, item.name) for item in fields(Cleanable)}, cleaned=False)
        return self._cleaner.clean_from(partition, choice, map_max_entries=now.map_max_entries, **opening)

    def _compare(self, theirs: Cleaned, outcome: Outcome, now: Circumstances) -> None:
        self._check_selection(theirs, outcome, now)
        if theirs.cleaned:
            self._count_removed(theirs.end_offset)
        if self._rule == "keeps longer":
            self._keeps_longer()
            return
        expected, found = _contents(self.kafka), _contents(self.ours)
        if self._rule == "may keep the last":
            found = self._without_last(found, expected, theirs.first_uncleanable_offset - 1)
        if found != expected:
            pairs = zip(expected, found, strict=False)
            number = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
            pair = expected[number : number + 1], found[number : number + 1]
            raise Difference(
                f"batch {number} of {len(expected)} and {len(found)}: Kafka's {pair[0]}, keytail's {pair[1]}"
            )

    def _without_last(self, found: list[Any], expected: list[Any], last_offset: int) -> list[Any]:
        """Return `found` without an emptied batch at the end of the range, unless `expected` has it, too."""
        for number, batch in enumerate(found):
            if isinstance(batch, dict) and batch["last_offset"] == last_offset and not batch["records"]:
                if batch in expected:
                    return found
                self.seen[EMPTIED] += 1
                return found[:number] + found[number + 1 :]
        return found

    def _keeps_longer(self) -> None:
        (expected, their_markers), (found, our_markers) = _records(self.kafka), _records(self.ours)
        missing = (expected - found) | (their_markers - our_markers)
        if missing:
            raise Difference(f"records that only Kafka retains: {sorted(missing, key=lambda record: record.offset)}")
        more = found - expected
        if any(record.value is not None for record in more):
            raise Difference(f"records with values that only keytail retains: {more}")
        self.seen["tombstones that only keytail keeps"] += len(more)
        self.seen["markers that only keytail keeps"] += len(our_markers - their_markers)

    def _count_removed(self, end_offset: int) -> None:
        """Count the tombstones and markers that the older cleaner removed although they were not superseded or
        aborted, and the delete horizons that it kept or dropped.
        """
        (source, markers), (left, markers_left) = _records(self.source), _records(self.kafka)
        keys = {record.key for record in left}
        plain = [record for batch in _batches(self.source) if not batch.transactional for record in batch.records]
        newest = {record.key: record for record in sorted(source, key=lambda record: record.offset)}
        removed = [record for record in plain if newest[record.key] == record and record.key not in keys]
        self.seen["newest tombstones removed"] += len(removed)
        self.seen["markers removed"] += len(markers - markers_left)
        with_horizon = {batch.base_offset for batch in _batches(self.source) if batch.attributes & DELETE_HORIZON}
        for batch in _batches(self.kafka):
            if batch.base_offset in with_horizon and batch.last_offset < end_offset and batch.records:
                is_kept = batch.attributes & DELETE_HORIZON
                self.seen["horizons kept" if is_kept else "horizons dropped by a rewrite"] += 1

    def _check_served(self, now: Circumstances) -> None:
        theirs, own = self.loaded(self.kafka, now), self.loaded(self.ours, now)
        if own.repaired or own.fetch_mismatches:
            raise Difference(f"Kafka repaired keytail's result: {own.repaired}, or misread it: {own.fetch_mismatches}")
        names = ["log_start_offset", "log_end_offset", "last_stable_offset", "producers"]
        if self._rule != "keeps longer":
            names += ["committed", "records", "aborted"]
        for name in names:
            if getattr(own, name) != getattr(theirs, name):
                raise Difference(f"{name} differ: Kafka's {getattr(theirs, name)}, keytail's {getattr(own, name)}")
        self._count_batches(theirs)


def _logs(log_dir: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((log_dir / "t-0").glob("*.log"))]


def _contents(log_dir: Path) -> list[Any]:
    """Return each batch with its header, decompressed; for a message of magic 0 or 1, all fields."""
    return [item for log in _logs(log_dir) for item in contents(log)]


def _batches(log_dir: Path) -> list[Batch]:
    return [batch for log in _logs(log_dir) for batch in decode_any_log(log)]


def _records(log_dir: Path) -> tuple[set[Rec], set[Rec]]:
    """Return the data records and the marker records."""
    data, markers = set(), set()
    for batch in _batches(log_dir):
        (markers if batch.control else data).update(batch.records)
    return data, markers
