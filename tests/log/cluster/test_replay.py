"""The state after metadata records, and the possible values of a config whose last records may be uncommitted."""

from __future__ import annotations

import pytest

from keytail.format.metadata import MetadataRecord, ResourceType, parse_record
from keytail.log.cluster.replay import Replay, Topic
from tests.reference import metadata as model

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
    return model.topic_config(topic, POLICY, value)


def policies(replay: Replay, topic: str = "t") -> tuple[str | None, ...]:
    return replay.configs(ResourceType.TOPIC, topic).get(POLICY, ())


NEW = [model.topic("t", 1), policy("compact"), model.partition(1, 0, (1, 2))]


def test_a_topic_with_partitions_and_configs_is_replayed() -> None:
    replay = replayed([*NEW, model.partition(1, 5, (3,))])
    (topic,) = replay.topics().values()
    assert topic.replicas == {0: (1, 2), 5: (3,)}
    assert replay.configs(ResourceType.TOPIC, "t") == {POLICY: ("compact",)}


def test_changes_of_replicas_are_replayed() -> None:
    replay = replayed(NEW, [model.change(1, 0)], [model.change(1, 0, (2, 7))], [model.change(1, 0)])
    assert replay.topics()["t"].replicas == {0: (2, 7)}


def test_replicas_before_a_change_that_may_be_uncommitted_remain_possible() -> None:
    changes = [[model.change(1, 0, (2,))], [model.change(1, 0, (7,))], [model.change(1, 0, in_sync=(7,))]]
    topic = replayed(NEW, unsettled=changes).topics()["t"]
    assert (topic.replicas, topic.possible_replicas) == ({0: (7,)}, {0: (7, 2, 1)})
    assert replayed(NEW, *changes).topics()["t"].possible_replicas == {0: (7,)}


def test_leader_epochs_are_counted() -> None:
    replay = replayed(NEW, [model.change(1, 0, in_sync=(2,))], [model.change(1, 0, leader=2)])
    assert replay.topics()["t"].leader_epochs == {0: 1}
    replay = replayed(NEW, [model.change(1, 0, leader=2)], unsettled=[[model.change(1, 0, leader=-1)]])
    assert replay.topics()["t"].leader_epochs == {0: 2}


def test_eligible_leaders_are_replayed() -> None:
    replay = replayed(NEW, [model.change(1, 0, in_sync=(), eligible=(2,))], [model.change(1, 0, leader=2)])
    assert replay.topics()["t"].eligible == {0: (2,)}
    assert replayed(NEW).topics()["t"].eligible == {0: ()}


def test_replicas_in_sync_are_replayed() -> None:
    replay = replayed(NEW, [model.change(1, 0, in_sync=(2,))], [model.change(1, 0, (2, 7))])
    assert replay.topics()["t"].in_sync == {0: (2,)}
    replay = replayed(NEW, [model.change(1, 0, in_sync=(2,))], [model.change(1, 0, in_sync=(1, 2))])
    assert replay.topics()["t"].in_sync == {0: (1, 2)}


def test_a_replica_is_in_sync_only_if_it_is_before_and_after_a_change_that_may_be_uncommitted() -> None:
    lost, back = model.change(1, 0, in_sync=(2,)), model.change(1, 0, in_sync=(1, 2))
    assert replayed(NEW, unsettled=[[lost]]).topics()["t"].in_sync == {0: (2,)}
    assert replayed(NEW, unsettled=[[lost], [back]]).topics()["t"].in_sync == {0: (2,)}
    assert replayed(NEW, [lost], unsettled=[[back]]).topics()["t"].in_sync == {0: (2,)}
    assert replayed(NEW, [lost], [back], unsettled=[[back]]).topics()["t"].in_sync == {0: (1, 2)}


def test_only_requested_configs_are_kept() -> None:
    replay = replayed([model.config(4, "", "ssl.key.password", "secret"), model.config(4, "", "retention.ms", "5")])
    assert replay.configs(ResourceType.BROKER, "") == {"retention.ms": ("5",)}
    assert "secret" not in repr(vars(replay))


