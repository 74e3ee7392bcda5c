"""Sessions that keytail starts: other users of the host can neither read their files nor send them anything, and no
module is imported from the current directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from keytail.errors import KeytailError
from keytail.run.spark import isolation
from keytail.run.spark.isolation import LocalDirs, configured_parents, remove_abandoned
from tests.class_archives import submit_options
from tests.log_dirs import random_records, write_log_dir
from tests.run.cluster import PACKAGES, Cluster
from tests.run.test_submit import JOB, submit

KEYTAIL = Path(sys.executable).with_name("keytail")
# Each of these planted modules would be imported by a worker or a driver that searches its current directory.
PLANTED = ("pyspark/__init__.py", "numpy.py", "pyspark_source.py", "pyarrow.py", "typer.py")

DRIVER = """
import contextlib, json, os, signal, sys
from keytail.run.spark.session import session_of_run
from pyspark import SparkContext
with contextlib.ExitStack() as run:
    spark = session_of_run(run, "local[1]", submitted=False).session
    context, jvm = spark.sparkContext, spark._jvm
    manager = jvm.org.apache.spark.SparkEnv.get().blockManager().diskBlockManager()
    found = [*map(str, manager.localDirsString()), context._temp_dir]
    found += [jvm.java.lang.System.getProperty("java.io.tmpdir"), jvm.org.apache.spark.SparkFiles.getRootDirectory()]
    spark.range(20, numPartitions=4).repartition(3, "id").collect()
    print(json.dumps({"dirs": found, "jvm": SparkContext._gateway.proc.pid}), flush=True)
    if sys.argv[1] != "ends":
        os.kill(SparkContext._gateway.proc.pid, signal.SIGKILL)
    if sys.argv[1] == "both are killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def environment(temporary: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "SPARK_", "PYTHONSAFEPATH"))}
    clean["SPARK_SUBMIT_OPTS"] = submit_options()  # this saves time
    return clean | {"TMPDIR": str(temporary), "PYTHONPATH": str(PACKAGES)}


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    made = tmp_path / "temporary"
    made.mkdir()
    return made


@pytest.fixture
def planted(tmp_path: Path, temporary: Path) -> Path:
    """Return the current directory of a run. Modules in it and in the temporary directory leave a mark when they are
    imported.
    """
    here = tmp_path / "here"
    for folder in (here, temporary):
        for name in PLANTED:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write(__file__ + chr(10))\n")
    return here


def marks(planted: Path) -> str:
    mark = planted.parent / "mark"
    return mark.read_text() if mark.exists() else ""


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 300)})
    settings = ["--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact"]
    return ["--log-dirs", str(log_dir), *settings, "--output", "json", "--execute"]


def test_python_m_imports_nothing_from_the_current_directory(planted: Path, temporary: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keytail", "--version"],
        capture_output=True, text=True, timeout=800, cwd=planted, env=environment(temporary), check=False,
    )  # fmt: skip
    assert marks(planted) == ""
    assert done.stdout.startswith("keytail "), done.stderr


@pytest.mark.spark
@pytest.mark.parametrize(
    "command",
    [
        pytest.param([str(KEYTAIL)], id="script"),
        pytest.param([sys.executable, "-m", "keytail"], id="-m", marks=pytest.mark.soak("script")),
    ],
)
def test_a_module_in_the_current_directory_is_not_imported(
    command: list[str], planted: Path, temporary: Path, flags: list[str]
) -> None:
    done = subprocess.run(
        [*command, "compact", "--master", "local[2]", *flags],
        capture_output=True, text=True, timeout=800, cwd=planted, env=environment(temporary), check=False,
    )  # fmt: skip
    assert marks(planted) == ""
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in json.loads(done.stdout)] == ["compacted"]
    assert sorted(item.name for item in temporary.iterdir()) == sorted({name.split("/")[0] for name in PLANTED})


@pytest.mark.one_of("spark-submit beside other users")
@pytest.mark.spark
def test_spark_submit_imports_no_module_from_the_current_directory(planted: Path, flags: list[str]) -> None:
    done = submit("--master", "local[2]", str(JOB), *flags, cwd=planted)
    assert marks(planted) == ""
    assert done.returncode == 0, done.stderr


@pytest.mark.spark
@pytest.mark.parametrize(
    "how", ["ends", pytest.param("the JVM is killed", marks=pytest.mark.soak("both")), "both are killed"]
)
def test_files_of_spark_are_private_and_removed_afterwards(how: str, temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, how], stdout=subprocess.PIPE, text=True, env=environment(temporary)
    ) as driver:
        assert driver.stdout is not None
        found = json.loads(driver.stdout.readline())
        driver.wait(300)
    dirs = [Path(item) for item in found["dirs"]]
    [private] = {item for path in dirs for item in (path, *path.parents) if item.parent == temporary}
    assert all(path.is_relative_to(private) for path in dirs)
    if how == "both are killed":
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert any(private.rglob("shuffle_*.data"))
        remove_abandoned(str(temporary))
    assert list(temporary.iterdir()) == []


