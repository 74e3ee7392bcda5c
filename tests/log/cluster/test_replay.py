"""The state after metadata records, and the possible values of a config whose last records may be uncommitted."""

from __future__ import annotations

import pytest

from keytail.format.metadata import MetadataRecord, ResourceType, parse_record
from keytail.log.cluster.replay import Replay, Topic
from tests.reference import metadata as dull

KEPT = ("cleanup.policy", "retention.ms")
POLICY = "cleanup.policy"


def records(*values: bytes) -> list[MetadataRecord]:
    return [parse_record(value) for value in values]


def replayed(*settled: list[bytes], unsettled: list[list[bytes]] | None = None) -> Replay:
    replay = Replay(KEPT)
    for batch in settled:
        replay.batch(records(*batch), settled=True)
    for batch in unsettled or []:
        replay.batch(records(*batch), settled=False)
    return replay


def policy(value: str | None, topic: str = "t") -> bytes:
    return dull.topic_config(topic, POLICY, value)


def policies(replay: Replay, topic: str = "t") -> tuple[str | None, ...]:
    return replay.configs(ResourceType.TOPIC, topic).get(POLICY, ())


NEW = [dull.topic("t", 1), policy("compact"), dull.partition(1, 0, (1, 2))]


def test_a_topic_with_partitions_and_configs() -> None:
    replay = replayed([*NEW, dull.partition(1, 5, (3,))])
    (topic,) = replay.topics().values()
    assert topic.replicas == {0: (1, 2), 5: (3,)}
    assert replay.configs(ResourceType.TOPIC, "t") == {POLICY: ("compact",)}


def test_changed_replicas() -> None:
    replay = replayed(NEW, [dull.change(1, 0)], [dull.change(1, 0, (2, 7))], [dull.change(1, 0)])
    assert replay.topics()["t"].replicas == {0: (2, 7)}


def test_only_configs_asked_for_are_kept() -> None:
    replay = replayed([dull.config(4, "", "ssl.key.password", "secret"), dull.config(4, "", "retention.ms", "5")])
    assert replay.configs(ResourceType.BROKER, "") == {"retention.ms": ("5",)}
    assert "secret" not in repr(vars(replay))


def test_resources_do_not_mix() -> None:
    replay = replayed(
        [dull.config(4, "", POLICY, "a"), dull.config(4, "1", POLICY, "b"), dull.config(2, "1", POLICY, "c")],
        [dull.config(32, "1", POLICY, "d")],
    )
    of = replay.configs
    assert of(ResourceType.BROKER, "") == {POLICY: ("a",)}
    assert of(ResourceType.BROKER, "1") == {POLICY: ("b",)}
    assert of(ResourceType.TOPIC, "1") == {POLICY: ("c",)}


def test_a_config_that_was_taken_away() -> None:
    assert policies(replayed(NEW, [policy(None)])) == ()
    assert policies(replayed(NEW, [policy(None)], [policy(None)])) == ()
    assert policies(replayed(NEW, unsettled=[[policy(None)]])) == ("compact", None)


def test_a_removed_topic_takes_its_configs_along() -> None:
    replay = replayed(NEW, [dull.remove(1)])
    assert replay.topics() == {}
    assert policies(replay) == ()
    again = replayed(NEW, [dull.remove(1)], [dull.topic("t", 2)])
    assert again.topics() == {"t": Topic("EBAQEBAQEBAQEBAQEBAQAg", {})}
    assert policies(again) == ()


# Possible values


def test_a_settled_change_leaves_one_value() -> None:
    assert policies(replayed(NEW, [policy("delete")])) == ("delete",)


def test_a_recent_change_leaves_both_values_the_newest_last() -> None:
    assert policies(replayed(NEW, unsettled=[[policy("delete")]])) == ("compact", "delete")
    assert policies(replayed(NEW, unsettled=[[policy("a")], [policy("b")]])) == ("compact", "a", "b")


def test_a_value_that_was_replaced_within_its_batch_does_not_count() -> None:
    assert policies(replayed(NEW, unsettled=[[policy("a"), policy("b")]])) == ("compact", "b")
    assert policies(replayed(NEW, unsettled=[[policy("a"), policy("compact")]])) == ("compact",)


def test_setting_the_same_value_again_is_no_change() -> None:
    assert policies(replayed(NEW, unsettled=[[policy("compact")]])) == ("compact",)


def test_a_recent_topic_always_had_its_first_configs() -> None:
    assert policies(replayed(unsettled=[NEW])) == ("compact",)
    assert policies(replayed(unsettled=[[dull.BEGIN], NEW, [dull.END]])) == ("compact",)
    assert policies(replayed(unsettled=[NEW, [policy("delete")]])) == ("compact", "delete")


def test_values_of_a_topic_of_the_same_name_do_not_count() -> None:
    again = [dull.topic("t", 2), policy("delete")]
    assert policies(replayed(NEW, unsettled=[[policy("a")], [dull.remove(1)], again])) == ("delete",)
    assert policies(replayed(NEW, unsettled=[[policy("a"), dull.remove(1), *again]])) == ("delete",)


# Transactions


