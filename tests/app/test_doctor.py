"""`keytail doctor`, and that a run after `doctor --warm` calls no kernel with types that were not compiled by it.

KEYTAIL_EMPTY_CACHE=1 begins with an empty cache, which takes a minute, and has the run say that it compiled nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keytail.app import doctor
from tests.app.conftest import Run
from tests.app.log_dirs import random_records, write_log_dir

# Each prints the kernels that it has called, with the types, and how many it had to compile.
_TELL = """
called = {f"{k.py_func.__module__}.{k.__name__}": list(map(str, k.signatures)) for k in jit.KERNELS if k.signatures}
print(json.dumps([called, sum(sum(k.stats.cache_misses.values()) for k in jit.KERNELS)]))
"""
_WARM = """
import contextlib, json, sys
from keytail.app.cli import app
from keytail.kernels import jit
with contextlib.redirect_stdout(sys.stderr):
    app(["doctor", "--warm"], standalone_mode=False)
""" + _TELL
_WORK = """
import json, sys, time
from dataclasses import replace
from keytail.clean.one_partition import COMPACTED, compact
from keytail.inspection.verify import verify_partition
from keytail.kernels import jit
from keytail.log.fs import LOCAL
from keytail.log.one_partition import survey
from keytail.maintenance.rebuild import plan_partition
from keytail.spark.rebuild import Rebuild
path = sys.argv[1]
verify_partition(LOCAL, path)
facts = survey(path)
facts = replace(facts, high_watermark=facts.log_end_offset, recovery_point=facts.log_end_offset)
plan = plan_partition(LOCAL, facts, index_interval_bytes=4096, segment_index_bytes=10485760, rebuild_all=True)
Rebuild([plan]).run()
assert compact(facts, COMPACTED, now_ms=time.time_ns() // 1_000_000) is not None
""" + _TELL


def told(code: str, *arguments: str, **variables: str) -> tuple[dict[str, list[str]], int, str]:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    called, compiled = json.loads(done.stdout)
    return called, compiled, done.stderr


def test_rows_say_what_is_there(run: Run) -> None:
    result = run("doctor", "--output", "json")
    rows = {row["check"]: row for row in json.loads(result.stdout)}
    assert set(rows) == {"Java", "checksum and hash", "compiled kernels", "memory"}
    assert {row["status"] for row in rows.values()} <= {"good", "slow", "missing"}
    assert len(rows) == len(doctor.CHECKS)
    assert "cores" in rows["memory"]["found"]
    assert (result.exit_code == 0) == all(row["status"] != "missing" for row in rows.values())


def test_what_is_missing_is_named_with_what_to_do(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr("keytail.kernels.jit.CACHE_FOLDER", None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "Java missing: Set JAVA_HOME" in result.stdout
    assert "compiled kernels slow: Set KEYTAIL_CACHE_DIR" in result.stdout


def test_after_warming_a_run_compiles_nothing(tmp_path: Path) -> None:
    is_empty = os.environ.get("KEYTAIL_EMPTY_CACHE") == "1"
    cache = {"KEYTAIL_CACHE_DIR": str(tmp_path / "cache")} if is_empty else {}
    warmed, _, said = told(_WARM, **cache)
    assert "kernels are compiled" in said
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 400)})
    called, compiled, _ = told(_WORK, str(log_dir / "orders-0"), **cache)
    assert len(called) > 10
    cold = {name: set(types) - set(warmed.get(name, ())) for name, types in called.items()}
    assert not any(cold.values()), cold
    assert not (is_empty and compiled)
