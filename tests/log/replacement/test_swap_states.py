"""One test for each row of the table of states in lib/keytail/log/SWAP.md.

Models of brokers' loaders and keytail's recovery load each state; tests/versions_of_kafka loads the same states with
real brokers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import digits as DIGITS
from typing import Any

import pytest

import keytail.log
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.replacement.recover import recover
from tests.crash.driver import digest_of
from tests.crash.partitions import PARTITION, SCRATCH, Group, Partition, log_of, segment_data, write_segment
from tests.reference.loader import BrokerDoesNotStart, load, load_before_3

SOURCES = {0: range(10), 10: range(10, 20), 20: range(20, 30), 30: range(30, 34)}
OUT = (1, 4, 8, 12, 15, 23, 29)
INDEXES = (".index", ".timeindex")
FILES = (".log", *INDEXES)

Logs = dict[int, bytes]


class Dir:
    """A directory with the partition of the table; its methods create a state."""

    def __init__(self, root: Path, row: Row) -> None:
        self.path = root / PARTITION
        self.outputs = (0, *row.continued)
        Partition(SOURCES, (Group((0, 10, 20), row.kept, continued=row.continued),)).make(root)

    def stage(self, base: int, suffixes: tuple[str, ...], before: str, after: str) -> None:
        for suffix in suffixes:
            name = f"{base:020d}{suffix}"
            (self.path / (name + before)).rename(self.path / (name + after))

    def delete(self, *bases: int) -> None:
        for base in bases:
            self.stage(base, FILES, "", ".deleted")

    def touch(self, name: str) -> None:
        (self.path / name).touch()

    def remove(self, *names: str) -> None:
        for name in names:
            (self.path / name).unlink()

    def guard(self) -> None:
        self.touch(f"{0:020d}.log.cleaned")

    def swap(self) -> None:
        for base in self.outputs:
            self.stage(base, FILES, SCRATCH, ".swap")

    def name(self, base: int, suffixes: tuple[str, ...] = FILES) -> None:
        """Create the final names of an output in addition to its `.swap` names."""
        for suffix in suffixes:
            live = self.path / f"{base:020d}{suffix}"
            swap = live.with_name(live.name + ".swap")
            if (self.path / f"{base:020d}.log.swap").stat().st_size:
                live.hardlink_to(swap)
            else:
                live.write_bytes(swap.read_bytes())

    def name_all(self) -> None:
        for base in self.outputs:
            self.name(base)


@dataclass(frozen=True)
class Row:
    """A row of the table: the logs that result from a broker of 3.0 or later, from an older broker, and from keytail's
    recovery followed by a broker.

    None means that the logs equal the first. `left` has the `.swap` files that an older broker leaves, without leading
    zeros.
    """

    build: Callable[[Dir], object]
    broker: Logs | type[Exception]
    ours: Logs | type[KeytailError] | None = None
    before_3: Logs | None = None
    left: tuple[str, ...] = ()
    kept: tuple[int, ...] = OUT
    without_snapshots: tuple[int, ...] = ()
    continued: tuple[int, ...] = ()
    rebuilt: int | None = None

    @property
    def left_names(self) -> list[str]:
        return [f"{int(name.split('.')[0]):020d}.{name.split('.', 1)[1]}" if name[0] in DIGITS else name
                for name in self.left]  # fmt: skip

    def of_before_3(self, *, is_2_4: bool) -> Logs:
        """Return the logs that result from a broker of 2.4 to 2.8; for 2.4, empty outputs count as from 3.0 on."""
        has_empty = isinstance(self.broker, dict) and not all(self.broker.values())
        if self.before_3 is not None and not (is_2_4 and has_empty):
            return self.before_3
        assert isinstance(self.broker, dict)
        return self.broker


def _logs(**changed: tuple[int, ...] | range | None) -> Logs:
    """Return the logs of the sources with changes: a base, after an underscore, maps to its offsets, or to None if the
    segment is missing.
    """
    offsets = {**SOURCES, **{int(name[1:]): kept for name, kept in changed.items()}}
    return {base: log_of(kept) for base, kept in offsets.items() if kept is not None}


ALL_SOURCES = _logs()
OUTPUT = _logs(_0=OUT, _10=None, _20=None)
# Three outputs: the source 10 begins in the gap between two of them, which a commit now refuses.
THREE, CONTINUED = (1, 4, 7, 8, 15, 23), (7, 15)
THREE_OUTPUTS = _logs(_0=(1, 4), _7=(7, 8), _10=None, _15=(15, 23), _20=None)
# Outputs as keytail writes them: two continue inside source 0, and the last one also contains the rest of the other
# sources.
INSIDE = (7, 9)
INSIDE_OUTPUTS = _logs(_0=(1, 4), _7=(7, 8), _9=(15, 23), _10=None, _20=None)
IN_GAP = (7, 23)
SPLIT = _logs(_0=range(4), _4=range(4, 10))


def _final_log(d: Dir) -> None:
    d.swap()
    d.delete(0, 10, 20)
    d.stage(0, (".log",), ".swap", "")


def _final(d: Dir) -> None:
    _final_log(d)
    d.stage(0, INDEXES, ".swap", "")


def _final_files(d: Dir) -> None:
    d.stage(0, FILES, ".swap", "")


def _split(d: Dir) -> None:
    d.remove(*(f"{0:020d}{suffix}{SCRATCH}" for suffix in FILES))
    write_segment(d.path, 0, log_of(range(4)), ".swap")
    write_segment(d.path, 4, log_of(range(4, 10)), ".swap")


def _half_split(d: Dir) -> None:
    _split(d)
    d.stage(0, FILES, ".swap", ".cleaned")


def _two_swaps(d: Dir) -> None:
    d.remove(*(f"{0:020d}{suffix}{SCRATCH}" for suffix in FILES))
    write_segment(d.path, 0, log_of((1, 4, 8)), ".swap")
    write_segment(d.path, 20, log_of((23, 29)), ".swap")


def _steps(*steps: Callable[[Dir], object]) -> Callable[[Dir], object]:
    def build(d: Dir) -> None:
        for step in steps:
            step(d)

    return build


def _three(
    *steps: Callable[[Dir], object],
    broker: Logs | type[Exception] = THREE_OUTPUTS,
    ours: Logs | type[KeytailError] | None = None,
    before_3: Logs | None = None,
    left: tuple[str, ...] = (),
    kept: tuple[int, ...] = THREE,
    without_snapshots: tuple[int, ...] = (10, 20),
    continued: tuple[int, ...] = CONTINUED,
    rebuilt: int | None = None,
) -> Row:
    return Row(_steps(*steps), broker, ours, before_3, left, kept, without_snapshots, continued, rebuilt)


def _sources_aside(d: Dir) -> None:
    d.swap()
    d.delete(0, 10, 20)


def _stage(base: int, suffixes: tuple[str, ...], before: str, after: str) -> Callable[[Dir], object]:
    return lambda d: d.stage(base, suffixes, before, after)


def _no_sources(d: Dir) -> None:
    """Make the state of a broker that was stopped after it removed the sources."""
    d.remove(*(f"{base:020d}{suffix}" for base in (0, 10, 20) for suffix in FILES))
    d.remove(*(f"{base:020d}.snapshot" for base in (10, 20)))


def _left(*bases: int) -> tuple[str, ...]:
    return tuple(f"{base}{suffix}.swap" for base in bases for suffix in INDEXES)


def _named(d: Dir) -> None:
    """Create all final names in addition to the `.swap` names; the sources are `.deleted`."""
    _sources_aside(d)
    d.name_all()


def _without_index_swaps(d: Dir) -> None:
    d.remove(*(f"{base:020d}{suffix}.swap" for base in d.outputs for suffix in INDEXES))


def _inside(
    *steps: Callable[[Dir], object], broker: Logs = INSIDE_OUTPUTS, kept: tuple[int, ...] = THREE, **facts: Any
) -> Row:
    return _three(*steps, broker=broker, kept=kept, continued=INSIDE, **facts)


def _index_beside_rebuilt(d: Dir) -> None:
    """Make the state that a broker of 2.4 to 2.8 leaves in row 8."""
    _final_log(d)
    for suffix in INDEXES:
        live = d.path / f"{0:020d}{suffix}"
        live.write_bytes(live.with_name(live.name + ".swap").read_bytes())


def _cut_swap(d: Dir) -> None:
    path = d.path / f"{0:020d}.log.swap"
    path.write_bytes(path.read_bytes()[:-1])


ROWS = {
    1: Row(lambda d: None, ALL_SOURCES),
    2: Row(Dir.guard, ALL_SOURCES),
    3: Row(_steps(Dir.guard, lambda d: d.stage(0, (".log",), SCRATCH, ".swap")), ALL_SOURCES),
    4: Row(_steps(Dir.guard, Dir.swap), ALL_SOURCES),
    5: Row(Dir.swap, OUTPUT, without_snapshots=(10, 20)),
    6: Row(_steps(Dir.swap, lambda d: d.delete(0)), OUTPUT, without_snapshots=(10, 20)),
    7: Row(_steps(Dir.swap, lambda d: d.delete(0, 10, 20)), OUTPUT, without_snapshots=(10, 20)),
    8: Row(_final_log, OUTPUT, left=_left(0), without_snapshots=(10, 20)),
    9: Row(
        _steps(_final_log, lambda d: d.stage(0, (".index",), ".swap", "")),
        OUTPUT,
        left=("0.timeindex.swap",),
        without_snapshots=(10, 20),
    ),
    10: Row(_final, OUTPUT, without_snapshots=(10, 20)),
    11: Row(Dir.swap, _logs(_0=()), kept=()),
    12: Row(Dir.swap, _logs(_0=(1, 12), _10=None), kept=(1, 12), without_snapshots=(10,)),
    13: Row(lambda d: d.stage(0, FILES, SCRATCH, ".cleaned"), ALL_SOURCES),
    14: Row(
        _steps(
            lambda d: d.stage(0, INDEXES, SCRATCH, ".cleaned"),
            lambda d: d.stage(0, (".log",), SCRATCH, ".swap"),
        ),
        ALL_SOURCES,
    ),
    15: Row(_split, SPLIT),
    16: Row(_half_split, ALL_SOURCES),
    17: Row(
        _two_swaps,
        _logs(_0=(1, 4, 8), _10=None, _20=(23, 29)),
        _logs(_0=(1, 4, 8), _20=(23, 29)),
        before_3=_logs(_0=(1, 4, 8), _20=(23, 29)),
    ),
    18: Row(_steps(Dir.swap, lambda d: d.touch(f"{30:020d}.log.cleaned")), OUTPUT, without_snapshots=(10, 20)),
    19: Row(_steps(Dir.guard, Dir.swap, lambda d: d.delete(0)), _logs(_0=None), Refused),
    20: Row(
        _steps(Dir.swap, lambda d: d.remove(f"{0:020d}.index.swap")),
        OUTPUT,
        without_snapshots=(10, 20),
        rebuilt=0,
    ),
    21: Row(lambda d: d.touch(f"{5:020d}.index.swap"), ALL_SOURCES, left=("5.index.swap",)),
    22: Row(
        _steps(_final, lambda d: d.touch(f"{34:020d}.snapshot"), lambda d: d.touch(f"{34:020d}.log.deleted")),
        OUTPUT,
        without_snapshots=(10, 20),
    ),
    23: Row(lambda d: d.touch("foo.swap"), BrokerDoesNotStart, Refused, before_3=ALL_SOURCES, left=("foo.swap",)),
    24: Row(_steps(Dir.swap, _cut_swap), ValueError, CorruptLog, before_3=_logs(_0=OUT[:-1], _10=None, _20=None)),
    25: _three(Dir.guard, _stage(15, FILES, SCRATCH, ".swap"), broker=ALL_SOURCES, without_snapshots=()),
    26: _three(Dir.guard, Dir.swap, broker=ALL_SOURCES, without_snapshots=()),
    27: _three(Dir.swap),
    28: _three(_sources_aside),
    29: _three(_sources_aside, _stage(0, (".log",), ".swap", ""), left=_left(0)),
    30: _three(_sources_aside, *(_stage(base, (".log",), ".swap", "") for base in (0, 7)), left=_left(0, 7)),
    31: _three(_sources_aside, *(_stage(base, (".log",), ".swap", "") for base in (0, 7, 15)), left=_left(0, 7, 15)),
    32: _three(
        Dir.swap,
        kept=(1, 4, 7, 8, 15),
        broker={**THREE_OUTPUTS, 15: log_of((15,)), 20: log_of(SOURCES[20])},
        without_snapshots=(10,),
    ),
    33: _three(Dir.swap, kept=(7, 8, 15, 23), broker={**THREE_OUTPUTS, 0: b""}),
    34: _three(
        Dir.swap,
        kept=(1, 4, 7, 8),
        broker={**THREE_OUTPUTS, 15: b"", 20: log_of(SOURCES[20])},
        before_3={**THREE_OUTPUTS, 10: log_of(SOURCES[10]), 15: b"", 20: log_of(SOURCES[20])},
        without_snapshots=(10,),
    ),
    35: _three(Dir.swap, lambda d: d.remove(f"{7:020d}.index.swap"), rebuilt=7),
    36: _three(Dir.swap, lambda d: d.touch(f"{7:020d}.log.cleaned"), broker=_logs(_0=(1, 4)), ours=Refused),
    37: _three(
        Dir.swap,
        _no_sources,
        _stage(7, FILES, ".swap", ""),
        broker=_logs(_0=(1, 4), _10=None, _15=(15, 23), _20=None),
        ours=Refused,
        before_3=THREE_OUTPUTS,
    ),
    38: _three(Dir.swap, _no_sources),
    39: _three(
        Dir.swap,
        _stage(20, (".log",), "", ".deleted"),
        kept=(1, 4, 7, 8),
        broker={**{base: log for base, log in THREE_OUTPUTS.items() if base != 20}, 15: b""},
        before_3={**{base: log for base, log in THREE_OUTPUTS.items() if base != 20}, 10: log_of(SOURCES[10]), 15: b""},
    ),
    40: Row(
        _steps(Dir.swap, lambda d: d.delete(0, 10), _stage(20, (".log",), "", ".deleted"), _final_files),
        OUTPUT,
        without_snapshots=(10, 20),
    ),
    41: Row(_steps(_sources_aside, lambda d: d.name(0, (".log",))), OUTPUT, without_snapshots=(10, 20)),
    42: Row(_named, OUTPUT, without_snapshots=(10, 20)),
    43: Row(_steps(_named, Dir.guard), OUTPUT, without_snapshots=(10, 20)),
    44: Row(_steps(_named, Dir.guard, _without_index_swaps), OUTPUT, without_snapshots=(10, 20)),
    45: Row(
        _steps(_named, Dir.guard, _without_index_swaps, lambda d: d.remove(f"{0:020d}.log.swap")),
        OUTPUT,
        without_snapshots=(10, 20),
    ),
    46: Row(_named, _logs(_0=(), _10=None, _20=None), kept=(), without_snapshots=(10, 20)),
    47: _inside(Dir.guard, Dir.swap, broker=ALL_SOURCES, without_snapshots=()),
    48: _inside(Dir.swap),
    49: _inside(_sources_aside),
    50: _inside(_sources_aside, lambda d: d.name(7)),
    51: _inside(_named),
    52: _inside(_named, Dir.guard),
    53: _inside(
        _named, Dir.guard, _without_index_swaps, lambda d: d.remove(*(f"{base:020d}.log.swap" for base in (0, 7)))
    ),
    54: Row(
        _steps(Dir.guard, lambda d: d.stage(0, INDEXES, SCRATCH, ".swap")),
        ALL_SOURCES,
        left=_left(0),
    ),
    55: Row(_index_beside_rebuilt, OUTPUT, left=_left(0), without_snapshots=(10, 20)),
    56: _three(
        Dir.swap,
        kept=(1, 4, 7, 8, 23),
        continued=IN_GAP,
        broker=_logs(_0=(1, 4), _7=(7, 8), _10=None, _20=None, _23=(23,)),
        before_3=_logs(_0=(1, 4), _7=(7, 8), _20=None, _23=(23,)),
    ),
}


CUT = (24,)  # the models do not truncate logs, so for 2.4 to 2.8 only real brokers run this row


def test_every_row_of_the_table_has_a_test() -> None:
    page = (Path(next(iter(keytail.log.__path__))) / "SWAP.md").read_text()
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \| .* \| .* \| .* \|$", page, re.MULTILINE)]
    assert numbers == list(ROWS)


@pytest.mark.parametrize("number", ROWS)
def test_a_broker_does_what_the_row_states(number: int, tmp_path: Path) -> None:
    row, d = ROWS[number], Dir(tmp_path, ROWS[number])
    row.build(d)
    if isinstance(row.broker, type):
        with pytest.raises(row.broker):
            load(d.path).records()
        return
    assert {base: segment.log for base, segment in load(d.path).segments.items()} == row.broker


@pytest.mark.parametrize("is_2_4", [False, True])
@pytest.mark.parametrize("order", [list.sort, list.reverse])
@pytest.mark.parametrize("number", [number for number in ROWS if number not in CUT])
def test_an_older_broker_does_what_the_row_states(
    number: int, order: Callable[[list[str]], None], is_2_4: bool, tmp_path: Path
) -> None:
    row, d = ROWS[number], Dir(tmp_path, ROWS[number])
    row.build(d)
    found, left = load_before_3(d.path, order, is_2_4=is_2_4)
    assert {base: segment.log for base, segment in found.segments.items()} == row.of_before_3(is_2_4=is_2_4)
    assert sorted(left) == sorted(row.left_names)


class Watched(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, str]] = []  # an operation and its first argument

    def _change(self, operation: str, arguments: Any, action: Callable[[], Any]) -> Any:
        self.operations.append((operation, str(arguments[0])))
        return action()


def recovered(number: int, tmp_path: Path) -> list[tuple[str, str]]:
    """Recover the state of a row, and return each operation and the name of its first file."""
    d, watched = Dir(tmp_path, ROWS[number]), Watched()
    ROWS[number].build(d)
    recover(watched, str(d.path))
    return [(operation, argument.rpartition("/")[2]) for operation, argument in watched.operations]


@pytest.mark.parametrize("number", ROWS)
def test_recovery_does_what_the_row_states(number: int, tmp_path: Path) -> None:
    row, d = ROWS[number], Dir(tmp_path, ROWS[number])
    row.build(d)
    before, wanted = digest_of(tmp_path), row.broker if row.ours is None else row.ours
    if isinstance(wanted, type):
        with pytest.raises(wanted):
            recover(LOCAL, str(d.path))
        assert digest_of(tmp_path) == before
        return
    watched = Watched()
    done = recover(watched, str(d.path))
    assert done, "every row must have leftovers"
    assert watched.operations[-1][0] == "fsync_dir", "the result must be durable"
    loaded = load(d.path)
    assert {base: segment.log for base, segment in loaded.segments.items()} == wanted
    for base, segment in loaded.segments.items():
        data = segment_data(base, segment.log, None)
        if base == row.rebuilt:
            assert segment.index is None, "the broker must rebuild this index"
            assert not [suffix for suffix in INDEXES if (d.path / f"{base:020d}{suffix}").exists()]
        else:
            assert (segment.index, segment.time_index) == (data[".index"], data[".timeindex"])
    present = {file.name for file in d.path.iterdir()}
    assert not [name for name in present if name.count(".") > 1]
    assert {int(name[:20]) for name in present if name.endswith(INDEXES)} <= wanted.keys(), (
        "no index may be without a log"
    )
    kept = {10, 20, 30} - set(row.without_snapshots) | ({34} if number == 22 else set())
    assert {int(name[:20]) for name in present if name.endswith(".snapshot")} == kept
    assert recover(LOCAL, str(d.path)) == []


def test_invalid_swap_files_are_removed_durably_before_the_file_that_makes_them_invalid(tmp_path: Path) -> None:
    steps: list[str] = []
    for operation, argument in recovered(16, tmp_path):
        kind = argument.rpartition(".")[2]
        step = operation if operation != "unlink" else ".log.swap" if argument.endswith(".log.swap") else kind
        if not steps or steps[-1] != step:
            steps.append(step)
    assert steps == ["swap", "fsync_dir", ".log.swap", "fsync_dir", "cleaned", "fsync_dir"]


def test_sources_are_set_aside_durably_before_outputs_get_their_final_names(tmp_path: Path) -> None:
    """The two outputs have only `.swap` names, and the nine files of the sources have their own names."""
    steps = [operation for operation, _ in recovered(48, tmp_path)]
    assert steps[: steps.index("link")] == ["rename"] * 9 + ["fsync_dir"]


@pytest.mark.parametrize(("number", "is_linked"), [(5, True), (11, False)])
def test_only_files_of_an_output_with_records_get_their_final_names_as_links(
    number: int, is_linked: bool, tmp_path: Path
) -> None:
    """Otherwise, a broker would rename a `.swap` name over a link to the same file, which has no effect."""
    assert ("link" in [operation for operation, _ in recovered(number, tmp_path)]) == is_linked


def test_files_of_replaced_segments_are_removed_durably_before_the_files_that_identify_them(tmp_path: Path) -> None:
    """The log of a source has its `.deleted` name, but its indexes and its snapshot do not."""
    steps = recovered(40, tmp_path)
    first_deleted = [argument.endswith(".deleted") for _, argument in steps].index(True)
    live = {f"{20:020d}{suffix}" for suffix in (*INDEXES, ".snapshot")}
    assert live <= {argument for operation, argument in steps[:first_deleted] if operation == "unlink"}
    assert steps[first_deleted - 1][0] == "fsync_dir"


@pytest.mark.parametrize(("number", "base"), [(20, 0), (35, 7)])
def test_without_keytails_recovery_a_broker_retains_an_index_of_zeros(number: int, base: int, tmp_path: Path) -> None:
    d = Dir(tmp_path, ROWS[number])
    ROWS[number].build(d)
    index = load(d.path).segments[base].index
    assert index is not None and set(index) == {0}
