"""`keytail cut` on copies of generated clusters: the output is consistent, and the source is unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.chance import chance
from tests.command_line import Run, rows_of
from tests.cut import cluster as c
from tests.log_dirs import snapshot
from tests.reference import metadata as model
from tests.reference.batches import Rec, encode_batch


def flags(copies: list[Path], output: Path) -> list[str]:
    given = [part for path in copies for part in ("--replica", f"{path.name}={path}")]
    return ["cut", *given, "--output-dir", str(output)]


def cut(run: Run, copies: list[Path], output: Path, *more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = run(*flags(copies, output), "--output", "json", *more)
    return result.exit_code, rows_of(result) if result.stdout else {}


def simple() -> c.Cluster:
    """Return a cluster in which transaction 0 of producer 1000 wrote to `a-0` and `b-0` and committed an offset."""
    cluster = c.Cluster(chance())
    keys = (("a", 0), ("b", 0), c.GROUPS)
    cluster.append(("a", 1), count=3)
    cluster.append(("a", 0), count=2)
    cluster.state(1000, 0, 1, keys)
    cluster.append(("a", 0), (1000, 0), count=2)
    cluster.append(("b", 0), (1000, 0), count=1)
    cluster.commit(("a", 1), 3, "of-1000", (1000, 0))
    cluster.state(1000, 0, 2, keys)
    for key in keys:
        cluster.logs[key].marker((1000, 0), 1, commit=True)
    cluster.state(1000, 0, 4)
    cluster.commit(("a", 0), 5)
    return cluster


def copies_of(path: Path, cluster: c.Cluster, *fewer: dict[c.Key, int], torn: bytes = b"") -> list[Path]:
    """Copy the three brokers; `fewer` has, for each of them, how many batches its logs lack."""
    counts = cluster.counts()
    made = []
    for broker, lack in zip(c.BROKERS, [*fewer, {}, {}, {}], strict=False):
        has = {key: counts[key] - lack.get(key, 0) for key in c.KEYS}
        made.append(c.write_copy(path / f"copy{broker}", cluster, broker, has, torn=torn, metadata=broker))
    return made


def contents(path: Path) -> bytes:
    return b"".join(log.read_bytes() for log in sorted(path.glob("*.log")))


def test_equal_copies_are_written_whole(run: Run, tmp_path: Path) -> None:
    cluster = simple()
    copies, output = copies_of(tmp_path, cluster), tmp_path / "out"
    before = [snapshot(path) for path in copies]
    status, rows = cut(run, copies, output)
    assert (status, {row["status"] for row in rows.values()}) == (0, {"whole"})
    assert not output.exists()
    assert rows["a-0"]["groups"] == [{"group": "g", "before": 5, "after": 5}]
    assert rows["a-1"]["groups"] == [{"group": "of-1000", "before": 3, "after": 3}]
    status, rows = cut(run, copies, output, "--execute")
    assert (status, {row["status"] for row in rows.values()}) == (0, {"whole"})
    assert [snapshot(path) for path in copies] == before, "the source was changed"
    for broker in c.BROKERS:
        log_dir = output / f"node-{broker}" / f"copy{broker}"
        for key in c.KEYS:
            if broker in c.replicas_of(key):
                expected = b"".join(item.data for item in cluster.logs[key].items)
                assert contents(log_dir / f"{key[0]}-{key[1]}") == expected
        assert (log_dir / "meta.properties").read_text().startswith(f"version=1\nnode.id={broker}\n")
        assert json.loads((log_dir / ".kafka_cleanshutdown").read_text()) == {"version": 0, "brokerEpoch": 40 + broker}
        metadata = log_dir / "__cluster_metadata-0"
        newest = copies[2] / "__cluster_metadata-0" / f"{0:020d}.log"
        assert (metadata / newest.name).read_bytes() == newest.read_bytes(), "the log with most records is the newest"
        assert (metadata / "quorum-state").read_text() == f'{{"votedId":{broker}}}'
        ends = (log_dir / "replication-offset-checkpoint").read_text().splitlines()
        assert f"a 0 {cluster.logs['a', 0].end_offset}" in ends
        assert ends == (log_dir / "recovery-point-offset-checkpoint").read_text().splitlines()


def test_a_missing_marker_cuts_the_transaction_everywhere(run: Run, tmp_path: Path) -> None:
    cluster = simple()
    copies, output = copies_of(tmp_path, cluster, {}, {("b", 0): 1}), tmp_path / "out"
    status, rows = cut(run, copies, output, "--execute")
    assert status == 0
    assert {name: row["cut_offset"] for name, row in rows.items()} == {
        "a-0": 2, "a-1": 3, "b-0": 0, "__consumer_offsets-0": 0, "__transaction_state-0": 1,
    }  # fmt: skip
    assert (rows["a-0"]["status"], rows["a-1"]["status"]) == ("cut", "whole")
    assert (rows["a-0"]["records_cut"], rows["a-0"]["transactions_cut"]) == (2, 1)
    assert rows["a-0"]["reason"] == "the transaction of producer 1000, epoch 0 is not complete in all partitions"
    assert rows["a-0"]["groups"] == [{"group": "g", "before": 5, "after": None}]
    assert rows["a-1"]["groups"] == [{"group": "of-1000", "before": 3, "after": None}]
    assert [item["new_log_end_offset"] for item in rows["a-0"]["replicas"]] == [2, 2, 2]


def test_a_torn_end_is_left_out(run: Run, tmp_path: Path) -> None:
    cluster = simple()
    torn = cluster.logs["a", 0].items[0].data[:50]
    copies = copies_of(tmp_path, cluster, torn=torn)
    status, rows = cut(run, copies, tmp_path / "out", "--execute")
    assert (status, {row["status"] for row in rows.values()}) == (0, {"whole"})
    assert "torn after offset 4" in rows["a-0"]["replicas"][0]["torn"]


def test_replicas_that_are_not_in_sync_limit_nothing(run: Run, tmp_path: Path) -> None:
    cluster = simple()
    copies = copies_of(tmp_path, cluster, {}, {("b", 0): 1, ("a", 0): 2})
    for path in copies:
        shutil.rmtree(path / "__cluster_metadata-0")
        changes = [model.change(c.TOPICS[topic], 0, in_sync=(1,)) for topic in ("a", "b")]
        c.write_metadata(path / "__cluster_metadata-0", *changes)
    status, rows = cut(run, copies, tmp_path / "out", "--execute")
    assert (status, {row["status"] for row in rows.values()}) == (0, {"whole"})
    assert [item["new_log_end_offset"] for item in rows["a-0"]["replicas"]] == [5, 2, 5]
    assert [item["in_sync"] for item in rows["a-0"]["replicas"]] == [True, False, False]


def test_the_output_passes_verify_and_audit(run: Run, tmp_path: Path) -> None:
    cluster = c.Cluster(chance())
    for _ in cluster.run(6):
        pass
    copies = copies_of(tmp_path, cluster, {("a", 0): 2}, {("a", 1): 3, c.GROUPS: 4}, {c.STATES: 2}, torn=b"torn")
    status, _ = cut(run, copies, tmp_path / "out", "--execute")
    assert status == 0
    written = [tmp_path / "out" / f"node-{n}" / f"copy{n}" for n in c.BROKERS]
    for log_dir in written:
        found = run("verify", "--log-dirs", log_dir)
        assert found.exit_code == 0, found.stdout
    replicas = [part for path in written for part in ("--replica", f"{path.name}={path}")]
    found = run("audit", *replicas, "--output", "json")
    assert {row["status"] for row in rows_of(found).values()} <= {"alike", "skipped"}, found.stdout
    again, rows = cut(run, written, tmp_path / "again")
    assert (again, {row["status"] for row in rows.values()}) == (0, {"whole"}), "the result of a cut is consistent"


def copied_at_moments(path: Path, cluster: c.Cluster, transactions: int) -> list[Path]:
    """Run the cluster and copy each broker at another moment; its replicas may lack the last batch of a log."""
    every = [cluster.counts(), *(cluster.counts() for _ in cluster.run(transactions))]
    moment, made = cluster.rng.randrange(len(every) // 2, len(every)), []
    for broker in c.BROKERS:
        counts = every[min(max(moment + cluster.rng.randint(-4, 4), 0), len(every) - 1)]
        has = {key: max(0, count - (cluster.rng.random() < 0.2)) for key, count in counts.items()}
        c.write_copy(path / f"copy{broker}", cluster, broker, has, torn=b"torn" * cluster.rng.randint(0, 2))
        made.append(path / f"copy{broker}")
    return made


@pytest.mark.long
def test_copies_at_different_moments_become_consistent(run: Run, tmp_path: Path) -> None:
    rng, cut_ones = chance(), 0
    for number in range(8):
        cluster, home = c.Cluster(rng), tmp_path / str(number)
        copies = copied_at_moments(home, cluster, rng.randint(1, 6))
        # Without the flag, the partitions of a producer that the copies of the states do not have yet are unknown.
        status, rows = cut(run, copies, home / "out", "--execute", "--complete-before", "0")
        assert status == 0
        cut_ones += sum(row["status"] == "cut" for row in rows.values())
        check_consistent(cluster, kept_items(cluster, home / "out"))
    assert cut_ones, "the draws need no cut"


def kept_items(cluster: c.Cluster, output: Path) -> dict[c.Key, list[c.Item]]:
    """Return the batches in the output; all replicas of a partition must have the same."""
    kept = {}
    for key, log in cluster.logs.items():
        name = f"{key[0]}-{key[1]}"
        found = {contents(output / f"node-{n}" / f"copy{n}" / name) for n in c.replicas_of(key)}
        assert len(found) == 1, "replicas differ"
        left, items = found.pop(), []
        for item in log.items:
            if left:
                assert left.startswith(item.data)
                left = left[len(item.data) :]
                items.append(item)
        kept[key] = items
        assert not left
    return kept


def check_consistent(cluster: c.Cluster, kept: dict[c.Key, list[c.Item]]) -> None:
    below = {item.transaction for items in kept.values() for item in items if item.transaction}
    above = {
        item.transaction
        for key, log in cluster.logs.items()
        for item in log.items[len(kept[key]) :]
        if item.transaction
    }
    assert not below & above, "a transaction is divided"
    latest: dict[tuple[str, c.Key], int | None] = {}
    for item in kept[c.GROUPS]:
        if item.commits is not None and item.transaction not in cluster.aborted:
            group, key, offset = item.commits
            latest[group, key] = offset
    for (_, key), offset in latest.items():
        assert offset is None or offset <= (kept[key][-1].end_offset if kept[key] else 0)


def test_transactions_of_one_epoch_are_refused_if_they_have_to_be_cut(run: Run, tmp_path: Path) -> None:
    cluster = c.Cluster(chance(), version=1)
    for number in range(3):
        cluster.state(1000, number, 1, (("a", 0), ("a", 1)))
        for key in (("a", 0), ("a", 1)):
            cluster.append(key, (1000, number), count=1)
        cluster.state(1000, number, 2, (("a", 0), ("a", 1)))
        for key in (("a", 0), ("a", 1)):
            cluster.logs[key].marker((1000, number), 0, commit=True)
        cluster.state(1000, number, 4)
    status, rows = cut(run, copies_of(tmp_path, cluster), tmp_path / "out")
    assert (status, {row["status"] for row in rows.values()}) == (0, {"whole"})
    for path in tmp_path.glob("copy*"):
        shutil.rmtree(path)
    result = run(*flags(copies_of(tmp_path, cluster, {("a", 0): 1}), tmp_path / "out"), "--execute")
    assert result.exit_code == 1
    assert "[transactions-not-distinguished]" in result.stdout + result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["broker", "directory", "topic-id", "setting", "bytes", "no-metadata", "not-empty"])
def test_states_that_cannot_be_cut_are_refused(run: Run, tmp_path: Path, case: str) -> None:
    cluster = simple()
    copies, output = copies_of(tmp_path, cluster), tmp_path / "out"
    expected = {
        "broker": "in-sync-replica-not-given", "directory": "in-sync-replica-absent", "topic-id": "topic-id-differs",
        "setting": "invalid-config-value", "bytes": "replicas-differ", "no-metadata": "no-metadata-log",
        "not-empty": "directory-not-empty",
    }[case]  # fmt: skip
    if case == "broker":
        copies.pop()
    elif case == "directory":
        shutil.rmtree(copies[0] / "a-1")
    elif case == "topic-id":
        (copies[0] / "a-1" / "partition.metadata").write_text(f"version: 0\ntopic_id: {c.topic_id('b')}")
    elif case == "setting":
        shutil.rmtree(copies[2] / "__cluster_metadata-0")  # the newest, which is used
        invalid = model.topic_config("a", "index.interval.bytes", "4k")
        c.write_metadata(copies[2] / "__cluster_metadata-0", invalid, records=3)
    elif case == "bytes":
        made = encode_batch([Rec(n, c.NOW + n, b"k%d" % n, b"else") for n in range(3)])
        (copies[0] / "a-1" / f"{0:020d}.log").write_bytes(made)
    elif case == "no-metadata":
        for path in copies:
            shutil.rmtree(path / "__cluster_metadata-0")
    else:
        output.mkdir()
        (output / "file").write_text("")
    result = run(*flags(copies, output), "--output", "json", "--execute")
    assert result.exit_code == (2 if case == "not-empty" else 1)
    assert f"[{expected}]" in result.stdout + result.stderr
    assert case == "not-empty" or not output.exists()
