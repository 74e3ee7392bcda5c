"""Makes each call to an object store fail in turn, once or permanently. Partitions with an output record are complete,
no broker can start on an incomplete target, and after the next run the objects are those of an undisturbed run. CI
tries a fifth of the calls, selected by the seed; `make crash` tries all.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow.fs
import pytest
import tenacity.nap

from keytail.compact.out_of_place import object_store
from keytail.compact.out_of_place.target import Target
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.fs import LOCAL
from keytail.run.rows import DONE, ResultRow
from tests.chance import chance
from tests.crash.driver import EVERY_FAULT
from tests.crash.test_out_of_place import LOGS, make_first, run
from tests.crash.trees import read_tree
from tests.interop.conftest import fast_dir  # noqa: F401

URI = "s3://bucket/backup"


class Memory:
    """The methods of pyarrow's file systems that keytail uses, on a dictionary; an object exists when it has been
    closed. Call number `fails_at` fails, and with `lasting` all later calls.
    """

    type_name = "memory"

    def __init__(self, objects: dict[str, bytes], fails_at: int = 2**62, lasting: bool = True) -> None:
        self.objects, self.fails_at, self.lasting = objects, fails_at, lasting
        self.calls = 0

    def _call(self) -> None:
        self.calls += 1
        if self.calls == self.fails_at or (self.lasting and self.calls > self.fails_at):
            raise OSError("AWS Error: no answer")

    def open_output_stream(self, path: str) -> Any:
        self._call()
        return _Object(self, path)

    def open_input_stream(self, path: str) -> Any:
        self._call()
        if path not in self.objects:
            raise FileNotFoundError(path)
        return io.BytesIO(self.objects[path])

    def delete_file(self, path: str) -> None:
        self._call()
        if self.objects.pop(path, None) is None:
            raise FileNotFoundError(path)

    def get_file_info(self, of: Any) -> Any:
        self._call()
        if isinstance(of, str):
            return SimpleNamespace(size=len(self.objects[of]) if of in self.objects else None)
        below = f"{of.base_dir}/"
        file = pyarrow.fs.FileType.File
        found = [(path, data) for path, data in self.objects.items() if path.startswith(below)]
        return [SimpleNamespace(path=path, size=len(data), type=file) for path, data in found]


class _Object(io.BytesIO):
    def __init__(self, store: Memory, path: str) -> None:
        super().__init__()
        self.store, self.path = store, path

    def write(self, data: Any) -> int:
        self.store._call()
        return super().write(data)

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self.store._call()
            self.store.objects[self.path] = data


def send(root: Path, remote: Memory, scratch: Path) -> list[ResultRow] | str:
    """Run out of place with `remote` as the object store. Return the rows, or the text of the exception."""
    with (
        patch.object(object_store, "_connected", lambda uri: (remote, "bucket/backup")),
        patch.object(Target, "entries", Target._entries),
        patch.object(tenacity.nap.time, "sleep", lambda seconds: None),
    ):
        try:
            return run(LOCAL, root, out=URI, scratch_dir=str(scratch))
        except KeytailError as problem:
            return str(problem)


def without_records(objects: dict[str, bytes]) -> dict[str, bytes]:
    return {path: data for path, data in objects.items() if not path.endswith(names.OUTPUT_RECORD)}


@pytest.mark.one_of()
@pytest.mark.parametrize("lasting", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_failure_of_any_call_leaves_no_incomplete_target(fast_dir: Path, lasting: bool) -> None:  # noqa: F811
    root, scratch = fast_dir / "root", fast_dir / "scratch"
    scratch.mkdir()
    make_first(root)
    source = read_tree(root)
    whole = Memory({})
    assert all(row.status in DONE for row in send(root, whole, scratch))  # type: ignore[union-attr]
    wanted, meta = without_records(whole.objects), f"bucket/backup/{names.META_PROPERTIES}"
    assert meta in wanted
    every = range(1, whole.calls + 1)
    for number in every if EVERY_FAULT else chance().sample(every, whole.calls // 5):
        at = f"call {number}"
        remote = Memory({}, number, lasting)
        outcome = send(root, remote, scratch)
        assert read_tree(root) == source, at
        assert not list(scratch.iterdir()), at
        if lasting:
            failed = isinstance(outcome, str) or any(row.status not in DONE for row in outcome)
            assert failed, at
            assert "AWS Error: no answer" in str(outcome), at
        else:
            assert without_records(remote.objects) == wanted, f"{at}: a single failure was not retried"
        if meta in remote.objects:
            assert without_records(remote.objects) == wanted, at
        for log in LOGS.logs:
            below = f"bucket/backup/{log.name}/"
            record = remote.objects.get(below + names.OUTPUT_RECORD)
            if record is not None and json.loads(record)["is_finished"]:
                here = {path: data for path, data in without_records(remote.objects).items() if path.startswith(below)}
                assert here == {path: data for path, data in wanted.items() if path.startswith(below)}, at
        again = Memory(remote.objects)
        rows = send(root, again, scratch)
        assert not isinstance(rows, str) and all(row.status in DONE for row in rows), (at, rows)
        assert without_records(again.objects) == wanted, at
