from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from keytail.log.pace import Pace, PacedFileSystem


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


@pytest.mark.parametrize("work_s", [0.0, 0.004, 0.02])
def test_the_rate_does_not_depend_on_the_duration_of_the_work(work_s: float) -> None:
    clock = Clock()
    pace = Pace(1_000_000, clock, clock.sleep)
    for _ in range(1000):
        clock.now_s += work_s
        pace.spend(10_000)
    assert clock.now_s - 100 == pytest.approx(max(10.0, 1000 * work_s), rel=0.02)


def test_a_pause_does_not_increase_the_later_rate() -> None:
    clock = Clock()
    pace = Pace(1000, clock, clock.sleep)
    clock.now_s += 3600
    start_s = clock.now_s
    pace.spend(5000)
    assert 4.8 < clock.now_s - start_s <= 5


def test_threads_share_one_rate_limit() -> None:
    """No spent byte is lost, although each thread reads the clock while other threads spend bytes."""
    clock = Clock()

    def slow() -> float:
        time.sleep(0)  # let another thread run
        return clock.now_s

    slept: list[float] = []
    pace = Pace(1000, slow, slept.append)
    threads = [threading.Thread(target=lambda: [pace.spend(10) for _ in range(200)]) for _ in range(4)]
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch_s)
    assert max(slept) == pytest.approx(8.0), (
        "800 times 10 bytes at 1000 bytes/s must take 8 s"
    )


def test_reads_and_writes_are_limited_together(tmp_path: Path) -> None:
    clock = Clock()
    fs = PacedFileSystem(Pace(1000, clock, clock.sleep))
    path = str(tmp_path / "file")
    fd = fs.create(path, None)
    fs.write(fd, b"x" * 2000)
    fs.close(fd)
    assert clock.now_s == pytest.approx(102, abs=0.2)
    assert fs.read_bytes(path) == b"x" * 2000
    assert clock.now_s == pytest.approx(104, abs=0.2)
    fd = fs.open_read(path)
    assert fs.read_into(fd, bytearray(3000), 0) == 2000
    fs.close(fd)
    assert clock.now_s == pytest.approx(106, abs=0.2)