def test_configs_of_different_resources_are_separate() -> None:
    replay = replayed(
        [model.config(4, "", POLICY, "a"), model.config(4, "1", POLICY, "b"), model.config(2, "1", POLICY, "c")],
        [model.config(32, "1", POLICY, "d")],
    )
    of = replay.configs
    assert of(ResourceType.BROKER, "") == {POLICY: ("a",)}
    assert of(ResourceType.BROKER, "1") == {POLICY: ("b",)}
    assert of(ResourceType.TOPIC, "1") == {POLICY: ("c",)}


def test_a_removed_config_has_no_value() -> None:
    assert policies(replayed(NEW, [policy(None)])) == ()
    assert policies(replayed(NEW, [policy(None)], [policy(None)])) == ()
    assert policies(replayed(NEW, unsettled=[[policy(None)]])) == ("compact", None)


def test_the_configs_of_a_removed_topic_are_removed() -> None:
    replay = replayed(NEW, [model.remove(1)])
    assert replay.topics() == {}
    assert policies(replay) == ()
    again = replayed(NEW, [model.remove(1)], [model.topic("t", 2)])
    assert again.topics() == {"t": Topic("EBAQEBAQEBAQEBAQEBAQAg", {})}
    assert policies(again) == ()


# Possible values


def test_a_committed_change_has_one_possible_value() -> None:
    assert policies(replayed(NEW, [policy("delete")])) == ("delete",)


def test_a_recent_change_has_both_possible_values_with_the_newest_last() -> None:
    assert policies(replayed(NEW, unsettled=[[policy("delete")]])) == ("compact", "delete")
    assert policies(replayed(NEW, unsettled=[[policy("a")], [policy("b")]])) == ("compact", "a", "b")


def test_a_value_that_was_replaced_within_its_batch_is_ignored() -> None:
    assert policies(replayed(NEW, unsettled=[[policy("a"), policy("b")]])) == ("compact", "b")
    assert policies(replayed(NEW, unsettled=[[policy("a"), policy("compact")]])) == ("compact",)


def test_setting_the_same_value_again_is_no_change() -> None:
    assert policies(replayed(NEW, unsettled=[[policy("compact")]])) == ("compact",)


def test_the_first_configs_of_a_recent_topic_have_no_earlier_value() -> None:
    assert policies(replayed(unsettled=[NEW])) == ("compact",)
    assert policies(replayed(unsettled=[[model.BEGIN], NEW, [model.END]])) == ("compact",)
    assert policies(replayed(unsettled=[NEW, [policy("delete")]])) == ("compact", "delete")


def test_values_of_a_deleted_topic_of_the_same_name_are_ignored() -> None:
    again = [model.topic("t", 2), policy("delete")]
    assert policies(replayed(NEW, unsettled=[[policy("a")], [model.remove(1)], again])) == ("delete",)
    assert policies(replayed(NEW, unsettled=[[policy("a"), model.remove(1), *again]])) == ("delete",)


# Transactions


def test_a_transaction_takes_effect_when_it_ends() -> None:
    replay = replayed([model.BEGIN, *NEW])
    assert replay.topics() == {}
    assert replay.in_transaction
    replay.batch(records(policy("delete")), settled=True)
    assert replay.topics() == {}
    replay.batch(records(model.END, model.topic("u", 2)), settled=True)
    assert not replay.in_transaction
    assert replay.topics().keys() == {"t", "u"}
    assert policies(replay) == ("delete",)


def test_an_aborted_transaction_has_no_effect() -> None:
    replay = replayed(NEW, [model.BEGIN, policy("a")], [policy("b"), model.ABORT, model.change(1, 0, (9,))])
    assert policies(replay) == ("compact",)
    assert replay.topics()["t"].replicas == {0: (9,)}
    assert policies(replayed(NEW, unsettled=[[model.BEGIN, policy("a"), model.ABORT]])) == ("compact",)


def test_records_before_a_transaction_in_its_batch_take_effect_at_once() -> None:
    assert replayed([*NEW, model.BEGIN, model.remove(1)]).topics().keys() == {"t"}


