"""Passes damaged bytes to every parser in separate processes, and reports each input that reveals a defect.

`python -m tests.hostile.fuzz --seed 1 --inputs 1000000`. An input is identified by seed and number; `--only N` (with
--inputs 1 or --directories 1) runs one again, in this process, with its traceback. If a process dies or hangs, the
input that caused this is reported; memory is limited. A defect is reported once per place in the code.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import faulthandler
import functools
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests import golden
from tests.run.kernel_steps import run_all

BATCH = 4000
STUCK_S = 30.0  # CPU time
IDLE = 20  # a multiple of STUCK_S in wall-clock time, after which an input is considered to wait forever
MEMORY_BYTES = 2 << 30  # the memory that a process may use in addition to that after the warm-up
_NUMBER = struct.Struct("q")


@dataclass
class Tally:
    """The inputs that were run, and their defects. `defects` has the numbers of the inputs by place and reason."""

    inputs: collections.Counter[str] = field(default_factory=collections.Counter)
    defects: dict[str, list[int]] = field(default_factory=dict)
    tracebacks: dict[str, str] = field(default_factory=dict)

    def add_defect(self, key: str, number: int, trace: str) -> None:
        self.defects.setdefault(key, []).append(number)
        self.tracebacks.setdefault(key, trace)

    def __str__(self) -> str:
        lines = [
            f"{sum(self.inputs.values()):,} inputs: " + ", ".join(f"{k} {v:,}" for k, v in self.inputs.most_common())
        ]
        for key, numbers in self.defects.items():
            lines += [f"DEFECT {key}: {len(numbers)} inputs, first {min(numbers)}", self.tracebacks[key]]
        return "\n".join([*lines, f"{len(self.defects)} defects"])


One = Callable[[int, int], str]  # seed and number -> kind of input


class Runner:
    """Runs `one` on numbered inputs in forked processes."""

    def __init__(self, item: One, seed: int, *, memory_bytes: int = MEMORY_BYTES, stuck_s: float = STUCK_S) -> None:
        self._one, self._seed, self._memory, self._stuck_s = item, seed, memory_bytes, stuck_s
        self.tally = Tally()

    def run(self, first: int, count: int, jobs: int = 1, batch: int = BATCH) -> Tally:
        """Run all inputs. Return the tally, even after an interruption."""
        waiting = collections.deque((at, min(at + batch, first + count)) for at in range(first, first + count, batch))
        running: list[_Child] = []
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_Child(self._one, self._seed, *waiting.popleft(), self._memory))
                time.sleep(0.02)
                for child in list(running):
                    if child.is_done(self._stuck_s):
                        running.remove(child)
                        rest = child.finish(self.tally)
                        if rest is not None:
                            waiting.appendleft(rest)
        except KeyboardInterrupt:
            for child in running:
                child.kill()
        return self.tally


class _Child:
    def __init__(self, item: One, seed: int, first: int, end: int, memory_bytes: int) -> None:
        self._first, self._end = first, end
        self._at = mmap.mmap(-1, _NUMBER.size)
        self._reported = tempfile.TemporaryFile()
        self._seen, self._since, self._cpu_before_s = -1, time.monotonic(), 0.0
        self._why = ""
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                self._work(item, seed, memory_bytes)
                status = 0
            finally:
                os._exit(status)

    def _work(self, item: One, seed: int, memory_bytes: int) -> None:
        faulthandler.enable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
        for number in range(self._first, self._end):
            self._at[:] = _NUMBER.pack(number)
            try:
                line = f"ok {item(seed, number)}"
            except BaseException as problem:
                frames = [f for f in traceback.extract_tb(problem.__traceback__) if f.name != "expect"]
                place = frames[-1]
                key = f"{type(problem).__name__} at {os.path.basename(place.filename)}:{place.lineno}"
                text = traceback.format_exc()[-3000:].replace("\n", "\x1e")
                line = f"defect {number} {key}\x1f{text}"
            self._reported.write(f"{line}\n".encode(errors="backslashreplace"))
        self._reported.flush()

    @property
    def _number(self) -> int:
        return int(_NUMBER.unpack(self._at[:])[0])

    def is_done(self, stuck_s: float) -> bool:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            self._why = "" if code == 0 else f"the process died: {signal.Signals(-code).name if code < 0 else code}"
            return True
        if self._number != self._seen:
            self._seen, self._since, self._cpu_before_s = self._number, time.monotonic(), self._cpu_s()
        elif self._cpu_s() - self._cpu_before_s > stuck_s or time.monotonic() - self._since > IDLE * stuck_s:
            self.kill()
            self._why = f"no end after {stuck_s:.0f} s"
            return True
        return False

    def _cpu_s(self) -> float:
        """Return the child's CPU time, because on a busy machine a valid input may have to wait for long."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def finish(self, tally: Tally) -> tuple[int, int] | None:
        """Collect the results. Return the remaining range if the process did not complete."""
        self._reported.seek(0)
        for line in self._reported.read().decode().split("\n"):
            if line.startswith("ok "):
                tally.inputs[line[3:]] += 1
            elif line.startswith("defect "):
                head, _, text = line.partition("\x1f")
                _, number, key = head.split(" ", 2)
                tally.inputs["defective"] += 1
                tally.add_defect(key, int(number), text.replace("\x1e", "\n"))
        self._reported.close()
        if not self._why:
            return None
        # The last results of the process may have been in its buffer; in that case the previous inputs are not counted.
        tally.inputs["fatal"] += 1
        tally.add_defect(self._why, self._number, "")
        return (self._number + 1, self._end) if self._number + 1 < self._end else None