def test_the_directory_of_a_running_session_is_not_removed(temporary: Path) -> None:
    living = LocalDirs([str(temporary)])
    [path] = living.paths
    Path(path, "shuffle").touch()
    other = LocalDirs([str(temporary)])
    assert Path(path, "shuffle").exists()
    other.remove()
    living.remove()
    assert list(temporary.iterdir()) == []


def test_only_a_private_directory_of_the_same_user_is_removed(temporary: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "precious").touch()
    (temporary / f"{isolation.PREFIX}link").symlink_to(elsewhere)
    for name, mode in (("open", 0o755), ("private", 0o700)):
        (temporary / f"{isolation.PREFIX}{name}").mkdir()
        (temporary / f"{isolation.PREFIX}{name}").chmod(mode)
        (temporary / f"{isolation.PREFIX}{name}" / "link").symlink_to(elsewhere)
    (temporary / f"{isolation.PREFIX}file").touch(mode=0o700)
    (temporary / "private").mkdir(mode=0o700)
    remove_abandoned(str(temporary))
    left = {path.name.removeprefix(isolation.PREFIX) for path in temporary.iterdir()}
    assert left == {"link", "open", "file"} | {"private"}
    assert not (temporary / f"{isolation.PREFIX}private").exists()
    assert (elsewhere / "precious").exists()


def test_a_directory_with_the_set_group_id_bit_is_removed_too(temporary: Path) -> None:
    """A directory below one with the set-group-ID bit inherits that bit."""
    temporary.chmod(0o2775)
    (temporary / f"{isolation.PREFIX}x").mkdir(mode=0o700)
    remove_abandoned(str(temporary))
    assert list(temporary.iterdir()) == []


def test_a_directory_of_another_user_is_not_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / f"{isolation.PREFIX}x").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    remove_abandoned(str(temporary))
    assert list(temporary.iterdir()) != []


def test_a_directory_that_another_run_removes_during_its_creation_is_created_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = isolation.fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not seen:
            seen.append(fd)
            remove_abandoned_here()
        real(fd, how)

    def remove_abandoned_here() -> None:
        [path] = temporary.iterdir()
        path.rmdir()

    monkeypatch.setattr(isolation.fcntl, "flock", flock)
    made = LocalDirs([str(temporary)])
    assert [str(path) for path in temporary.iterdir()] == made.paths
    made.remove()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "temporary"), ({"SPARK_LOCAL_DIRS": "{}/a,{}/b"}, "a b"), ({"SPARK_CONF_DIR": "{}"}, "conf")],
)
def test_directories_are_created_in_the_configured_place(
    variables: Mapping[str, str], expected: str, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spark-defaults.conf").write_text(f"#spark.local.dir /no\nspark.local.dir  {tmp_path}/conf\n")
    for name in ("SPARK_LOCAL_DIRS", "SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(isolation.tempfile, "gettempdir", lambda: str(temporary))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("{}", str(tmp_path)))
    assert configured_parents() == [str(tmp_path / name) for name in expected.split()]
    assert all((tmp_path / name).is_dir() for name in expected.split())


def test_a_directory_that_cannot_be_created_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "file" / "below"))
    with pytest.raises(KeytailError, match=r"Spark's temporary files.*file/below.*SPARK_LOCAL_DIRS"):
        configured_parents()


@pytest.mark.spark
def test_the_ports_of_the_driver_accept_nothing_without_the_secret(spark: Any) -> None:
    """Send a request of Spark's RPC with a serialized Java object as its body, which must not be deserialized."""
    settings = spark.sparkContext.getConf()
    for port in (int(settings.get("spark.driver.port")), _block_manager_port(spark)):
        assert b"Expected SaslMessage" in _answer_to_an_object(port)
    assert settings.get("spark.driver.host") == "127.0.0.1"


@pytest.mark.spark
@pytest.mark.xdist_group("cluster")
def test_the_master_of_a_cluster_accepts_nothing_without_the_secret(two_workers: Cluster) -> None:
    assert b"Expected SaslMessage" in _answer_to_an_object(two_workers.port)


@pytest.mark.spark
def test_the_secret_is_on_no_command_line(spark: Any) -> None:
    secret = str(spark._jvm.org.apache.spark.SparkEnv.get().securityManager().getSecretKey())
    assert len(secret) >= 32
    texts = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            texts.append(path.read_bytes())
    assert not any(secret.encode() in text for text in texts)
    assert secret not in dict(spark.sparkContext.getConf().getAll()).values()


def _answer_to_an_object(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(_rpc_request(b"\xac\xed\x00\x05 no object"))
        return client.recv(1 << 16)


def _block_manager_port(spark: Any) -> int:
    return int(spark._jvm.org.apache.spark.SparkEnv.get().blockManager().blockManagerId().port())


def _rpc_request(body: bytes) -> bytes:
    """Return a frame of Spark's transport: its size, type 3, a request id, and the size of the body."""
    rest = struct.pack(">bqi", 3, 7, len(body)) + body
    return struct.pack(">q", 8 + len(rest)) + rest
