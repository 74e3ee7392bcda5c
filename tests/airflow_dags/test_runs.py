"""Complete runs of the DAGs by `dag.test()`, with the real keytail, on real logs; test_scheduler.py has another run."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.airflow_dags.conftest import Ask
from tests.airflow_dags.rolls import connection
from tests.airflow_dags.test_structure import BROKERS, LEDGER, REBUILD, SNAPSHOTS
from tests.golden import unpack
from tests.log_dirs import random_records, write_log_dir

pytestmark = pytest.mark.xdist_group("airflow")

ROOT = Path(__file__).parents[2]
ORDERS = ["orders:cleanup.policy=compact"]


def inventory(keytail_home: Path, **brokers: dict[str, Any]) -> dict[str, str]:
    """Return the variable of the Connection with these brokers."""
    keytail = str(keytail_home / "bin" / "keytail")
    return connection(*({"name": name, "keytail": keytail, **keys} for name, keys in brokers.items()))


def small(path: Path, *numbers: int) -> Path:
    return write_log_dir(path, {f"orders-{n}": random_records(n, 400) for n in numbers})


def damage(log_dir: Path, partition: str) -> None:
    """Flip a bit in a batch of the first segment, which is not the active one."""
    log = sorted((log_dir / partition).glob("*.log"))[0]
    spoiled = bytearray(log.read_bytes())
    spoiled[100] ^= 1
    log.write_bytes(spoiled)


def left(found: dict[str, Any], task: str, index: int = -1) -> Any:
    [value] = [x["value"] for x in found["xcoms"]
               if (x["task"], x["index"], x["key"]) == (task, index, "return_value")]  # fmt: skip
    return value


@pytest.mark.one_of("real work under Airflow")
@pytest.mark.spark
def test_snapshots_are_compacted_on_spark_although_one_is_damaged(run_dag: Ask, tmp_path: Path) -> None:
    """The logs are those of a real broker, and spark-submit is real. The other snapshots are compacted and verified,
    the task succeeds without a retry, the ledger is complete, and the last task reports which snapshot is damaged, and
    where.
    """
    log_dir = unpack(tmp_path)
    damage(log_dir, "gzip-0")
    conf = {
        "config": f"{tmp_path}/server.properties", "least_bytes": 1000, "topic_list": ["gzip", "zstd", "lz4"],
        "ledger": str(tmp_path / "ledger"), "properties_file": str(ROOT / "conf" / "spark-delta.conf"),
    }  # fmt: skip
    found = run_dag(SNAPSHOTS, conf)
    assert found["tasks"] == {
        "plan": "success", "gate": "success", "compact": "success", "verify": "success", "ledger": "success",
        "report_partial": "failed", "done": "upstream_failed",
    }  # fmt: skip
    assert found["state"] == "failed"
    assert found["tries"]["compact"] == 1
    compacted = left(found, "compact")
    assert compacted["counts"] == {"compacted": 2, "corrupt": 1}
    assert (compacted["exit_status"], compacted["partial"]) == (3, True)
    assert compacted["bytes_after"] < compacted["bytes_before"]
    first = compacted["rows"][0]
    assert (first["topic"], first["status"]) == ("gzip", "corrupt")
    assert left(found, "verify")["counts"] == {"sound": 2, "damaged": 1}
    recorded = left(found, "ledger")
    assert recorded["counts"] == compacted["counts"]
    assert recorded["run"]["run_id"] == compacted["run_id"]
    logged = (tmp_path / "ask.log").read_text()
    assert "compact was partial (" in logged
    assert "  gzip-0 corrupt: " in logged
    assert "  gzip-0 damaged: " in logged
    planned = left(found, "plan")
    assert planned["due"] == 3
    assert 0 < planned["dirty_ratio"] <= 1


FAKE_SUBMIT = """
import json, os, sys
*words, rows_file, path = sys.argv[1:]
command = words[words.index("--name") + 1].split()[1]
with open(os.environ["SPARK_HOME"] + "/" + command, "w") as file:
    json.dump([words, rows_file, os.environ["SPARK_CONF_DIR"]], file)
