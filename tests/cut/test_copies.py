"""States of copies that a cut must detect: cleaned or changing logs, other clusters, epochs and metadata."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keytail.cut import driver
from tests.chance import chance
from tests.command_line import Run
from tests.cut import cluster as c
from tests.cut.test_command import contents, copies_of, cut, flags, simple
from tests.reference import metadata as model
from tests.reference.batches import Rec, decode_log, encode_batch


def refused(run: Run, copies: list[Path], output: Path, slug: str) -> str:
    """Run the cut; it must end with this slug, and no broker may be able to start on what it leaves."""
    result = run(*flags(copies, output), "--output", "json", "--execute")
    text = result.stdout + result.stderr
    assert result.exit_code == 1, text
    assert f"[{slug}]" in text
    assert not list(output.rglob("meta.properties"))
    return text


def set_metadata(copies: list[Path], *records: bytes, leader_change: tuple[int, ...] = ()) -> None:
    for path in copies:
        shutil.rmtree(path / "__cluster_metadata-0")
        c.write_metadata(path / "__cluster_metadata-0", *records, voters=leader_change)


@pytest.fixture
def before_writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Return a function that makes the command call another one when it has read everything and written nothing."""

    def use(action: Callable[[], object]) -> None:
        decide = driver.decide

        def decide_later(*arguments: Any) -> Any:
            action()
            return decide(*arguments)

        monkeypatch.setattr(driver, "decide", decide_later)

    return use


# Compaction


def cleaned_copies(path: Path, *cleaned: int) -> tuple[c.Cluster, list[Path]]:
    """Copy a cluster in which group `g` committed 1, 2 and 3; `cleaned` is the number of batches that the cleaner of
    each broker has compacted. The second broker lacks the last one."""
    cluster = c.Cluster(chance())
    cluster.append(("a", 0), count=3)
    for committed in (1, 2, 3):
        cluster.commit(("a", 0), committed)
    counts = cluster.counts()
    copies = []
    for broker, count in zip(c.BROKERS, cleaned, strict=True):
        has = counts | {c.GROUPS: counts[c.GROUPS] - (broker == 2)}
        copies.append(c.write_copy(path / f"copy{broker}", cluster, broker, has, cleaned={c.GROUPS: count}))
    return cluster, copies


def test_a_cut_below_cleaned_offsets_is_written_from_the_replica_with_most_batches(run: Run, tmp_path: Path) -> None:
    cluster, copies = cleaned_copies(tmp_path, 3, 0, 3)
    status, rows = cut(run, copies, tmp_path / "out", "--execute")
    row = rows["__consumer_offsets-0"]
    assert (status, row["cut_offset"]) == (0, 2)
    expected = b"".join(item.data for item in cluster.logs[c.GROUPS].items[:2])
    for broker in c.BROKERS:
        assert contents(tmp_path / "out" / f"node-{broker}" / f"copy{broker}" / "__consumer_offsets-0") == expected
    assert any("written from the log of copy2" in note for note in row["notes"])
    assert not any("lost" in note for note in row["notes"])


