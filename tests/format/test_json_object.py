"""JSON that was damaged or edited in any way is reported as an error of its file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from keytail.compact.out_of_place.output_record import decode_record
from keytail.errors import CorruptLog, KeytailError, Refused, UsageProblem
from keytail.export.delta_table import _commit_info, _state_of
from keytail.format.json_object import parse_object
from keytail.log.fs import LOCAL
from keytail.log.import_record import parse_record
from keytail.source.options import _json
from keytail.undo.manifest import MANIFEST, read_manifest

LIB = Path(__file__).parents[2] / "lib" / "keytail"
DEEP = 100_000
DAMAGED = {
    "deep lists": "[" * DEEP + "]" * DEEP,
    "deep objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "deep in a field": '{"version": 1, "files": ' + "[" * DEEP + "]" * DEEP + "}",
    "deep and truncated": "[" * DEEP,
    "empty": "",
    "truncated": '{"version": 1',
    "a list": "[1]",
    "a string": '"version"',
    "null": "null",
    "a number of too many digits": '{"version": ' + "9" * 5000 + "}",
    "not UTF-8": "\udcff",
}


def test_an_object_is_parsed_into_its_fields() -> None:
    for text in ('{"a": [1, {"b": null}]}', b'{"a": [1, {"b": null}]}'):
        assert parse_object(text) == {"a": [1, {"b": None}]}


def _manifest(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(data)
    read_manifest(LOCAL, str(tmp_path))


def _commit(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "0.json"
    file.write_bytes(data)
    if _commit_info(file) == {}:  # an empty file has this result
        raise Refused("no commit")


def _state(tmp_path: Path, data: bytes) -> None:
    if _state_of(data.decode(errors="replace")) is None:
        raise Refused("no state")


READERS: dict[str, tuple[Callable[[Path, bytes], object], type[Exception]]] = {
    "manifest of a backup": (_manifest, CorruptLog),
    "record of an output": (lambda _, data: decode_record(data, "here"), CorruptLog),
    "record of an import": (lambda _, data: parse_record(data), ValueError),
    "commit of an export": (_commit, Refused),
    "state of an export": (_state, Refused),
    "option of the source": (lambda _, data: _json("assign", data.decode(errors="replace")), UsageProblem),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_json_is_reported_as_a_problem_of_its_file(reader: str, damage: str, tmp_path: Path) -> None:
    read, problem = READERS[reader]
    with pytest.raises(problem) as found:
        read(tmp_path, DAMAGED[damage].encode(errors="surrogateescape"))
    if "deep" in damage and reader not in ("commit of an export", "state of an export"):
        assert "nested too deeply" in str(found.value)
    assert isinstance(found.value, KeytailError | ValueError)


def test_a_number_out_of_range_is_damage() -> None:
    text = b'{"version": 1, "progress": "done", "import_id": "a", "base_offset": 1e999}'
    with pytest.raises(ValueError, match="another type"):
        parse_record(text)


def test_all_other_files_are_parsed_by_the_same_function() -> None:
    """The exceptions are Avro schemas and keys, data that one process passes to another of the same run, the text of
    Arrow's and deltalake's schemas, and files of keytail itself.
    """
    found = {str(path.relative_to(LIB)) for path in LIB.rglob("*.py") if re.search(r"json\.loads?\(", path.read_text())}
    own = {"cli/avro_schemas.py", "erase/avro.py", "export/avro.py", "run/watching.py", "import_/slices.py"}
    own |= {"values.py", "ledger/without_spark.py", "run/kernels.py", "format/kafka_messages.py"}
    assert found - own == {"format/json_object.py"}
