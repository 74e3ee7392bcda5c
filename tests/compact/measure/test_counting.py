"""The file system of a measurement: no operation changes anything, and the rate limit counts bytes read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from keytail.compact.measure.counting import CountingFileSystem
from keytail.compact.measure.estimating import estimate_partition
from keytail.compact.measure.measuring import measure_partition
from keytail.log.pace import Pace
from keytail.log.quiet import cached_pages
from tests.chance import chance
from tests.compact.measure.logs import task_of_many_batches
from tests.log_dirs import snapshot


@pytest.fixture
def on_disk() -> Iterator[Path]:
    path = Path(f"/var/tmp/keytail-measure-{os.getpid()}")  # files in /tmp may be in memory and not in the page cache
    yield path
    shutil.rmtree(path)


def test_no_operation_changes_anything(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    before, fs = snapshot(tmp_path), CountingFileSystem()
    like = fs.stat(str(file))
    made = fs.create(f"{tmp_path}/b", like)
    assert fs.write(made, b"12345") == 5
    fs.truncate(made, 2)
    fs.fsync(made)
    fs.close(made)
    fs.write_file(f"{tmp_path}/c", b"xyz", like)
    fs.put_file(str(file), b"xyz", like, f"{tmp_path}/d")
    open_file = fs.open_write(str(file))
    assert fs.write_at(open_file, b"xyz", 0) == 3
    fs.truncate(open_file, 0)
    fs.close(open_file)
    fs.mkdir(f"{tmp_path}/e", like)
    fs.rename(str(file), f"{tmp_path}/f")
    fs.link(str(file), f"{tmp_path}/g")
    fs.set_mtime_ns(str(file), 1)
    fs.unlink(str(file))
    fs.fsync_dir(str(tmp_path))
    assert snapshot(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["a"]


@pytest.mark.parametrize("from_a_sample", [False, True])
def test_the_limit_counts_bytes_read_and_pages_are_dropped(on_disk: Path, from_a_sample: bool) -> None:
    class Counting(Pace):
        spent = 0

        def spend(self, n_bytes: int) -> None:
            self.spent += n_bytes

    task = task_of_many_batches(chance(), on_disk / "t-0")
    logs = sorted((on_disk / "t-0").glob("*.log"))
    log_bytes = sum(path.stat().st_size for path in logs)
    for path in logs:
        fd = os.open(path, os.O_RDWR)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    pace = Counting(1)
    if from_a_sample:
        estimate_partition(CountingFileSystem(pace), task, chance(), draws=10, measured_bytes=0)
        assert log_bytes < pace.spent < 2 * log_bytes, "all bytes must be read once, and drawn batches twice"
    else:
        measure_partition(CountingFileSystem(pace), task)
        assert 2 * log_bytes <= pace.spent < 2.1 * log_bytes, (
            "all bytes must be read twice, to map and to decide, and none written"
        )
    for path in logs:
        fd = os.open(path, os.O_RDWR)
        assert not cached_pages(fd, 0, path.stat().st_size).any()
        os.close(fd)
