"""The state that a pass saves for the next is data only: a file that replaces it cannot make the next pass run code."""

from __future__ import annotations

import hashlib
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keytail.compact.saved_state import load_state, save_state
from keytail.compact.task import CleaningTask
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.fs import LOCAL
from keytail.log.replacement.replace import CleanFile
from tests.compact.test_passes import ACTIVE, task_of
from tests.test_values import Attack


@pytest.fixture
def task(tmp_path: Path) -> CleaningTask:
    return task_of(tmp_path / "t-0", [[ACTIVE]], 0)


def with_replaced_file(task: CleaningTask, data: bytes) -> CleanFile:
    """Replace a saved file with `data`, and its digest in the result of the task."""
    file = save_state(LOCAL, task, names.PROOF, 7)
    Path(task.scratch_path, file.name).write_bytes(data)
    return replace(file, size_bytes=len(data), digest_hex=hashlib.blake2b(data).hexdigest())


def test_a_pickle_in_place_of_a_scratch_file_is_not_run(task: CleaningTask, tmp_path: Path) -> None:
    attack = pickle.dumps(Attack(tmp_path / "mark"))
    file = with_replaced_file(task, struct.pack("<QQ", 1, len(attack)) + attack)
    with pytest.raises(KeytailError, match=rf"has changed since it was written \(.*{file.name}.*Run again"):
        load_state(LOCAL, task, file)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, struct.pack("<Q", 1 << 58), struct.pack("<QQ", 1, 1 << 62)])
def test_a_damaged_scratch_file_is_reported(task: CleaningTask, data: bytes) -> None:
    file = with_replaced_file(task, data)
    with pytest.raises(KeytailError, match="has changed since it was written"):
        load_state(LOCAL, task, file)


def test_a_file_other_than_the_one_written_is_refused(task: CleaningTask) -> None:
    file = save_state(LOCAL, task, names.PROOF, np.arange(1000))
    assert load_state(LOCAL, task, file).tolist() == list(range(1000))
    other = save_state(LOCAL, replace(task, attempt="other"), names.PROOF, np.arange(1000, 2000))
    Path(task.scratch_path, other.name).replace(Path(task.scratch_path, file.name))
    with pytest.raises(KeytailError, match="has changed since it was written"):
        load_state(LOCAL, task, file)
