"""A real broker on a log dir whose indexes were deleted and rebuilt: it recovers nothing, and answers as before."""

from __future__ import annotations

import random

import pytest

from tests import golden
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient
from tests.interop.broker_story import complaints, keytail, repairs, start_client

pytestmark = pytest.mark.interop

INDEXES = (".index", ".timeindex", ".txnindex")


def answers(client: BrokerClient) -> dict[str, object]:
    """Return for each partition: all records, the committed ones, the first offsets of fetches, and offsets for times.
    """
    rng = random.Random(1)
    everything = golden.partitions()
    found: dict[str, object] = {"offsets": client.offsets(everything), "served": client.consume(everything)}
    found["committed"] = client.consume(everything, isolation="read_committed")
    times = sorted({record.timestamp_ms for record in client.consume(everything)})
    for topic, number in everything:
        start, end = client.offsets([(topic, number)])[f"{topic}-{number}"]
        asked = [rng.randint(start, end) for _ in range(20)]
        found[f"first from, {topic}-{number}"] = client.first_from(topic, number, asked)
        asked = [rng.choice(times) + rng.randint(-3, 3) for _ in range(20)]
        found[f"for times, {topic}-{number}"] = client.offsets_for_times(topic, number, asked)
    return found


@pytest.mark.one_of("a broker starts after another command")
def test_a_broker_starts_on_rebuilt_indexes_without_recovery_and_serves_by_offset_and_time(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("broker")  # a path without words that occur in messages about repairs
    log_dir = golden.unpack(root)
    broker = Broker(log_dir, root / "work")
    with start_client() as client:
        with broker:
            client.connect(broker)
            before = answers(client)
        lost = 0
        for topic, number in golden.partitions():
            for path in (log_dir / f"{topic}-{number}").iterdir():
                if path.suffix in INDEXES:
                    path.unlink()
                    lost += path.suffix != ".txnindex"
        rows = keytail("rebuild-index", "--log-dirs", log_dir, "--config", golden.PROPERTIES, "--execute")
        assert {row["status"] for row in rows} == {"rebuilt"}
        assert sum(row["files_wrong"] for row in rows) > lost, "transaction indexes must also be counted"
        with broker:
            client.connect(broker)
            after = answers(client)
        lines = broker.log_lines()
    assert not complaints(lines)
    assert not repairs(lines)
    assert after == before