def test_a_transaction_counts_when_it_ends() -> None:
    replay = replayed([dull.BEGIN, *NEW])
    assert replay.topics() == {}
    assert replay.in_transaction
    replay.batch(records(policy("delete")), settled=True)
    assert replay.topics() == {}
    replay.batch(records(dull.END, dull.topic("u", 2)), settled=True)
    assert not replay.in_transaction
    assert replay.topics().keys() == {"t", "u"}
    assert policies(replay) == ("delete",)


def test_an_aborted_transaction_never_counts() -> None:
    replay = replayed(NEW, [dull.BEGIN, policy("a")], [policy("b"), dull.ABORT, dull.change(1, 0, (9,))])
    assert policies(replay) == ("compact",)
    assert replay.topics()["t"].replicas == {0: (9,)}
    assert policies(replayed(NEW, unsettled=[[dull.BEGIN, policy("a"), dull.ABORT]])) == ("compact",)


def test_records_before_a_transaction_in_its_batch_take_effect_at_once() -> None:
    assert replayed([*NEW, dull.BEGIN, dull.remove(1)]).topics().keys() == {"t"}


def test_an_unfinished_transaction_has_no_effect() -> None:
    assert policies(replayed(NEW, unsettled=[[dull.BEGIN], [policy("delete")]])) == ("compact",)


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        ([[dull.BEGIN], [dull.BEGIN]], "begins inside another"),
        ([[dull.END]], "ends without a beginning"),
        ([[dull.ABORT]], "ends without a beginning"),
        ([NEW, [dull.topic("t", 2)]], "topic t is created twice"),
        ([NEW, [dull.topic("u", 1)]], "topic u is created twice"),
        ([[dull.partition(7, 0)]], "does not exist"),
        ([[dull.remove(7)]], "does not exist"),
        ([[dull.change(7, 0, (1,))]], "does not exist"),
        ([NEW, [dull.change(1, 1, (1,))]], "changes partition 1"),
        ([NEW, [dull.remove(1)], [dull.change(1, 0)]], "does not exist"),
    ],
)
def test_contradictions(batches: list[list[bytes]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replayed(*batches)


# Records of newer, unknown versions


def newer(data: bytes, extra: bytes = b"\1\2\3") -> bytes:
    """Return the record with version 9, and a field after the known ones."""
    return data[:2] + b"\x09" + data[3:] + extra


OTHER = [dull.topic("u", 2), dull.topic_config("u", POLICY, "compact"), dull.partition(2, 0)]
WHY = "a record of type {} has version 9, which this release does not support"


@pytest.mark.parametrize(
    ("record_type", "record"),
    [
        (2, dull.topic("new", 3)),
        (3, dull.partition(1, 1, (4,))),
        (4, policy("delete")),
        (5, dull.change(1, 0, (9,))),
        (9, dull.remove(1)),
    ],
)
def test_a_newer_record_makes_only_its_own_topic_uncertain(record_type: int, record: bytes) -> None:
    replay = replayed(NEW, OTHER, [newer(record)], [dull.change(2, 0, (8,))])
    name = "new" if record_type == 2 else "t"
    assert replay.newer(ResourceType.TOPIC) == {name: WHY.format(record_type)}
    assert replay.newer(ResourceType.BROKER) == {}
    assert replay.topics()["u"].replicas == {0: (8,)}
    assert policies(replay, "u") == ("compact",)
    assert ("t" in replay.topics()) == (record_type != 9)


def test_a_topic_that_is_created_again_is_certain() -> None:
    assert replayed(NEW, [newer(dull.remove(1))], [dull.topic("t", 2)]).newer(ResourceType.TOPIC) == {}


def test_newer_settings_in_front_of_the_record_that_creates_their_topic_count() -> None:
    created = [newer(policy("compact")), dull.topic("t", 1), dull.partition(1, 0)]
    assert replayed(created).newer(ResourceType.TOPIC) == {"t": WHY.format(4)}
    assert replayed([dull.BEGIN], created[:1], [*created[1:], dull.END]).newer(ResourceType.TOPIC).keys() == {"t"}


def test_newer_settings_of_brokers_are_named() -> None:
    replay = replayed(NEW, [newer(dull.config(4, "", "retention.ms", "5"))], [newer(dull.config(4, "1", POLICY, "a"))])
    assert replay.newer(ResourceType.BROKER) == {"": WHY.format(4), "1": WHY.format(4)}
    assert replay.newer(ResourceType.TOPIC) == {}
    assert replay.configs(ResourceType.BROKER, "") == {}


def test_a_newer_record_of_an_aborted_transaction_is_ignored() -> None:
    replay = replayed(NEW, [newer(dull.BEGIN), newer(policy("delete")), newer(dull.ABORT)])
    assert replay.newer(ResourceType.TOPIC) == {}
    assert not replay.in_transaction


def test_types_that_are_not_kafkas_are_named() -> None:
    replay = replayed(NEW, [dull.frame(20, 0, b""), dull.frame(999, 0, b"\x00")], [dull.frame(77, 3, b"")])
    assert replay.unknown_types() == (77, 999)
    assert replayed(NEW, [dull.BEGIN, dull.frame(999, 0, b""), dull.ABORT]).unknown_types() == ()


def test_levels_of_features() -> None:
    level = dull.frame(12, 0, dull.text("metadata.version") + b"\x00\x1d")
    assert replayed(NEW, [level]).features() == {"metadata.version": 29}