def test_an_unfinished_transaction_has_no_effect() -> None:
    assert policies(replayed(NEW, unsettled=[[model.BEGIN], [policy("delete")]])) == ("compact",)


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        ([[model.BEGIN], [model.BEGIN]], "begins inside another"),
        ([[model.END]], "ends without a beginning"),
        ([[model.ABORT]], "ends without a beginning"),
        ([NEW, [model.topic("t", 2)]], "topic t is created twice"),
        ([NEW, [model.topic("u", 1)]], "topic u is created twice"),
        ([[model.partition(7, 0)]], "does not exist"),
        ([[model.remove(7)]], "does not exist"),
        ([[model.change(7, 0, (1,))]], "does not exist"),
        ([NEW, [model.change(1, 1, (1,))]], "changes partition 1"),
        ([NEW, [model.remove(1)], [model.change(1, 0)]], "does not exist"),
    ],
)
def test_contradicting_records_are_refused(batches: list[list[bytes]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replayed(*batches)


# Records of newer, unknown versions


def newer(data: bytes, extra: bytes = b"\1\2\3") -> bytes:
    """Return the record with version 9, and an additional field after the known ones."""
    return data[:2] + b"\x09" + data[3:] + extra


OTHER = [model.topic("u", 2), model.topic_config("u", POLICY, "compact"), model.partition(2, 0)]
WHY = "a record of type {} has version 9, which this release does not support"


@pytest.mark.parametrize(
    ("record_type", "record"),
    [
        (2, model.topic("new", 3)),
        (3, model.partition(1, 1, (4,))),
        (4, policy("delete")),
        (5, model.change(1, 0, (9,))),
        (9, model.remove(1)),
    ],
)
def test_a_newer_record_makes_only_its_own_topic_uncertain(record_type: int, record: bytes) -> None:
    replay = replayed(NEW, OTHER, [newer(record)], [model.change(2, 0, (8,))])
    name = "new" if record_type == 2 else "t"
    assert replay.newer(ResourceType.TOPIC) == {name: WHY.format(record_type)}
    assert replay.newer(ResourceType.BROKER) == {}
    assert replay.topics()["u"].replicas == {0: (8,)}
    assert policies(replay, "u") == ("compact",)
    assert ("t" in replay.topics()) == (record_type != 9)


def test_a_topic_that_is_created_again_is_certain() -> None:
    assert replayed(NEW, [newer(model.remove(1))], [model.topic("t", 2)]).newer(ResourceType.TOPIC) == {}


def test_newer_settings_before_the_record_that_creates_their_topic_are_used() -> None:
    created = [newer(policy("compact")), model.topic("t", 1), model.partition(1, 0)]
    assert replayed(created).newer(ResourceType.TOPIC) == {"t": WHY.format(4)}
    assert replayed([model.BEGIN], created[:1], [*created[1:], model.END]).newer(ResourceType.TOPIC).keys() == {"t"}


def test_newer_settings_of_brokers_are_reported() -> None:
    replay = replayed(
        NEW, [newer(model.config(4, "", "retention.ms", "5"))], [newer(model.config(4, "1", POLICY, "a"))]
    )
    assert replay.newer(ResourceType.BROKER) == {"": WHY.format(4), "1": WHY.format(4)}
    assert replay.newer(ResourceType.TOPIC) == {}
    assert replay.configs(ResourceType.BROKER, "") == {}


def test_a_newer_record_of_an_aborted_transaction_is_ignored() -> None:
    replay = replayed(NEW, [newer(model.BEGIN), newer(policy("delete")), newer(model.ABORT)])
    assert replay.newer(ResourceType.TOPIC) == {}
    assert not replay.in_transaction


def test_unknown_record_types_are_reported() -> None:
    replay = replayed(NEW, [model.frame(20, 0, b""), model.frame(999, 0, b"\x00")], [model.frame(77, 3, b"")])
    assert replay.unknown_types() == (77, 999)
    assert replayed(NEW, [model.BEGIN, model.frame(999, 0, b""), model.ABORT]).unknown_types() == ()


def test_levels_of_features_are_replayed() -> None:
    level = model.frame(12, 0, model.text("metadata.version") + b"\x00\x1d")
    assert replayed(NEW, [level]).features() == {"metadata.version": 29}
