"""Which URIs of tables are accepted, which jars and settings a session gets for them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keytail.errors import KeytailError, UsageProblem
from keytail.ledger.of_run import LedgerFlags
from keytail.log.fs import LOCAL
from keytail.run.spark import delta, s3_commits, stores
from keytail.run.spark.stores import (
    checked_uri,
    connector_for,
    hadoop_version,
    is_remote,
    local_path,
    require_store,
)


def test_only_paths_and_file_uris_are_on_this_host() -> None:
    assert local_path("/srv/a") == local_path("file:///srv/a") == local_path("file:/srv/a") == "/srv/a"
    for uri in ("s3a://b/k", "gs://b/k", "abfss://c@a.dfs.core.windows.net/k", "hdfs://nn:8020/k", "hdfs:/k"):
        assert is_remote(uri) and local_path(uri) is None


@pytest.mark.parametrize(
    ("uri", "slug"),
    [
        ("s3a://AKIA:hunter2@bucket/x", "credentials-in-uri"),
        ("s3a://AKIA:se/hunter2@bucket/x", "credentials-in-uri"),
        ("s3a://AKIA@bucket/x", "credentials-in-uri"),
        ("abfss://c:hunter2@account/x", "credentials-in-uri"),
        ("hdfs://user:hunter2@host/x", "credentials-in-uri"),
        ("hdfs://user:se/hunter2@host/x", "credentials-in-uri"),
        ("hdfs://user:12/hunter2@host/x", "credentials-in-uri"),
        ("s3a://AK/IA:hunter2@bucket/x", "credentials-in-uri"),
        ("abfss://c:se/hunter2@account/x", "credentials-in-uri"),
        ("s3://bucket/x", "unsupported-uri"),
        ("s3a://bucket/x?secret=hunter2", "unsupported-uri"),
    ],
)
def test_unsuitable_uris_are_refused_without_printing_a_secret(uri: str, slug: str) -> None:
    with pytest.raises(UsageProblem) as refused:
        LedgerFlags(uri).checked(LOCAL, [])
    assert refused.value.slug == slug
    assert "hunter2" not in str(refused.value)


def test_other_uris_are_accepted() -> None:
    containers = ("abfss://c@account.dfs.core.windows.net/x", "abfss://c@account.dfs.core.windows.net:443/x@y")
    for uri in ("s3a://bucket/a@b", "hdfs://host/a@b", "hdfs://host:8020/a", "gs://b/x", *containers):
        assert checked_uri(f"{uri}/", "--to") == uri


def test_s3_needs_the_connector_of_sparks_hadoop_and_parts_of_its_sdk() -> None:
    settings = delta.session_settings(None, place="s3a://bucket/lake")
    packages = settings["spark.jars.packages"].split(",")
    assert f"org.apache.hadoop:hadoop-aws:{hadoop_version()}" in packages
    assert {name.split(":")[1] for name in packages if "awssdk" in name} == {"s3", "s3-transfer-manager", "sts"}
    assert "software.amazon.awssdk:bundle" in settings["spark.jars.excludes"]
    assert settings["spark.hadoop.fs.s3a.input.stream.type"] == "classic"
    assert delta.session_settings(None, place="/lake") == delta.session_settings(None)


def test_another_hadoop_gets_the_dependencies_of_its_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "hadoop_version", lambda: "3.4.2")
    connector = connector_for("s3a://bucket")
    assert (connector.packages, connector.excludes) == (("org.apache.hadoop:hadoop-aws:3.4.2",), ())


def test_a_folder_of_jars_must_have_the_connector(tmp_path: Path) -> None:
    for name in ("delta-spark_4.2_2.13-4.4.0.jar", "delta-storage-4.4.0.jar"):
        (tmp_path / name).touch()
    with pytest.raises(UsageProblem, match=r"has no \*hadoop-aws-\*\.jar") as reported:
        delta.session_settings(str(tmp_path), place="s3a://bucket")
    assert "org.apache.hadoop:hadoop-aws:" in str(reported.value)
    assert "delta_jars DIR s3a://" in str(reported.value)
    delta.session_settings(str(tmp_path), place="gs://bucket")
    (tmp_path / "hadoop-aws-3.5.0.jar").touch()
    assert delta.session_settings(str(tmp_path), place="s3a://bucket")["spark.jars"].count(".jar") == 3


def test_a_connector_among_sparks_jars_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "hadoop-aws-3.5.0.jar").touch()
    assert "hadoop" not in delta.session_settings(None, place="s3a://bucket")["spark.jars.packages"]


def session(problem: Exception | None = None) -> Any:
    """Return a fake session whose store cannot be opened, because of `problem`."""

    def get_file_system(_: Any) -> None:
        if problem is not None:
            raise problem

    fs = SimpleNamespace(Path=lambda uri: SimpleNamespace(getFileSystem=get_file_system))
    jvm = SimpleNamespace(org=SimpleNamespace(apache=SimpleNamespace(hadoop=SimpleNamespace(fs=fs))))
    jsc = SimpleNamespace(hadoopConfiguration=lambda: None)
    return SimpleNamespace(sparkContext=SimpleNamespace(_jvm=jvm, _jsc=jsc))


def test_a_server_that_ignores_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are those to requests that create one object: True if it was created. The log store is set once, and
    a log store that the user has set is used without a request."""
    conf: dict[str, str] = {}
    cleared: list[int] = []
    catalog = SimpleNamespace(DeltaLog=SimpleNamespace(clearCache=lambda: cleared.append(1)))
    spark = SimpleNamespace(apache=SimpleNamespace(spark=SimpleNamespace(sql=SimpleNamespace(delta=catalog))))
    live = SimpleNamespace(set=conf.__setitem__)
    context = SimpleNamespace(
        getConf=lambda: conf,
        _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(conf=lambda: live)),
        _jvm=SimpleNamespace(org=spark),
    )
    added: list[Any] = []
    monkeypatch.setattr(s3_commits, "_add_log_store", added.append)

    def commit(*answers: bool) -> None:
        given = iter(answers)
        monkeypatch.setattr(s3_commits, "_creates", lambda *_: next(given))
        s3_commits.commit_conditionally(SimpleNamespace(sparkContext=context), "s3a://b/x")
        assert not list(given)

    commit(True, False)
    commit(False)
    assert (len(added), len(cleared), conf) == (1, 1, {"spark.delta.logStore.s3a.impl": s3_commits.LOG_STORE})
    with pytest.raises(UsageProblem, match="ignores the header If-None-Match") as refused:
        commit(True, True)
    assert refused.value.slug == "store-without-conditional-writes"
    for key in ("spark.delta.logStore.s3a.impl", "spark.delta.logStore.class"):
        conf.clear()
        conf[key] = "a.LogStore"
        commit()


def test_a_store_that_cannot_be_written_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("Access Denied")

    monkeypatch.setattr(stores, "commit_conditionally", fail)
    with pytest.raises(KeytailError, match="writing to the store failed: Access Denied"):
        require_store(session(), "s3a://b/x", writes=True)
    require_store(session(), "s3a://b/x")
    require_store(session(), "hdfs://nn/x", writes=True)


@pytest.mark.parametrize(
    ("uri", "package"),
    [("gs://b/x", "hadoop-gcp:"), ("abfss://c@a/x", "hadoop-azure:"), ("s3a://b/x", "hadoop-aws:"), ("nope://b", "")],
)
def test_a_missing_connector_is_named(uri: str, package: str) -> None:
    with pytest.raises(UsageProblem, match="No FileSystem for scheme") as refused:
        require_store(session(OSError("No FileSystem for scheme")), uri)
    assert package in (refused.value.remedy or "")
    require_store(session(), uri)
    require_store(None, "/srv/x")
