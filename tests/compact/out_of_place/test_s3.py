"""`compact --output-dir` into an object store: the command line, with an S3 server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keytail.compact.out_of_place.object_store import Store, StoreProblem, is_store, shown
from keytail.errors import UsageProblem
from tests.cli import forked
from tests.compact.out_of_place.s3_server import ACCESS_KEY, SECRET_KEY, S3Server, s3_server
from tests.compact.out_of_place.test_command import RECORD, ROOT_FILES
from tests.compact.test_command import CONFIG, keytail
from tests.log_dirs import random_records, snapshot, write_log_dir

NOW = ("--now", str(int(time.time() * 1000)), "--unsafe-clock")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as item:
        item.client().create_bucket(Bucket="backups")
        yield item


def place(server: S3Server, source: Path, out: str, scratch: Path, status: int = 0) -> tuple[dict[str, Any], str]:
    flags = ("--log-dirs", source, "--output-dir", out, "--scratch-dir", scratch, *CONFIG, *NOW)
    done = keytail("compact", *flags, "--execute", "--output", "json", **server.environment)
    assert done.returncode == status, done.stderr
    rows = json.loads(done.stdout or "[]")
    assert not list(scratch.iterdir()), "scratch files remain"
    for text in (done.stdout, done.stderr):
        assert ACCESS_KEY not in text and SECRET_KEY not in text and "endpoint_override" not in text
    return {f"{row['topic']}-{row['partition']}": row for row in rows}, done.stderr


def without_records(objects: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in objects.items() if not name.endswith(RECORD)}


@pytest.mark.long
def test_a_bucket_has_the_contents_of_a_target_directory(server: S3Server, tmp_path: Path) -> None:
    names = ("orders-0", "orders-1", "users-0")
    source = write_log_dir(tmp_path / "logs", {name: random_records(n, 400) for n, name in enumerate(names)})
    scratch, mounted = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    before = snapshot(source)
    done = forked.keytail("compact", "--log-dirs", source, "--output-dir", mounted, *CONFIG, *NOW, "--execute")
    assert done.returncode == 0, done.stderr
    wanted = {name: data for name, (data, _) in snapshot(mounted).items() if not name.endswith(RECORD)}

    out = server.uri("backups/brokers/7")
    rows, _ = place(server, source, out, scratch)
    assert {name: row["status"] for name, row in rows.items()} == {
        "orders-0": "compacted", "orders-1": "compacted", "users-0": "skipped"
    }  # fmt: skip
    first = server.objects("backups/brokers/7")
    assert without_records(first) == wanted
    assert snapshot(source) == before
    for name in names:
        record = first[f"{name}/{RECORD}"].decode()
        assert json.loads(record)["is_finished"]
        assert SECRET_KEY not in record and ACCESS_KEY not in record

    # Only changed objects are written, and objects of removed files are deleted.
    os.utime(source / "orders-1" / "leader-epoch-checkpoint")
    server.client().put_object(Bucket="backups", Key="brokers/7/orders-1/00000000000000000100.log", Body=b"")
    rows, errors = place(server, source, out, scratch, status=3)
    assert rows["orders-1"]["status"] == "refused", "another program has written to the target"
    assert "orders-1" in errors and not set(ROOT_FILES) & server.objects("backups/brokers/7").keys()
    server.client().delete_object(Bucket="backups", Key="brokers/7/orders-1/00000000000000000100.log")
    rows, _ = place(server, source, out, scratch)
    assert {name: row["status"] for name, row in rows.items()} == {
        "orders-0": "clean", "orders-1": "compacted", "users-0": "clean"
    }  # fmt: skip
    now = server.objects("backups/brokers/7")
    assert without_records(now) == wanted
    assert {name for name in now if now[name] != first[name]} == {f"orders-1/{RECORD}"}

    # A run that is killed during an upload leaves a record, so that the next run uploads everything again.
    record = json.loads(now[f"orders-0/{RECORD}"])
    unfinished = json.dumps(record | {"is_finished": False}).encode()
    client = server.client()
    client.put_object(Bucket="backups", Key=f"brokers/7/orders-0/{RECORD}", Body=unfinished)
    client.put_object(Bucket="backups", Key="brokers/7/orders-0/00000000000000000300.log", Body=b"half")
    client.put_object(Bucket="backups", Key="brokers/7/orders-0/00000000000000000200.log", Body=b"of before")
    rows, _ = place(server, source, server.uri_with_keys("backups/brokers/7"), scratch)
    assert {name: row["status"] for name, row in rows.items()} == {
        "orders-0": "compacted", "orders-1": "clean", "users-0": "clean"
    }  # fmt: skip
    assert without_records(server.objects("backups/brokers/7")) == wanted
    assert snapshot(source) == before | {
        name: facts for name, facts in snapshot(source).items() if name == "orders-1/leader-epoch-checkpoint"
    }


@pytest.mark.long
def test_an_unreachable_or_foreign_target_is_refused(server: S3Server, tmp_path: Path) -> None:
    source = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 200)})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    _, errors = place(server, source, server.uri_with_keys("nosuchbucket/here"), scratch, status=2)
    assert "the bucket nosuchbucket does not exist (s3://nosuchbucket/here)" in errors
    server.client().put_object(Bucket="backups", Key="other/orders-0/00000000000000000000.log", Body=b"somebody's")
    _, errors = place(server, source, server.uri("backups/other"), scratch, status=1)
    assert "has files that keytail did not write: orders-0" in errors
    assert server.objects("backups/other") == {"orders-0/00000000000000000000.log": b"somebody's"}


def test_no_secret_of_a_uri_is_printed() -> None:
    uri = "s3://key:secret@bucket/a/b?endpoint_override=host:1&token=hidden"
    assert shown(uri) == "s3://bucket/a/b"
    assert str(Store(uri, "orders-0")) == repr(Store(uri, "orders-0")) == "s3://bucket/a/b/orders-0"
    assert Store(uri).without_secrets(f"cannot parse {uri}, key, secret, hidden?") == (
        "cannot parse ..., ..., ..., hidden?"
    )
    with pytest.raises(UsageProblem) as reported:
        Store("nosuch://key:secret@bucket/a").connect()
    assert "secret" not in str(reported.value)
    assert [is_store(item) for item in (uri, "file:///a", "/a", "a:b")] == [True, False, False, False]


class Failing:
    """Has the operations of pyarrow's file systems that `put` and `delete` use; the first `failures` calls fail."""

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, 0

    def delete_file(self, path: str) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            raise OSError("AWS Error: slow down, secret")


@pytest.mark.parametrize("failures", [3, 4])
def test_failed_operations_are_retried(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import tenacity.nap

    from keytail.compact.out_of_place import object_store

    remote = Failing(failures)
    monkeypatch.setattr(object_store, "_connected", lambda uri: (remote, "bucket/a"))
    monkeypatch.setattr(tenacity.nap.time, "sleep", lambda seconds: None)
    store = Store("s3://key:secret@bucket/a")
    if failures < 4:
        store.delete("x")
    else:
        with pytest.raises(StoreProblem, match=r"store reported an error \(x\): AWS Error: slow down, \.\.\."):
            store.delete("x")
    assert remote.calls == 4
