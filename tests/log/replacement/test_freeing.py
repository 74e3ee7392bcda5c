"""Names are removed immediately, and the space of the files is freed by the end of the block, even after an error in
it.
"""

import errno

import pytest

from keytail.log.fs import FileSystem
from keytail.log.replacement import freeing as module
from keytail.log.replacement.freeing import Freeing
from tests.crash.driver import open_files


@pytest.fixture(autouse=True)
def _all_files_are_large(monkeypatch):
    monkeypatch.setattr(module, "LARGE_BYTES", 0)


class Refusing(FileSystem):
    def _change(self, operation, arguments, action):
        if operation == "unlink":
            raise OSError(errno.EIO, "Input/output error", arguments[0])
        return action()


def open_below(folder):
    return [path for path in open_files() if str(folder) in path]


def test_a_name_is_removed_immediately_and_no_file_remains_open(tmp_path):
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_bytes(b"x")
    with Freeing(FileSystem()) as freeing:
        for path in paths:
            freeing.unlink(str(path))
            assert not path.exists()
    assert open_below(tmp_path) == []


def test_a_file_that_cannot_be_removed_is_reported_and_not_left_open(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x")
    with pytest.raises(OSError, match="Input/output"), Freeing(Refusing()) as freeing:
        freeing.unlink(str(path))
    assert path.exists()
    assert open_below(tmp_path) == []


def test_a_small_file_is_removed_without_being_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGE_BYTES", 2)
    for name, size in (("small", 1), ("large", 2)):
        (tmp_path / name).write_bytes(b"x" * size)
    closed = []

    class RecordingCloses(FileSystem):
        def close(self, fd):
            closed.append(fd)
            super().close(fd)

    with Freeing(RecordingCloses()) as freeing:
        freeing.unlink(str(tmp_path / "small"))
        assert closed == []
        freeing.unlink(str(tmp_path / "large"))
    assert len(closed) == 1
    assert list(tmp_path.iterdir()) == []
