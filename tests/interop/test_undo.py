"""Undo of a compaction, checked by Kafka: its loader opens every state of an undo, and a real broker serves the
previous records, even if a broker appended between the compaction and the undo.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from keytail.log.fs import LOCAL
from keytail.main.main import app
from tests import golden
from tests.chance import SEED
from tests.crash.compactions import find
from tests.crash.driver import Counts, Failed, State, for_every_stop
from tests.crash.test_undo import IN_PASSES, SHAPES, SOAK, undo_all
from tests.interop.broker import Broker
from tests.interop.broker_client import from_wire
from tests.interop.broker_story import complaints, repairs, start_client
from tests.interop.conftest import fast_dir, kafka  # noqa: F401
from tests.interop.kafka import Kafka
from tests.interop.test_crash_compaction import is_new, open_with_kafka
from tests.no_spark import without_spark

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("name", SHAPES if SOAK else [IN_PASSES])
def test_kafka_loads_every_state_of_a_stopped_undo_without_loss(
    name: str,
    kafka: Kafka,  # noqa: F811
    fast_dir: Path,  # noqa: F811
) -> None:
    log_dir, opened = SHAPES[name], set[str]()

    def make(root: Path) -> None:
        log_dir.make(root / "logs")
        assert log_dir.run(LOCAL, root / "logs") == Failed(())

    def check(state: State) -> None:
        logs = state.root / "logs"
        for log in log_dir.logs:
            if is_new(logs / log.name, opened):
                open_with_kafka(kafka, log_dir, log, logs / log.name, find(log_dir, logs).logs[log.name])

    for_every_stop(
        make, undo_all, check, work_dir=fast_dir / "stops", counts=Counts(), partial_cuts=int(SOAK), seed=SEED
    )
    assert len(opened) > 10


def keytail(*arguments: str | Path) -> str:
    """Run a command that must succeed, and return its standard error."""
    with without_spark():
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stderr


def files(log_dir: Path) -> dict[str, tuple[Any, ...]]:
    """Return the files of closed segments, with times; a broker changes those of active ones."""
    found = {}
    for partition in log_dir.iterdir():
        logs = sorted(partition.glob("*.log")) if partition.is_dir() else []
        for path in partition.glob("*.*") if logs and partition.name != "__cluster_metadata-0" else ():
            if path.name[:20].isdigit() and path.name[:20] < logs[-1].stem and path.suffix != ".snapshot":
                found[f"{partition.name}/{path.name}"] = (path.read_bytes(), path.stat().st_mtime_ns)
    return found


@pytest.mark.one_of("a broker starts after expire, salvage or undo")
def test_after_undo_a_broker_serves_the_previous_and_the_later_records(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("broker")
    log_dir, kept = golden.unpack(root), root / "kept"
    before = files(log_dir)
    given = ("--log-dirs", log_dir, "--config", root / "server.properties", *golden.topic_config_arguments())
    reported = keytail("compact", *given, "--keep-originals", kept, "--execute")
    [run_id] = re.findall(r"backup of run (\w+) is", reported)
    compacted = files(log_dir)
    assert len({name for name in before if before[name] != compacted.get(name)}) > 30
    broker = Broker(log_dir, root / "work")
    with start_client() as client:
        with broker:
            client.connect(broker)
            served = client.consume(golden.partitions())
            appended = client.produce("p", "none", 0, [(1_700_000_000_000, b"k", b"since")])
        keytail("undo", "--originals", kept, "--run", run_id, "--execute")
        assert files(log_dir) == before
        first_run = len(broker.log_lines())
        with broker:
            client.connect(broker)
            offsets = client.offsets(golden.partitions())
            again = client.consume(golden.partitions())
    everything = sorted((from_wire(row) for row in golden.record_rows()), key=lambda record: record[:3])
    assert len(served) < len(everything)
    since = [record for record in again if (record.topic, record.partition, record.offset) == ("none", 0, appended[0])]
    assert [record.value for record in since] == [b"since"]
    assert [record for record in again if record not in since] == everything
    assert offsets["none-0"][1] == appended[0] + 1
    lines = broker.log_lines()[first_run:] or broker.log_lines()
    assert not complaints(lines)
    assert not repairs(lines)
    shutil.rmtree(kept)