print("keytail: ledger: this is run 20260101-s; to show it: keytail history", *words)
row = {"topic": "orders", "log_dir": "/d", "error": ""}
done = "compacted" if command == "compact" else "sound"
with open(path, "w") as file:
    json.dump([{**row, "partition": 0, "status": done}, {**row, "partition": 1, "status": "refused"}], file)
sys.exit(3)
"""


@pytest.mark.long
def test_a_job_is_submitted_with_its_status_rows_and_run_id(run_dag: Ask, tmp_path: Path) -> None:
    """spark-submit is a fake. A secret in `conf` is passed to it, and is not in the log."""
    (tmp_path / "bin").mkdir()
    for name, source, words in (("keytail", FAKE_KEYTAIL, f"{tmp_path} k"), ("spark-submit", FAKE_SUBMIT, "")):
        (tmp_path / f"{name}.py").write_text(source)
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {tmp_path}/{name}.py {words} "$@"\n')
        program.chmod(0o755)
    conf = {"log_dirs": ["/d"], "least_bytes": 1, "ledger": "/l", "conf": {"spark.a.secret": "hid'den", "spark.b": "1"},
            "keytail_home": str(tmp_path), "spark_home": str(tmp_path)}  # fmt: skip
    found = run_dag(SNAPSHOTS, conf)
    assert found["tasks"]["compact"] == found["tasks"]["verify"] == found["tasks"]["ledger"] == "success"
    compacted = left(found, "compact")
    assert (compacted["exit_status"], compacted["partial"], compacted["run_id"]) == (3, True, "20260101-s")
    assert compacted["counts"] == {"compacted": 1, "refused": 1}
    assert left(found, "ledger")["run"]["run_id"] == "20260101-s"
    assert [(one["task"], one["uri"], one["extra"]["broker"]) for one in found["events"]] == [
        ("compact", "file:///l", None)
    ]
    words, rows_file, conf_dir = json.loads((tmp_path / "compact").read_text())
    assert words[:8] == ["--master", "local[2]", "--deploy-mode", "client",
                         "--conf", "spark.a.secret=hid'den", "--conf", "spark.b=1"]  # fmt: skip
    assert words[8:10] == ["--name", f"keytail compact {found['run_id']}"]
    assert words[10:] == [f"{tmp_path}/jobs/compact.py", "--log-dirs", "/d", "--ledger", "/l", "--execute"]
    assert (rows_file, conf_dir) == ("--rows-file", f"{tmp_path}/conf")
    logged = (tmp_path / "ask.log").read_text()
    assert "spark.a.secret=***" in logged
    assert "hid'" not in logged


@pytest.mark.spark
@pytest.mark.soak("test_each_broker_reads_its_own_run_of_the_ledger; ledger/test_tables.py: maintenance")
def test_a_ledger_is_maintained(run_dag: Ask, tmp_path: Path, keytail_home: Path) -> None:
    log_dir, ledger = small(tmp_path / "logs", 0), str(tmp_path / "ledger")
    flags = ["--log-dirs", str(log_dir), "--execute", "--ledger", ledger]
    subprocess.run([keytail_home / "bin" / "keytail", "rebuild-index", *flags], check=True)
    env = inventory(keytail_home, b1={"log_dirs": [str(log_dir)], "on_host": ["sh", "-c"]})
    found = run_dag(LEDGER, {"ledger": ledger, "broker": "b1"}, **env)
    assert found["state"] == "success"
    assert [one["counts"] for one in left(found, "maintain")] == [{"maintained": 3}]


# A fake keytail for brokers, which writes no ledger and has one run. Its arguments are a folder, the broker's name, and
# those of keytail.
FAKE_KEYTAIL = """
import json, sys
folder, name, command, *words = sys.argv[1:]
with open(f"{folder}/{name}", "a") as file:
    file.write(json.dumps([command, *words]) + "\\n")
row = {"topic": "orders", "partition": 0, "log_dir": "/d", "error": ""}
if command == "compact":
    print(f"keytail: ledger: this is run 20260101-{name}; to show it: "
          "keytail history --ledger L --run R", file=sys.stderr)
