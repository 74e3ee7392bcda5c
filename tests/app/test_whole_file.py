"""Files that a run writes at its end: whole, or as they were."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import pytest

from keytail.app.stopping import Stopped
from keytail.app.whole_file import write_whole


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), Stopped(15), ValueError("no text")])
def test_a_file_is_as_it_was_where_writing_it_fails(problem: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("before")

    def write(file: TextIO) -> None:
        file.write("half")
        raise problem

    with pytest.raises(type(problem)):
        write_whole(str(path), write)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("rows", "before")]
    write_whole(str(path), lambda file: file.write("after"))
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("rows", "after")]
