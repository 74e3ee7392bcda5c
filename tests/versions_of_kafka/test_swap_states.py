"""Brokers of several versions load each state in the table of lib/keytail/log/SWAP.md.

A broker starts once for all rows: each row is a partition of a separate topic. Loaders before 3.0 work in the order in
which the directory is listed, which depends on the order of creation. Therefore there are several partitions for each
row, with files created in random orders.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.chance import chance
from tests.crash.partitions import INTERVAL_BYTES, PARTITION, log_of
from tests.interop.broker_client import BrokerClient
from tests.interop.broker_story import complaints
from tests.log.replacement.test_swap_states import OUT, ROWS, SOURCES, Dir, Logs, Row
from tests.reference.indexing import index_files
from tests.versions_of_kafka import VERSIONS
from tests.versions_of_kafka.broker import broker_of

pytestmark = [pytest.mark.interop]

VARIANTS = 3
FATAL = 23  # from 3.0 on, a broker does not start
ZEROED_INDEX = {20: 0, 35: 7}  # by row, the log whose index a broker from 3.0 on fills with zeros
TRUNCATED_SWAP = 24
_OTHERS = "2.8.2 and 4.3.1"
# logged for a log whose indexes a loader before 3.0 has deleted
REBUILDS = "recovering segment and rebuilding index files..."


def _is_before_3(version: str) -> bool:
    return int(version.partition(".")[0]) < 3


def _wanted(number: int, version: str) -> Logs:
    row = ROWS[number]
    if _is_before_3(version):
        return row.of_before_3(is_2_4=version.startswith("2.4."))
    if number == TRUNCATED_SWAP:  # no source is deleted, because the index points at the truncated batch
        return {**{base: log_of(offsets) for base, offsets in SOURCES.items()}, 0: log_of(OUT)[:-1]}
    assert isinstance(row.broker, dict)
    return row.broker


def _fill(target: Path, source: Path) -> None:
    """Replace the log files of a new partition with those of `source`, created in random order, with their hard links.
    """
    for path in target.iterdir():
        if path.name[0].isdecimal():
            path.unlink()
    paths = sorted(source.iterdir())
    chance().shuffle(paths)
    first_names: dict[int, Path] = {}
    for path in paths:
        inode = path.stat().st_ino
        if inode in first_names:
            (target / path.name).hardlink_to(first_names[inode])
        else:
            first_names[inode] = shutil.copy2(path, target / path.name)


def _build(root: Path, row: Row) -> Path:
    d = Dir(root, row)
    row.build(d)
    return root / PARTITION


def _check(number: int, version: str, path: Path) -> None:
    found = {int(file.name[:20]): file.read_bytes() for file in path.glob("*.log")}
    assert found == _wanted(number, version)
    left = [name for name in os.listdir(path) if name.endswith((".swap", ".cleaned"))]
    assert sorted(left) == (sorted(ROWS[number].left_names) if _is_before_3(version) else [])
    for base, log in found.items():
        if number == TRUNCATED_SWAP and not _is_before_3(version) and base == 0:
            continue  # the output's index is that of the log before the truncation
        index = (path / f"{base:020d}.index").read_bytes()
        if base == ZEROED_INDEX.get(number) and not _is_before_3(version):
            assert set(index) == {0}
        else:
            assert index == index_files(log, base, INTERVAL_BYTES)[0]


def _wait_until_there(paths: list[Path]) -> None:
    give_up = time.monotonic() + 300
    while not all(path.exists() for path in paths):
        assert time.monotonic() < give_up, "the broker did not create the partitions"
        time.sleep(0.05)


# The loader changed in 3.0; CI runs one version of each.
ONE_OF_EACH_LOADER = [
    v if v in ("2.8.2", "4.3.1") else pytest.param(v, marks=pytest.mark.soak(_OTHERS)) for v in VERSIONS
]


@pytest.mark.one_of()
@pytest.mark.parametrize("version", ONE_OF_EACH_LOADER, indirect=True)
def test_brokers_load_each_state_as_documented(version: str, tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    numbers = [number for number in ROWS if number != FATAL or _is_before_3(version)]
    topics = {f"row-{number}-{variant}": number for number in numbers for variant in range(VARIANTS)}
    # With a delay of 0, the thread that deletes logs first waits 30 s for a log to delete. If a broker of 2.8.2 is
    # stopped within these 30 s, its shutdown waits a day (LogManager.deleteLogs, KafkaScheduler.shutdown).
    properties = {"log.segment.delete.delay.ms": "1", "log.index.interval.bytes": str(INTERVAL_BYTES)}
    broker = broker_of(version, log_dir, tmp_path / "work", properties=properties)
    with broker, BrokerClient() as client:
        client.connect(broker)
        for topic in topics:
            client.create_topic(topic, 1, {"cleanup.policy": "compact"})
        _wait_until_there([log_dir / f"{topic}-0" / f"{0:020d}.log" for topic in topics])
        broker.stop()
        for topic, number in topics.items():
            _fill(log_dir / f"{topic}-0", _build(tmp_path / "rows" / topic, ROWS[number]))
        broker.start()
        broker.stop()
        errors = [
            line for line in complaints(broker.log_lines()) if line.level != "WARN" and not line.text.endswith(REBUILDS)
        ]
        for topic, number in topics.items():
            try:
                _check(number, version, log_dir / f"{topic}-0")
            except AssertionError as error:
                raise AssertionError(f"row {number}, {topic}, of {version}: {error}") from error
        assert not errors
        if not _is_before_3(version):
            (log_dir / "row-1-0-0" / "foo.swap").touch()
            with pytest.raises(RuntimeError, match="ended with status 1 at start"):
                broker.start()
            assert '"foo"' in broker.log_file.read_text()  # the message of a NumberFormatException contains the name
