"""Whole runs of the DAGs in one process of Airflow each, with the real keytail, on real logs."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from tests.airflow_dags.conftest import Ask
from tests.airflow_dags.test_structure import BROKERS, LEDGER, REBUILD, SNAPSHOTS
from tests.app.log_dirs import newest_by_key, random_records, records_of, write_log_dir
from tests.golden import unpack

ROOT = Path(__file__).parents[2]
ORDERS = ["orders:cleanup.policy=compact"]


def inventory(path: Path, keytail_home: Path, **brokers: dict[str, Any]) -> str:
    """A TOML file with these brokers; JSON's strings and lists are TOML's."""
    lines = []
    for name, keys in brokers.items():
        lines += ["[[broker]]", f'name = "{name}"', f"keytail = {json.dumps(str(keytail_home / 'bin' / 'keytail'))}"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def small(path: Path, *numbers: int) -> Path:
    return write_log_dir(path, {f"orders-{n}": random_records(n, 400) for n in numbers})


def damage(log_dir: Path, partition: str) -> None:
    """A byte of a batch in the first segment, which is not the active one."""
    log = sorted((log_dir / partition).glob("*.log"))[0]
    spoiled = bytearray(log.read_bytes())
    spoiled[100] ^= 1
    log.write_bytes(spoiled)


def left(found: dict[str, Any], task: str, index: int = -1) -> Any:
    [value] = [x["value"] for x in found["xcoms"]
               if (x["task"], x["index"], x["key"]) == (task, index, "return_value")]  # fmt: skip
    return value


def test_snapshots_by_spark_with_one_that_is_damaged(ask: Ask, tmp_path: Path) -> None:
    """A real broker's logs by a real spark-submit: the others are compacted and verified, the task is green and not
    tried again, the ledger has all of it, and the last one says which is damaged, where."""
    log_dir = unpack(tmp_path)
    damage(log_dir, "gzip-0")
    conf = {
        "config": f"{tmp_path}/server.properties", "least_bytes": 1000, "topic_list": ["gzip", "zstd", "lz4"],
        "ledger": str(tmp_path / "ledger"), "properties_file": str(ROOT / "conf" / "spark-delta.conf"),
    }  # fmt: skip
    found = ask("test", SNAPSHOTS, json.dumps(conf))
    assert found["tasks"] == {
        "plan": "success", "gate": "success", "compact": "success", "verify": "success", "ledger": "success",
        "tell_partial": "failed", "done": "upstream_failed",
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
    told = (tmp_path / "ask.log").read_text()
    assert "compact was partial (" in told
    assert "  gzip-0 corrupt: " in told
    assert "  gzip-0 damaged: " in told
    planned = left(found, "plan")
    assert planned["due"] == 3
    assert 0 < planned["dirty_ratio"] <= 1


def test_brokers_each_on_its_host_with_a_ledger(ask: Ask, tmp_path: Path, keytail_home: Path) -> None:
    """One broker is compacted, verified and read back from the ledger, through a shell that stands for a host's; of the
    other too little is due, so that all but its plan is skipped. Then the ledger is maintained."""
    worth, little = small(tmp_path / "it's one", 0, 1), small(tmp_path / "two", 2)
    path = inventory(
        tmp_path / "b.toml", keytail_home,
        b1={"log_dirs": [str(worth)], "on_host": ["sh", "-c"]}, b2={"log_dirs": [str(little)]},
    )  # fmt: skip
    before = {n: records_of(worth / f"orders-{n}") for n in range(2)}
    untouched = records_of(little / "orders-2")
    conf = {"topic_config": ORDERS, "topics_have_no_overrides": True, "ledger": str(tmp_path / "ledger")}
    gate = sum(log.stat().st_size for log in worth.glob("*/*.log")) // 2
    found = ask("test", BROKERS, json.dumps({**conf, "least_bytes": gate}), KEYTAIL_BROKERS=path)
    steps = ("plan", "gate", "compact", "verify", "ledger")
    assert found["tasks"] == {
        "choose": "success", **{f"broker.{step}[0]": "success" for step in steps},
        "broker.plan[1]": "success", **{f"broker.{step}[1]": "skipped" for step in steps[1:]},
        "tell_partial": "skipped", "done": "success",
    }  # fmt: skip
    assert found["state"] == "success"
    for n in range(2):
        after = records_of(worth / f"orders-{n}")
        assert len(after) < len(before[n])
        newest = newest_by_key(before[n])
        assert newest_by_key(after) == {key: newest[key] for key in newest_by_key(after)}
    assert records_of(little / "orders-2") == untouched
    assert left(found, "choose") == ["b1", "b2"]
    compacted, recorded = left(found, "broker.compact", 0), left(found, "broker.ledger", 0)
    assert compacted["counts"] == recorded["counts"] == {"compacted": 2}
    assert compacted["bytes_after"] == recorded["bytes_after"] > 0
    assert recorded["run"]["run_id"] == compacted["run_id"]
    assert recorded["run"]["status"] == "done"
    assert "the gate is closed: 1 of 1 partitions are due" in (tmp_path / "ask.log").read_text()
    assert not {x["key"] for x in found["xcoms"]} - {"return_value", "skipmixin_key"}

    found = ask("test", LEDGER, json.dumps({"ledger": str(tmp_path / "ledger"), "broker": "b1"}), KEYTAIL_BROKERS=path)
    assert found["state"] == "success"
    assert left(found, "maintain")["counts"] == {"maintained": 3}


def test_indexes_of_brokers_of_which_one_runs(ask: Ask, tmp_path: Path, keytail_home: Path) -> None:
    """Its task fails, with the words of the lock, and is tried again; the others are done, of the same group too."""
    running, stopped, damaged = small(tmp_path / "a", 0), small(tmp_path / "b", 1), small(tmp_path / "c", 2, 3)
    for log_dir in (running, stopped, damaged):
        next(log_dir.glob("orders-*/00000000000000000000.index")).unlink()
    damage(damaged, "orders-3")
    path = inventory(
        tmp_path / "b.toml", keytail_home, a={"log_dirs": [str(running)], "group": "r"},
        c={"log_dirs": [str(damaged)]}, b={"log_dirs": [str(stopped)], "group": "r"},
    )  # fmt: skip
    with open(running / ".lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        found = ask("test", REBUILD, json.dumps({"by": "group"}), KEYTAIL_BROKERS=path)
    assert found["tasks"] == {
        "choose": "success", "brokers.rebuild[0]": "failed", "brokers.verify[0]": "upstream_failed",
        "brokers.rebuild[1]": "success", "brokers.verify[1]": "success",
        "tell_partial": "failed", "done": "upstream_failed",
    }  # fmt: skip
    assert left(found, "choose") == [["a", "b"], ["c"]]
    assert (found["tries"]["brokers.rebuild[0]"], found["tries"]["brokers.rebuild[1]"]) == (2, 1)
    [partial] = left(found, "brokers.rebuild", 1)
    assert (partial["broker"], partial["partial"]) == ("c", True)
    assert (stopped / "orders-1" / "00000000000000000000.index").exists()
    assert not (running / "orders-0" / "00000000000000000000.index").exists()
    told = (tmp_path / "ask.log").read_text()
    assert "c: rebuild-index was partial" in told
    assert "  orders-3 corrupt: " in told
    assert "a: could not begin" in told
    assert "lock" in told


def test_without_what_it_needs_it_says_so(ask: Ask, tmp_path: Path) -> None:
    found = ask("test", LEDGER, "{}")
    assert found["tasks"] == {"maintain": "failed", "tell_partial": "skipped", "done": "upstream_failed"}
    assert (found["state"], found["tries"]["maintain"]) == ("failed", 1)
    assert "the Params name no ledger" in (tmp_path / "ask.log").read_text()
