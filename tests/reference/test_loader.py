"""Tests of the reference model of Kafka's loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import unpack
from tests.reference.batches import decode_log
from tests.reference.loader import load, load_alike


def test_a_difference_of_one_old_version_alone_is_found(tmp_path: Path) -> None:
    unpack(tmp_path)
    path = next(log for log in sorted(tmp_path.rglob("0*.log")) if len(decode_log(log.read_bytes())) > 1)
    directory = tmp_path / "one-0"
    directory.mkdir()
    (directory / path.name).write_bytes(path.read_bytes())
    assert load_alike(directory) == load(directory)
    # only a broker of 2.4 removes a segment that contains the base offset of an empty `.log.swap`
    inside = decode_log(path.read_bytes())[1].base_offset
    (directory / f"{inside:020d}.log.swap").touch()
    with pytest.raises(AssertionError):
        load_alike(directory)
