"""Other protocols that change a log dir, killed in forked children at random moments, also during an operation.
tests/crash stops the same protocols before every operation; the checks are the same.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.chance import SEED
from tests.crash import test_erase, test_expire, test_import, test_prepared, test_rebuild, test_repack, test_tail
from tests.crash.driver import State
from tests.crash.explorer import digest_without_scratch
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.kills.checks import Kills, moment
from tests.kills.forks import SlowFileSystem, run_in_child

pytestmark = pytest.mark.long

# per case
KILLS = max(3, int(os.environ.get("KEYTAIL_KILLS", "40")) // 40)
PAUSE_S = 0.0003


class Enough(Exception):
    """Raised after all kills, because the rest of the called test applies only to stops."""


@pytest.mark.parametrize("name", test_import.CASES)
def test_an_import_is_complete_or_absent(
    name: str,
    tmp_path: Path,
    fast_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_stops_by_kills(test_import, "import", monkeypatch)
    with pytest.raises(Enough):
        test_import.test_a_broker_finds_a_complete_import_or_none_after_every_stop(name, tmp_path, fast_dir)


def test_rebuilt_indexes_are_the_old_or_the_new_ones(
    fast_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace_stops_by_kills(test_rebuild, "index rebuild", monkeypatch)
    with pytest.raises(Enough):
        test_rebuild.test_every_stop_of_a_rebuild_leaves_valid_files(fast_dir, capsys)


@pytest.mark.parametrize("case", test_tail.CASES)
def test_a_torn_tail_is_truncated_or_unchanged(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_stops_by_kills(test_tail, "torn tail", monkeypatch)
    with pytest.raises(Enough):
        test_tail.test_after_every_stop_of_a_truncation_the_log_is_the_same(case, tmp_path)


@pytest.mark.parametrize("name", test_expire.CASES)
def test_expired_segments_are_removed_in_order(
    name: str,
    fast_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace_stops_by_kills(test_expire, "expire", monkeypatch)
    with pytest.raises(Enough):
        test_expire.test_no_stop_or_fault_of_expire_loses_retained_data(name, fast_dir, capsys)


@pytest.mark.parametrize("name", [test_prepared.ALWAYS, "random 0"])
def test_a_preparation_is_committed_or_discarded(
    name: str,
    fast_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_stops_by_kills(test_prepared, "preparation and commit", monkeypatch)
    with test_prepared.ignoring_inodes(), pytest.raises(Enough):
        test_prepared.test_every_stop_of_a_preparation_and_its_commit_loses_no_record(name, fast_dir)


@pytest.mark.parametrize("name", test_repack.SHAPES)
def test_a_repack_keeps_every_record(
    name: str,
    fast_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace_stops_by_kills(test_repack, "repack", monkeypatch)
    with pytest.raises(Enough):
        test_repack.test_no_stop_or_fault_of_a_repack_loses_a_record(name, fast_dir, capsys)


@pytest.mark.parametrize("name", test_erase.CASES)
def test_an_erasure_loses_no_other_record(
    name: str,
    fast_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace_stops_by_kills(test_erase, "erase", monkeypatch)
    with pytest.raises(Enough):
        test_erase.test_no_stop_or_fault_of_an_erasure_loses_another_record(name, fast_dir, capsys)


def replace_stops_by_kills(module: ModuleType, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `for_every_stop`, or that with faults, in a module of tests/crash by random kills, after which Enough is
    raised."""

    def for_random_kills(
        make_dir: Callable[[Path], object],
        action: Callable[[Any, Path], object],
        check: Callable[[State], object],
        *,
        work_dir: Path,
        **_: Any,
    ) -> None:
        rng, kills, start_s = random.Random(f"{SEED} {protocol}"), Kills(protocol), time.monotonic()
        origin, root = work_dir / "origin", work_dir / "left"
        work_dir.mkdir(parents=True)
        make_dir(origin)
        shutil.copytree(origin, root)
        action(SlowFileSystem(0), root)  # this loads modules and kernels, which children inherit
        whole_run_s = 0.0
        while kills.killed < KILLS:
            shutil.rmtree(root)
            shutil.copytree(origin, root)
            kill_after_s = moment(rng, whole_run_s) if whole_run_s else None
            started_s = time.monotonic()
            killed = run_in_child(lambda: action(SlowFileSystem(PAUSE_S), root), kill_after_s)
            whole_run_s = whole_run_s or time.monotonic() - started_s
            kills.killed += killed
            kills.ended += not killed and kill_after_s is not None
            kills.states.add(digest_without_scratch(root))
            try:
                check(State(root, f"seed {SEED}, kill {kills.killed}", (), not killed))
            except AssertionError as error:
                kills.losses += 1
                raise AssertionError(f"{protocol}, kill {kills.killed} of seed {SEED}: {error}") from error
        kills.seconds = time.monotonic() - start_s
        raise Enough

    name = "for_every_stop" if hasattr(module, "for_every_stop") else "for_every_stop_and_fault"
    monkeypatch.setattr(module, name, for_random_kills)