def parsers(root: str) -> One:
    """Return a function that runs a parser on an input; `targets` defines the share of each parser."""
    from tests.hostile.corpus import corpus
    from tests.hostile.parsers import targets

    of = targets(corpus(root))
    chosen = os.environ.get("KEYTAIL_HOSTILE_TARGET")
    names = [name for name, (share, _, _) in of.items() for _ in range(share) if chosen in (None, name)]

    def one(seed: int, number: int) -> str:
        rng = random.Random(f"{seed}/{number}")
        name = names[number % len(names)]
        _, make, take = of[name]
        take(make(rng), rng)
        return name

    return one


def directories(root: str) -> One:
    """Return a function that checks a whole log dir, on the fastest available file system."""
    from tests.hostile.corpus import corpus
    from tests.hostile.directories import one_of

    shared = Path("/dev/shm")
    place = tempfile.mkdtemp(prefix="hostile-", dir=shared if shared.is_dir() else None)
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    os.chmod(place, 0o755)
    return one_of(place, corpus(root))


_warm_kernels = functools.cache(run_all)


def warm(item: One, seed: int, n: int = 400) -> None:
    """Compile all kernels and run some inputs before processes are forked, so that their time limit does not include
    compilation.

    Failures are ignored here: the forked processes report them.
    """
    _warm_kernels()
    for number in range(n):
        try:
            item(seed, number)
        except Exception:
            continue


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    arguments.add_argument("--inputs", type=int, default=0)
    arguments.add_argument("--directories", type=int, default=0)
    arguments.add_argument("--first", type=int, default=0)
    arguments.add_argument("--only", type=int)
    arguments.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = arguments.parse_args()
    print(f"seed {given.seed}", flush=True)
    worst = 0
    with tempfile.TemporaryDirectory(prefix="hostile-") as work:
        root = str(golden.unpack(work))
        for item, count in ((parsers(root), given.inputs), (directories(root), given.directories)):
            if not count:
                continue
            if given.only is not None:
                print(item(given.seed, given.only))
                continue
            started = time.monotonic()
            warm(item, given.seed, min(count, 400 if item.__module__.endswith("fuzz") else 30))
            tally = Runner(item, given.seed).run(given.first, count, given.jobs, min(BATCH, max(count // 20, 50)))
            print(tally)
            print(f"{time.monotonic() - started:.0f} s", flush=True)
            worst |= bool(tally.defects)
    return worst


if __name__ == "__main__":
    sys.exit(main())
