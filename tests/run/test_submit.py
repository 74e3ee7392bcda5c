from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest

from tests.class_archives import submit_options
from tests.log_dirs import newest_by_key, random_records, records_of, write_log_dir
from tests.reference.murmur2 import partition as partition_of

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
SUBMIT = Path(sys.executable).with_name("spark-submit")
JOB = ROOT / "jobs" / "compact.py"


def submit(*arguments: str, activated: bool = True, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run spark-submit in an activated environment, or with only SPARK_HOME set, and return its result.

    Like an operator, the caller does not specify the interpreter of driver and workers.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "SPARK_", "VIRTUAL_"))}
    environment |= {"SPARK_CONF_DIR": str(ROOT / "conf"), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment |= {"SPARK_SUBMIT_OPTS": submit_options()}  # this saves time
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder != str(SUBMIT.parent)]
    if activated:
        folders.insert(0, str(SUBMIT.parent))
    else:
        environment["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    environment["PATH"] = os.pathsep.join(folders)
    return subprocess.run(
        [str(SUBMIT), *arguments], capture_output=True, text=True, env=environment, timeout=800, cwd=cwd, check=False
    )


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    partitions = {f"orders-{n}": random_records(n, 400) for n in range(3)}
    return write_log_dir(tmp_path / "logs", partitions)


def test_the_job_compacts_like_the_command_line(log_dir: Path) -> None:
    before = {n: records_of(log_dir / f"orders-{n}") for n in range(3)}
    flags = ["--log-dirs", str(log_dir), "--topic-config", "orders:cleanup.policy=compact", "--output", "json"]
    flags.append("--topics-have-no-overrides")
    done = submit("--master", "local[2]", str(JOB), *flags, "--execute")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["status"] for row in rows] == ["compacted"] * 3
    for n in range(3):
        after = records_of(log_dir / f"orders-{n}")
        assert len(after) < len(before[n])
        newest = newest_by_key(before[n])
        assert newest_by_key(after) == {key: newest[key] for key in newest_by_key(after)}

    keytail = str(SUBMIT.with_name("keytail"))
    again = subprocess.run([keytail, "compact", *flags, "--execute"], capture_output=True, timeout=800, check=True)
    assert {row["status"] for row in json.loads(again.stdout)} == {"clean"}


@pytest.mark.soak("the compact job; tests/test_jobs.py; tests/import_/test_driver.py")
def test_the_import_job_imports_like_the_command_line(tmp_path: Path) -> None:
    keys = [b"%d" % number for number in range(500)]
    pq.write_table(pa.table({"key": keys, "value": keys}), tmp_path / "orders.parquet", row_group_size=100)
    logs = write_log_dir(tmp_path / "logs", {})
    (logs / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":-1}')
    flags = ["--topic", "orders", "--log-dirs", str(logs), "--single-replica", "--topics-have-no-overrides"]
    flags += ["--topic-config", "orders:cleanup.policy=delete"]
    flags += ["--partition-count", "2", "--topic-id", "AAAAAAAAAAAAAAAAAAAAAQ", "--output", "json", "--execute"]
    job = ROOT / "jobs" / "import_logs.py"
    done = submit("--master", "local[2]", str(job), str(tmp_path / "orders.parquet"), *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["status"] for row in rows] == ["imported"] * 2
    assert "tasks read Parquet without the JVM" in done.stderr
    found = {n: [record.key for record in records_of(logs / f"orders-{n}")] for n in range(2)}
    assert found == {n: [key for key in keys if partition_of(key, 2) == n] for n in range(2)}


def output_of_guide_commands(page: str, first: str, root: Path, log_dir: Path) -> str:
    """Run the commands of the page's block that contains `first`, and return their standard output. The shell has no
    activated environment, and `root` has links to .venv, jobs and conf, as in the repository.
    """
    for name, target in ((".venv", Path(sys.prefix)), ("jobs", ROOT / "jobs"), ("conf", ROOT / "conf")):
        (root / name).symlink_to(target)
    text = (ROOT / "lib/keytail/guide" / page).read_text().replace("/var/lib/kafka", str(log_dir))
    if program := re.search(r"```python\n(.*?)```", text, re.DOTALL):
        (root / "query.py").write_text(program[1])
    block = next(block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if first in block)
    commands = block.replace("local[*]", "local[2]").replace(
        "--config /etc/kafka/server.properties",
        f"--log-dirs {log_dir} --topics-have-no-overrides --topic-config orders:cleanup.policy=compact --output json",
    )
    kept = {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "KEYTAIL_CACHE_DIR") if name in os.environ}
    java = shutil.which("java")
    assert java is not None
    environment = kept | {"PATH": f"/usr/bin:/bin:{Path(java).parent}", "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        ["sh", "-ec", commands], cwd=root, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.one_of("commands of the guide without an activated environment")
def test_the_job_of_the_guide_needs_no_activated_environment(log_dir: Path, tmp_path: Path) -> None:
    printed = output_of_guide_commands("compact-a-cluster.md", "jobs/compact.py --config", tmp_path, log_dir)
    assert [row["status"] for row in json.loads(printed)] == ["compacted"] * 3


@pytest.mark.one_of("commands of the guide without an activated environment")
def test_the_query_of_the_guide_needs_no_activated_environment(log_dir: Path, tmp_path: Path) -> None:
    (log_dir / "replication-offset-checkpoint").write_text("0\n3\norders 0 400\norders 1 400\norders 2 400\n")
    printed = output_of_guide_commands("export-a-topic.md", "query.py", tmp_path, log_dir)
    counts = {(int(row[0]), int(row[1])) for row in re.findall(r"\|\s*(\d+)\|\s*(\d+)\|", printed)}
    assert counts == {(n, len(records_of(log_dir / f"orders-{n}"))) for n in range(3)}


def test_the_job_refuses_the_flag_master(log_dir: Path) -> None:
    done = submit("--master", "local[1]", str(JOB), "--log-dirs", str(log_dir), "--master", "local[2]")
    assert done.returncode == 2
    assert "before the job's name" in done.stderr
    assert done.stdout == ""