def test_records_that_only_cut_ones_replace_are_reported_as_lost(run: Run, tmp_path: Path) -> None:
    _, copies = cleaned_copies(tmp_path, 3, 0, 3)
    status, _ = cut(run, copies[:2], tmp_path / "out")
    assert status == 1, "broker 3 is in sync"
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    _, copies = cleaned_copies(tmp_path, 3, 0, 3)
    second = copies[1] / "__consumer_offsets-0" / f"{0:020d}.log"
    second.write_bytes(second.read_bytes()[-len(second.read_bytes()) // 2 :])  # cleaned, too: only offset 1
    (copies[1] / "cleaner-offset-checkpoint").write_text("0\n1\n__consumer_offsets 0 3\n")
    status, rows = cut(run, copies, tmp_path / "out")
    assert status == 0
    assert any("lost" in note for note in rows["__consumer_offsets-0"]["notes"]), "a dry run says it, too"


def test_records_that_retention_deleted_from_one_replica_are_written_from_another(run: Run, tmp_path: Path) -> None:
    """If not, the replica that begins at the cut could become the leader, and the others would delete theirs."""
    cluster = c.Cluster(chance())
    for _ in range(c.SEGMENT_BATCHES + 2):
        cluster.append(("a", 0), count=1)
    copies = copies_of(tmp_path, cluster, {}, {("a", 0): 4})
    (copies[0] / "a-0" / f"{0:020d}.log").unlink()
    status, rows = cut(run, copies, tmp_path / "out", "--execute")
    assert (status, rows["a-0"]["cut_offset"]) == (0, 5)
    for broker in c.BROKERS:
        kept = decode_log(contents(tmp_path / "out" / f"node-{broker}" / f"copy{broker}" / "a-0"))
        assert [batch.base_offset for batch in kept] == [0, 1, 2, 3, 4]


@pytest.mark.long
def test_no_committed_offset_is_above_a_log_end(run: Run, tmp_path: Path) -> None:
    """Whatever the moments of the copies, and however far each replica was compacted."""
    rng, lowered, number = chance(), 0, 0
    while number < 6 or not lowered:
        cluster, home, copies = c.Cluster(rng), tmp_path / str(number), []
        every = [cluster.counts(), *(cluster.counts() for _ in cluster.run(rng.randint(2, 6)))]
        moment = rng.randrange(len(every) // 2, len(every))
        for broker in c.BROKERS:
            has = every[min(max(moment + rng.randint(-6, 6), 0), len(every) - 1)]
            cleaned = {c.GROUPS: rng.randint(0, has[c.GROUPS])}
            copies.append(c.write_copy(home / f"copy{broker}", cluster, broker, has, cleaned=cleaned))
        status, rows = cut(run, copies, home / "out", "--execute", "--complete-before", "0")
        assert status == 0, rows
        ends = {key: rows[f"{key[0]}-{key[1]}"]["cut_offset"] for key in c.KEYS}
        for broker in c.BROKERS:
            partition = home / "out" / f"node-{broker}" / f"copy{broker}" / "__consumer_offsets-0"
            kept = {batch.base_offset for batch in decode_log(contents(partition))}
            latest: dict[tuple[str, c.Key], int | None] = {}
            for at, item in enumerate(cluster.logs[c.GROUPS].items):  # one record each
                if item.commits is not None and at in kept and item.transaction not in cluster.aborted:
                    group, key, offset = item.commits
                    latest[group, key] = offset
            for (_, key), offset in latest.items():
                assert offset is None or offset <= ends[key]
            for row in rows.values():
                key = (row["topic"], row["partition"])
                after = {one["group"]: one["after"] for one in row["groups"]}
                assert {group: offset for (group, of), offset in latest.items() if of == key} == {
                    group: offset for group, offset in after.items() if offset is not None or (group, key) in latest
                }
        lowered += ends[c.GROUPS] < cluster.logs[c.GROUPS].end_offset
        number += 1
        assert number < 50, "the draws need no cut"


# Sources that change


def long_copies(path: Path) -> list[Path]:
    cluster = c.Cluster(chance())
    for _ in range(c.SEGMENT_BATCHES + 2):
        cluster.append(("a", 0), count=1)
    return copies_of(path, cluster)


def test_bytes_of_an_older_segment_that_change_are_noticed(
    run: Run, tmp_path: Path, before_writing: Callable[[Callable[[], object]], None]
) -> None:
    copies = long_copies(tmp_path)
    log = copies[1] / "a-0" / f"{0:020d}.log"

    def damage() -> None:
        stat, data = log.stat(), bytearray(log.read_bytes())
        data[len(data) // 2] ^= 1
        log.write_bytes(data)
        os.utime(log, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    before_writing(damage)
    refused(run, copies, tmp_path / "out", "source-changed")


def test_a_log_that_grows_is_noticed(
    run: Run, tmp_path: Path, before_writing: Callable[[Callable[[], object]], None]
) -> None:
    copies = long_copies(tmp_path)
    log = sorted((copies[0] / "a-0").glob("*.log"))[-1]
    end = decode_log(log.read_bytes())[-1].last_offset + 1
    before_writing(lambda: log.write_bytes(log.read_bytes() + encode_batch([Rec(end, c.NOW, b"k", b"v")])))
    refused(run, copies, tmp_path / "out", "segment-changed")


def test_a_metadata_log_that_grows_is_noticed(
    run: Run, tmp_path: Path, before_writing: Callable[[Callable[[], object]], None]
) -> None:
    copies = long_copies(tmp_path)
    log = copies[2] / "__cluster_metadata-0" / f"{0:020d}.log"  # the newest
    end = decode_log(log.read_bytes())[-1].last_offset + 1
    before_writing(lambda: log.write_bytes(log.read_bytes() + encode_batch([Rec(end, c.NOW, None, model.NO_OP)])))
    refused(run, copies, tmp_path / "out", "metadata-copy-differs")


def test_an_interrupted_replacement_is_refused_with_what_finishes_it(run: Run, tmp_path: Path) -> None:
    copies = copies_of(tmp_path, simple())
    log = copies[0] / "a-0" / f"{0:020d}.log"
    shutil.copyfile(log, f"{log}.swap")
    assert "rebuild-index --execute" in refused(run, copies, tmp_path / "out", "unfinished-replacement")


# Metadata


def test_copies_of_two_clusters_are_refused(run: Run, tmp_path: Path) -> None:
    copies = copies_of(tmp_path, simple())
    properties = copies[1] / "meta.properties"
    properties.write_text(properties.read_text().replace("cluster.id=", "cluster.id=b3"))
    refused(run, copies, tmp_path / "out", "different-cluster-ids")


@pytest.mark.parametrize("where", ["log", "quorum-state"])
@pytest.mark.parametrize("voters", [(1, 2, 3), (1, 3, 9), (1, 8, 9)])
def test_most_voters_must_be_given(run: Run, tmp_path: Path, where: str, voters: tuple[int, ...]) -> None:
    copies = copies_of(tmp_path, simple())
    if where == "log":
        set_metadata(copies, leader_change=voters)
    else:
        state = {"currentVoters": [{"voterId": voter} for voter in voters], "data_version": 0}
        (copies[1] / "__cluster_metadata-0" / "quorum-state").write_text(json.dumps(state))
    if 8 in voters:
        assert "these are not given: 8, 9" in refused(run, copies, tmp_path / "out", "voters-not-given")
        return
    result = run(*flags(copies, tmp_path / "out"))
    assert result.exit_code == 0
    assert ("voter 9 of the metadata quorum is not given" in " ".join(result.stderr.split())) == (9 in voters)


@pytest.mark.parametrize("is_known", [False, True])
def test_records_of_a_leader_epoch_that_the_metadata_lacks_are_cut(run: Run, tmp_path: Path, is_known: bool) -> None:
    """The next leader would append with an epoch below theirs."""
    cluster = c.Cluster(chance())
    cluster.append(("a", 0), count=2)
    cluster.logs["a", 0].add([Rec(2, c.NOW, b"k", b"v")], leader_epoch=1)
    copies = copies_of(tmp_path, cluster)
    if is_known:
        set_metadata(copies, model.change(c.TOPICS["a"], 0, leader=2))
    status, rows = cut(run, copies, tmp_path / "out", "--execute")
    row = rows["a-0"]
    assert (status, row["cut_offset"]) == (0, 3 if is_known else 2)
    assert ("leader epoch 1" in row["reason"]) != is_known


def test_a_partition_that_moves_to_another_log_dir_is_written_from_the_present_one(run: Run, tmp_path: Path) -> None:
    copies = copies_of(tmp_path, simple())
    for kind in ("future", "delete"):
        shutil.copytree(copies[0] / "a-0", copies[0] / f"a-0.{'0' * 32}-{kind}")
    result = run(*flags(copies, tmp_path / "out"), "--execute")
    assert result.exit_code == 0, result.stdout + result.stderr
    assert " ".join(result.stderr.split()).count("according to the metadata log it is not a replica") == 2
    written = tmp_path / "out" / "node-1" / "copy1"
    assert contents(written / "a-0") == contents(copies[0] / "a-0")
    assert not list(written.glob("a-0.*"))


@pytest.mark.parametrize(("eligible", "cut_offset"), [(None, 0), ((3,), 3)])
def test_without_in_sync_replicas_the_eligible_ones_or_all_limit_the_cut(
    run: Run, tmp_path: Path, eligible: tuple[int, ...] | None, cut_offset: int
) -> None:
    """All brokers were stopped, the second one before the last record."""
    copies = copies_of(tmp_path, simple(), {}, {("a", 1): 1})
    set_metadata(copies, model.change(c.TOPICS["a"], 1, in_sync=(), eligible=eligible))
    status, rows = cut(run, copies, tmp_path / "out")
    assert (status, rows["a-1"]["cut_offset"]) == (0, cut_offset)
    assert any("no replica is in sync" in note for note in rows["a-1"]["notes"]) == (eligible is None)


# Coordinators


def test_share_groups_are_named_as_not_compared(run: Run, tmp_path: Path) -> None:
    copies = copies_of(tmp_path, simple())
    topic = "__share_group_state"
    set_metadata(copies, model.topic(topic, 9), model.partition(9, 0, c.BROKERS))
    for path in copies:
        shutil.copytree(path / "a-1", path / f"{topic}-0")
        (path / f"{topic}-0" / "partition.metadata").unlink()
    status, rows = cut(run, copies, tmp_path / "out")
    assert status == 0
    noted = [name for name, row in rows.items() if any("share groups" in note for note in row["notes"])]
    assert noted == [f"{topic}-0"]


def test_a_state_of_a_newer_version_is_refused(run: Run, tmp_path: Path) -> None:
    cluster = simple()
    log = cluster.logs[c.STATES]
    record = c.state_record(log.end_offset, 7, 0, 1, c.NOW, ())
    assert record.value is not None
    log.add([Rec(record.offset, record.timestamp, record.key, b"\0\2" + record.value[2:])])
    text = refused(run, copies_of(tmp_path, cluster), tmp_path / "out", "invalid-coordinator-record")
    assert "version 2" in text
