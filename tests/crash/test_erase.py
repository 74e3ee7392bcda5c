"""Stops before every file operation of `erase`, and lets each one fail. No other record is lost, and the next run
completes the erasure, with the same result; afterwards no file has an erased key.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from keytail.cli.configuration import Configuration
from keytail.config.resolve import from_command_line
from keytail.erase.erasure import Erasure
from keytail.erase.examining import examine
from keytail.erase.keys import read_keys
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import survey_log_dirs
from keytail.run.engine import ThisProcess
from tests.chance import SEED
from tests.crash.driver import Counts, Failed, State, few_in_check, for_every_fault, for_every_stop
from tests.crash.partitions import INTERVAL_BYTES, NO_PRODUCERS, PARTITION, log_of, write_segment
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.reference.batches import decode_log
from tests.reference.indexing import index_files
from tests.reference.loader import load_alike

SEGMENTS = {0: range(10), 10: range(10, 20), 20: range(20, 30), 30: range(30, 34)}
END = 34
NOW_MS = 2_000_000
CONFIGURATION = Configuration(
    command_line=from_command_line(["remote.storage.enable=false", f"index.interval.bytes={INTERVAL_BYTES}"]),
    topics_have_no_overrides=True,
)
# A part of a batch, a whole batch, the end of the log; segment 20 is never rewritten.
CASES = {"inactive segments": (3, 12, 13), "the active segment": (3, 32, 33), "only the active segment": (30,)}


def make(root: Path) -> None:
    path = root / PARTITION
    path.mkdir(parents=True)
    for base, offsets in SEGMENTS.items():
        write_segment(path, base, log_of(offsets), "", None)
        (path / f"{base or END:020d}.snapshot").write_bytes(NO_PRODUCERS)
    (root / ".kafka_cleanshutdown").touch()
    (path / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
    for name in ("replication-offset-checkpoint", "recovery-point-offset-checkpoint"):
        (root / name).write_text(f"0\n1\norders 0 {END}\n")


def run(fs: FileSystem, root: Path, erased: tuple[int, ...]) -> Failed | None:
    """Run `erase` with `--execute` on a log dir."""
    keys = read_keys(io.BytesIO(b"".join(b"key-%d\n" % offset for offset in erased)), "keys", "utf8")
    [listing] = survey_log_dirs(fs, [str(root)])
    items = [examine(fs, listing, entry, CONFIGURATION, execute=True) for entry in listing.partitions]
    rows = Erasure(ThisProcess(), items, keys, "abcd1234", NOW_MS, True, fs=fs).run()
    failed = tuple(str(row.error) for row in rows if row.status not in ("erased", "absent"))
    return Failed(failed) if failed else None


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / PARTITION).iterdir()}


def served(root: Path) -> tuple[set[int], int]:
    """Return the offsets of the records, and the log end offset, that a broker finds."""
    loaded = load_alike(root / PARTITION)
    for base, segment in loaded.segments.items():
        index, times = index_files(segment.log, base, INTERVAL_BYTES)
        assert segment.index in (None, index) and segment.time_index in (None, times)
    last = max(loaded.segments)
    end = max([last, *(batch.last_offset + 1 for batch in decode_log(loaded.segments[last].log))])
    return {record.offset for record in loaded.records()}, end


@pytest.mark.parametrize("name", few_in_check(CASES, "only the active segment"))
def test_no_stop_or_fault_of_an_erasure_loses_another_record(
    name: str, fast_dir: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:
    erased = CASES[name]
    make(fast_dir / "whole")
    assert run(LOCAL, fast_dir / "whole", erased) is None
    after, kept = files(fast_dir / "whole"), set(range(END)) - {*erased}
    assert served(fast_dir / "whole") == (kept, END)
    of_segments = [{*offsets} & {*erased} for offsets in SEGMENTS.values()]
    seen: set[int] = set()

    def check(state: State) -> None:
        found, end = served(state.root)
        assert end == END
        assert kept <= found
        left = found - kept
        assert all(offsets <= left or not offsets & left for offsets in of_segments), "a segment is partly erased"
        seen.add(len(left))
        if state.action_ended:
            assert files(state.root) == after
        assert run(LOCAL, state.root, erased) is None
        assert files(state.root) == after

    def action(fs: FileSystem, root: Path) -> Failed | None:
        return run(fs, root, erased)

    counts = Counts("erasure of records")
    for_every_stop(make, action, check, work_dir=fast_dir / "stops", counts=counts, partial_cuts=1)
    for_every_fault(
        make, action, check, work_dir=fast_dir / "faults", counts=counts, share=0.1, seed=SEED, scratch=(".clean",)
    )
    with capsys.disabled():
        print(f"\nerase, {name}: {counts}")
    assert {0, len(erased)} <= seen


def test_a_stop_before_the_installation_replaces_nothing(tmp_path: Path) -> None:
    class Stopping(ThisProcess):
        def run_bundle(self, payloads: Any, function: Any, **more: Any) -> Any:
            outcomes = super().run_bundle(payloads, function, **more)
            erasure._stopped = more["name"] == "erase: rewrite segments"
            return outcomes

    make(tmp_path)
    before = files(tmp_path)
    keys = read_keys(io.BytesIO(b"key-3\n"), "keys", "utf8")
    [listing] = survey_log_dirs(LOCAL, [str(tmp_path)])
    items = [examine(LOCAL, listing, entry, CONFIGURATION, execute=True) for entry in listing.partitions]
    erasure = Erasure(Stopping(), items, keys, "abcd1234", NOW_MS, True)
    [row] = erasure.run()
    assert row.status == "failed" and row.records_erased is None
    assert row.error.startswith("interrupted") and "Nothing was replaced" in row.error
    assert erasure.done == [row]
    assert files(tmp_path) == before