rows = {
    "plan": [{**row, "status": "would-compact"}],
    "describe": [{**row, "status": "described", "cleanable_bytes": 100, "clean_bytes": 0}],
    "compact": [{**row, "status": "compacted", "bytes_before": 100, "bytes_after": 40}],
    "verify": [{**row, "status": "sound"}],
    "history": [
        {"run_id": words[-3], "command": "compact", "status": "done"},
        {**row, "status": "compacted", "bytes_before": 100, "bytes_after": 40},
    ],
}
maintained = [{"table": "runs", "status": "maintained", "error": ""}]
print(json.dumps(maintained if "--maintain" in words else rows[command]))
"""


@pytest.mark.long
def test_each_broker_reads_its_own_run_of_the_ledger(run_dag: Ask, ssh: dict[str, str], tmp_path: Path) -> None:
    """The run is found by the id that the compaction printed; tests of recorded output check how it is printed. Each
    compaction adds an event of the asset of its broker's ledger, and a run that is started by these events maintains
    both ledgers. The first broker is reached over SSH.
    """
    (tmp_path / "stand_in.py").write_text(FAKE_KEYTAIL)
    brokers = []
    for name in ("b1", "b2"):
        keytail = tmp_path / f"keytail-{name}"
        keytail.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {tmp_path}/stand_in.py {tmp_path} {name} "$@"\n')
        keytail.chmod(0o755)
        brokers.append({"name": name, "keytail": str(keytail), "log_dirs": ["/d"], "on_host": ["sh", "-c"]})
    brokers[0]["ssh_conn_id"] = "ssh_b1"
    env = connection(*brokers) | ssh
    found = run_dag(BROKERS, {"ledger": "/the ledger", "least_bytes": 1}, **env)
    steps = [f"broker.{step}[{n}]" for step in ("plan", "gate", "compact", "verify", "ledger") for n in range(2)]
    wanted = {"choose": "success", **dict.fromkeys(steps, "success"), "report_partial": "skipped", "done": "success"}
    assert (found["state"], found["tasks"]) == ("success", wanted)
    for number, name in enumerate(("b1", "b2")):
        compacted, recorded = (left(found, f"broker.{step}", number) for step in ("compact", "ledger"))
        assert (compacted["broker"], recorded["broker"]) == (name, name)
        assert compacted["run_id"] == recorded["run"]["run_id"] == f"20260101-{name}"
        assert recorded["run"]["status"] == "done"
        assert compacted["counts"] == recorded["counts"] == {"compacted": 1}
        assert compacted["bytes_after"] == recorded["bytes_after"] == 40
        done = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert [words[0] for words in done] == ["plan", "describe", "compact", "verify", "history"]
        assert done[2][-5:] == ["--ledger", "/the ledger", "--execute", "--output", "json"]
        history = ["history", "--ledger", "/the ledger", "--run", f"20260101-{name}", "--output", "json"]
        assert done[-1] == history
    assert not {x["key"] for x in found["xcoms"]} - {"return_value", "skipmixin_key"}
    uris = [f"file://{name}/the%20ledger" for name in ("b1", "b2")]
    assert found["events"] == [
        {"task": "broker.compact", "index": number, "uri": uri, "extra": {
            "ledger": "/the ledger", "broker": name, "command": "compact", "run_id": f"20260101-{name}"}}
        for number, (name, uri) in enumerate(zip(("b1", "b2"), uris, strict=True))
    ]  # fmt: skip
    found = run_dag(LEDGER, {}, found["run_id"], **env)
    assert (found["state"], found["events"]) == ("success", [])
    assert [(one["ledger"], one["counts"]) for one in left(found, "maintain")] == [
        (uri, {"maintained": 1}) for uri in uris
    ]
    for name in ("b1", "b2"):
        words = json.loads((tmp_path / name).read_text().splitlines()[-1])
        maintain = ["history", "--ledger", "/the ledger", "--maintain", "--execute", "--retain-days", "400"]
        assert words == [*maintain, "--output", "json"]


@pytest.mark.long
def test_indexes_are_rebuilt_except_those_of_a_running_broker(run_dag: Ask, tmp_path: Path, keytail_home: Path) -> None:
    """The task of that broker's group is retried, and fails with a message about the lock, but rebuilds the indexes of
    the other broker of the group. The task of the other group succeeds.
    """
    running, stopped, damaged = small(tmp_path / "a", 0), small(tmp_path / "b", 1), small(tmp_path / "c", 2, 3)
    for log_dir in (running, stopped, damaged):
        next(log_dir.glob("orders-*/00000000000000000000.index")).unlink()
    damage(damaged, "orders-3")
    env = inventory(
        keytail_home, a={"log_dirs": [str(running)], "group": "r"},
        d={"log_dirs": ["/d"], "group": "r", "ssh_conn_id": "ssh_d"},
        c={"log_dirs": [str(damaged)]}, b={"log_dirs": [str(stopped)], "group": "r"},
    )  # fmt: skip
    with open(running / ".lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        found = run_dag(REBUILD, {"by": "group"}, AIRFLOW_CONN_SSH_D='{"conn_type": "ssh"}', **env)
    assert found["tasks"] == {
        "choose": "success", "brokers.rebuild[0]": "failed", "brokers.verify[0]": "upstream_failed",
        "brokers.rebuild[1]": "success", "brokers.verify[1]": "success",
        "report_partial": "failed", "done": "upstream_failed",
    }  # fmt: skip
    assert left(found, "choose") == [["a", "d", "b"], ["c"]]
    assert (found["tries"]["brokers.rebuild[0]"], found["tries"]["brokers.rebuild[1]"]) == (2, 1)
    [partial] = left(found, "brokers.rebuild", 1)
    assert (partial["broker"], partial["partial"]) == ("c", True)
    assert (stopped / "orders-1" / "00000000000000000000.index").exists()
    assert not (running / "orders-0" / "00000000000000000000.index").exists()
    logged = (tmp_path / "ask.log").read_text()
    assert "c: rebuild-index was partial" in logged
    assert "  orders-3 corrupt: " in logged
    assert "a: could not start" in logged
    assert "d: the Connection ssh_d, of type ssh, cannot be used" in logged
    assert "lock" in logged


@pytest.mark.long
def test_missing_requirements_are_reported(run_dag: Ask, tmp_path: Path) -> None:
    found = run_dag(LEDGER, {})
    assert found["tasks"] == {"maintain": "failed", "report_partial": "skipped", "done": "upstream_failed"}
    assert (found["state"], found["tries"]["maintain"]) == ("failed", 1)
    assert "the Params have no ledger" in (tmp_path / "ask.log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("mistake", ["no Connection", "not JSON", "an unknown broker"])
def test_a_mistake_in_the_inventory_is_not_retried(mistake: str, run_dag: Ask, tmp_path: Path) -> None:
    """A missing Connection is: Airflow also reports it as missing while its secrets backend does not answer."""
    env, logged = {
        "no Connection": ({}, "there is no Connection keytail_default, or it cannot be read"),
        "not JSON": ({"AIRFLOW_CONN_KEYTAIL_DEFAULT": '{"conn_type": "keytail", "extra": "{"}'}, "is not valid JSON"),
        "an unknown broker": (connection({"name": "b1", "log_dirs": ["/x"]}), "has no broker 'b2'; it has b1"),
    }[mistake]
    first = {BROKERS: "choose", REBUILD: "choose", LEDGER: "maintain"}
    conf = {BROKERS: {"brokers": ["b2"]}, REBUILD: {"brokers": ["b2"]}, LEDGER: {"broker": "b2", "ledger": "/x"}}
    tries = 2 if mistake == "no Connection" else 1
    for dag_id, task in first.items():
        found = run_dag(dag_id, conf[dag_id], **env)
        assert (found["state"], found["tasks"][task], found["tries"][task]) == ("failed", "failed", tries), dag_id
        assert logged in (tmp_path / "ask.log").read_text(), dag_id
