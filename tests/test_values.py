"""Values of keytail are restored unchanged; other data is refused, and no code in it is run."""

from __future__ import annotations

import importlib
import json
import math
import pickle
import typing
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from keytail import values
from keytail.compact.map_phase.offset_map import OffsetMap
from keytail.compact.map_phase.survivors import Survivors
from keytail.compact.task import SourceCounts
from keytail.errors import CorruptLog, KeytailError
from keytail.format.batch import BATCH_TABLE
from keytail.format.control import ControlType
from keytail.log.replacement.replace import CleanFile, GroupOutput, OutputSegment, SnapshotFile
from keytail.run.tasks import Outcome
from keytail.values import NotAValue, from_bytes, from_parts, to_bytes, to_parts

FILE = CleanFile(".log", "0.log.run.clean", 5, "00ff")

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
data = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(plain, inner, max_size=4),
    max_leaves=12,
)


class Attack:
    """An object that leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.mark, "w")


@given(data)
def test_values_are_restored_unchanged(value: Any) -> None:
    again = from_bytes(to_bytes(value))
    assert again == value
    assert repr(again) == repr(value)  # 1 == True, but their representations differ


@given(of_numpy.arrays(of_numpy.scalar_dtypes(), of_numpy.array_shapes(min_dims=0, min_side=0)))
def test_arrays_are_restored_unchanged(array: np.ndarray) -> None:
    for item in (array, array.T):
        again = from_bytes(to_bytes(item))
        assert (again.dtype, again.shape) == (item.dtype, item.shape)
        assert again.tobytes() == item.tobytes()
        assert again.flags.writeable and again.flags.aligned


@pytest.mark.parametrize(
    "value",
    [
        GroupOutput((0, 7), (OutputSegment(0, (FILE, FILE)),), (SnapshotFile(9, "9.snapshot"),)),
        Outcome(SourceCounts(1, 2, 3), None, "host", 1, 2),
        ControlType.COMMIT,
        Counter("aab"),
        {1, "a", (2, b"")},
        frozenset({1.5, None}),
        np.int64(7),
        bytearray(b"x"),
        "/a\udc80",
        math.inf,
    ],
)
def test_classes_of_keytail_are_restored_unchanged(value: Any) -> None:
    again = from_bytes(to_bytes(value))
    assert again == value
    assert type(again) is type(value)


def test_an_error_is_restored_with_its_position() -> None:
    problem = CorruptLog("a byte is wrong", path="/x", byte_position=7, offset=3, remedy="Look")
    again = from_bytes(to_bytes(Outcome(None, problem))).problem
    assert type(again) is CorruptLog
    assert str(again) == str(problem)
    assert again.args == problem.args


def test_tables_and_maps_are_restored_without_a_copy() -> None:
    offset_map, table = OffsetMap(1 << 16), np.arange(300).view(np.uint8)[: 2 * BATCH_TABLE.itemsize].view(BATCH_TABLE)
    words = np.arange(100, dtype=np.uint64)
    offset_map.put_all(words, words, words.view(np.int64), 100)
    parts = [np.frombuffer(bytearray(part), np.uint8) for part in to_parts((Survivors(offset_map, 3), table))]
    survivors, again = from_parts(parts)
    survivors.offset_map.check()
    found = np.empty(100, np.int64)
    survivors.offset_map.get_all(words, words, words.view(np.int64), 100, found)
    assert found.tolist() == list(range(100))
    assert again.tobytes() == table.tobytes()
    assert any(np.shares_memory(survivors.offset_map.slots, part) for part in parts)


@pytest.mark.parametrize("value", [object(), Attack(Path("x")), len, CleanFile, np.array([object()]), 1j, Path("x")])
def test_values_of_other_types_are_not_serialized(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be serialized: it is not a data class"):
        to_bytes([value])


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    attack = pickle.dumps(Attack(tmp_path / "mark"))
    framed = values.sizes_of([memoryview(attack)]) + attack
    for data in (attack, framed):
        with pytest.raises(NotAValue):
            from_bytes(data)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("classes", "value"),
    [
        ([["os:system", []]], {"of": 0, "is": []}),
        ([["subprocess:Popen", ["args"]]], {"of": 0, "is": ["id"]}),
        ([["keytail.run.tasks:attempt_one", []]], {"of": 0, "is": []}),
        ([["keytail.log.replacement.replace:os.path", []]], {"of": 0, "is": []}),
        ([["keytail.run.spark.isolation:LocalDirs", ["paths"]]], {"of": 0, "is": [[]]}),
        ([["keytail.log.replacement.replace:CleanFile", ["suffix", "name"]]], {"of": 0, "is": ["", ""]}),
        (
            [["keytail.log.replacement.replace:CleanFile", ["suffix", "name", "size_bytes", "digest_hex"]]],
            {"of": 0, "is": [1]},
        ),
        ([["keytail.no.module:X", []]], {"of": 0, "is": []}),
        ([["keytail..x:X", []]], {"of": 0, "is": []}),
        ([], {"of": 0, "is": []}),
        ([], {"array": [1, "|O", [1]]}),
        ([], {"array": [1, "<i8", [1 << 60]]}),
        ([], {"array": [0, "<i8", [1]]}),
        ([], {"array": [9, "<i8", [1]]}),
        ([], {"array": [1, "no dtype", [1]]}),
        ([], {"bytes": -1}),
        ([], {"eval": "1"}),
        ([], {"tuple": [], "list": []}),
        ([], {"set": [[]]}),
        ([], {"dict": [1]}),
        (7, 7),
    ],
)
def test_names_of_other_classes_are_refused(classes: Any, value: Any) -> None:
    header = memoryview(json.dumps({"classes": classes, "value": value}).encode())
    body = memoryview(bytes(8))
    with pytest.raises(NotAValue):
        from_bytes(b"".join((values.sizes_of([header, body]), header, body)))


@given(st.integers(0, 10_000), st.binary(max_size=4))
def test_damaged_bytes_are_refused_or_give_another_value(position: int, by: bytes) -> None:
    good = to_bytes((GroupOutput((0, 7), (OutputSegment(0, (FILE,)),)), np.arange(5)))
    position %= len(good)
    with_damage = good[:position] + by + good[position + len(by) :]
    try:
        from_bytes(with_damage)
    except NotAValue as problem:
        assert isinstance(problem, KeytailError)


def test_deep_nesting_is_refused() -> None:
    header = memoryview(b'{"classes":[],"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    with pytest.raises(NotAValue):
        from_bytes(values.sizes_of([header]) + bytes(header))


def test_no_code_of_a_class_is_run_when_its_value_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = to_bytes(replace(FILE, name="other"))
    monkeypatch.setattr(CleanFile, "__init__", lambda *_, **__: pytest.fail("the class was called"))
    assert from_bytes(data).name == "other"


ANSWERS = (
    "compact.cleaner:Findings", "export.plan:Exported", "compact.fan_out.bits:ShardBits",
    "compact.fan_out.proof:Verdict", "compact.fan_out.slices:Settled", "compact.fan_out.slices:Survey",
    "compact.fan_out.write:Written", "export.latest:Latest", "compact.proof.state:ProofSoFar",
    "compact.task:CleaningResult", "audit.stages:Audit", "audit.shard:ShardFindings", "audit.scan:Gap",
    "verify.task:VerifyReport", "import_.segments:Written", "run.contents:Answer",
    "doctor.executors:Seen", "rebuild_index.tasks:Scan", "rebuild_index.tasks:SegmentResult", "run.tasks:Outcome",
)  # fmt: skip


def classes_in(hint: Any, found: set[type]) -> set[type]:
    """Return all classes that a value of this type may contain."""
    for part in typing.get_args(hint):
        classes_in(part, found)
    if isinstance(hint, type) and hint not in found and hint.__module__.startswith("keytail."):
        found.add(hint)
        for part in typing.get_type_hints(hint).values():
            classes_in(part, found)
    return found


@pytest.mark.parametrize("name", ANSWERS)
def test_results_of_tasks_can_be_serialized(name: str) -> None:
    module, _, attribute = name.partition(":")
    imported = importlib.import_module(f"keytail.{module}")
    found = classes_in(getattr(imported, attribute), set())
    assert found
    assert [kind for kind in found if values._fields(kind) is None] == []
