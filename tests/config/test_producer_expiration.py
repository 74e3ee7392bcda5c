"""When brokers forget producers: it is certain, or never: no producer is taken for expired that a broker may know."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.cli.cluster import Cluster
from keytail.cli.configuration import read_configuration
from keytail.config.broker_version import parse_broker_version
from keytail.config.kafka_version import METADATA_VERSION
from keytail.config.message_format import ClusterMode
from keytail.config.producer_expiration import NEVER_MS, PRODUCER, TRANSACTION, producer_expiration
from keytail.config.resolve import broker_options, effective, from_broker, from_command_line
from keytail.log.cluster.metadata import ClusterMetadata
from tests.chance import draws

DAY_MS = 86_400_000
LEVEL_3_3, LEVEL_3_4, LEVEL_4_3 = 7, 8, 30
FILE = from_broker({PRODUCER: "5", TRANSACTION: "9"}, "server.properties")


@pytest.mark.parametrize(
    ("mode", "level", "version", "broker", "arguments", "expiration_ms"),
    [
        ("KRaft", LEVEL_4_3, None, {}, (), DAY_MS),  # the broker's file was read, and does not set it
        ("KRaft", LEVEL_4_3, None, FILE, (), 5),
        ("KRaft", LEVEL_3_4, None, FILE, (), 5),
        ("KRaft", LEVEL_3_3, None, FILE, (), 9),  # a broker of 3.3 has only the other setting
        ("KRaft", LEVEL_3_3, "3.3", FILE, (), 9),
        ("KRaft", LEVEL_4_3, None, None, (), NEVER_MS),  # the broker's file may set it
        ("KRaft", None, None, FILE, (), NEVER_MS),  # a dynamic setting may override the file
        ("KRaft", None, None, None, (f"{PRODUCER}=7",), 7),
        ("ZooKeeper", None, None, FILE, (), NEVER_MS),  # a dynamic setting in ZooKeeper may override the file
        ("ZooKeeper", None, "3.6", FILE, (), NEVER_MS),
        ("ZooKeeper", None, "3.6", None, (f"{PRODUCER}=7",), 7),
        ("ZooKeeper", None, "3.3", FILE, (), 9),  # only the other setting, which is not dynamic
        ("ZooKeeper", None, "2.8", None, (), NEVER_MS),
        ("ZooKeeper", None, "2.8", None, (f"{TRANSACTION}=7",), 7),
        ("ZooKeeper", None, None, None, (f"{PRODUCER}=7",), NEVER_MS),  # the broker may be of 2.8
        ("ZooKeeper", None, None, None, (f"{PRODUCER}=7", f"{TRANSACTION}=11"), 11),
        ("ZooKeeper", None, None, FILE, (f"{PRODUCER}=7",), 9),
        ("unknown", None, None, None, (), NEVER_MS),
    ],
)
def test_the_expiration_is_known_only_if_nothing_unread_can_set_another_value(
    mode: ClusterMode, level: int | None, version: str | None, broker, arguments: tuple[str, ...], expiration_ms: int
) -> None:
    resolved = effective("t", command_line=from_command_line(arguments), broker=broker)
    stated = parse_broker_version(version) if version else None
    found = producer_expiration(resolved, stated, mode, level)
    assert found.ms == expiration_ms
    assert (found.uncertain is None) == (expiration_ms < NEVER_MS)


@settings(max_examples=draws(400), deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_broker_keeps_a_producer_longer_than_the_known_expiration(rng: random.Random) -> None:
    """The law: whichever version runs and whatever its settings are, it has forgotten every producer that is taken for
    expired. If everything is known, the expiration is the broker's.
    """
    mode: ClusterMode = rng.choice(["KRaft", "ZooKeeper"])
    minor = rng.choice([3, 4, 9])
    has_setting = minor >= 4
    of_file = {name: str(rng.choice([1, 50, 10**9])) for name in (PRODUCER, TRANSACTION) if rng.random() < 0.5}
    dynamic = str(rng.choice([1, 50, 2 * 10**9])) if has_setting and rng.random() < 0.5 else None
    actual_ms = int(of_file.get(TRANSACTION, 7 * DAY_MS))
    if has_setting:
        actual_ms = int(dynamic or of_file.get(PRODUCER, DAY_MS))

    reads_file, has_version = rng.random() < 0.7, rng.random() < 0.3
    reads_dynamic = mode == "KRaft" and rng.random() < 0.7
    level = rng.randint(0, {3: LEVEL_3_3, 4: LEVEL_3_4, 9: 21}[minor]) if reads_dynamic else None
    resolved = effective(
        "t",
        dynamic=[broker_options({PRODUCER: (dynamic,)}, "log")] if reads_dynamic and dynamic else (),
        broker=from_broker(of_file, "file") if reads_file else None,
    )
    version = parse_broker_version(f"3.{minor}") if has_version else None
    found = producer_expiration(resolved, version, mode, level)
    assert found.ms >= actual_ms
    if reads_file and (has_version or (level or 0) >= LEVEL_3_4) and (reads_dynamic or not has_setting):
        assert found.ms == actual_ms


def test_a_compaction_retains_all_producers_if_the_expiration_is_unknown(tmp_path: Path) -> None:
    config = tmp_path / "server.properties"
    config.write_text(f"{PRODUCER}=7\n")
    metadata = ClusterMetadata("m", {}, {}, {}, {}, 0, 0, features={METADATA_VERSION: LEVEL_4_3})
    for file, arguments, read, expiration_ms in (
        (None, (), None, NEVER_MS),
        (None, (), metadata, NEVER_MS),
        (str(config), (), None, NEVER_MS),
        (str(config), (), metadata, 7),
        (None, (f"{PRODUCER}=8",), None, 8),
    ):
        configuration = replace(read_configuration(file, arguments, True), cluster=Cluster(1, read, mode="KRaft"))
        assert configuration.for_compaction("t")[1].producer_id_expiration_ms == expiration_ms
        assert (configuration.producer_expiration("t").uncertain is None) == (expiration_ms < NEVER_MS)
