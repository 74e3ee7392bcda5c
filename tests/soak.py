"""`make soak`: the long tests behind the claim that nothing is lost, which do not fit into CI. Prints a table.

    python -m tests.soak                        # all parts; hours
    python -m tests.soak kills real-kills       # some of them
    KEYTAIL_SEED=7 KEYTAIL_KILLS=1000 KEYTAIL_REAL_KILLS=200 N=1000000 python -m tests.soak

Each part is a separate command, printed with its seed, and can be repeated alone. tests/SOAK.md lists what was found.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

SEED = os.environ.get("KEYTAIL_SEED") or str(random.SystemRandom().randrange(1, 2**32))
N = int(os.environ.get("N", "1000000"))
KILLS = os.environ.get("KEYTAIL_KILLS", "1000")
REAL_KILLS = os.environ.get("KEYTAIL_REAL_KILLS", "200")
LOGS = os.environ.get("KEYTAIL_FUZZ_LOGS", "1000")
DRAWS = os.environ.get("KEYTAIL_DRAWS", "20")
DRAWING = tuple(f"tests/{name}" for name in (
    "audit", "compact", "config", "dump", "erase", "expire", "format", "golden", "kernels", "log", "rebuild_index",
    "reference", "salvage", "source", "undo", "verify",
))  # fmt: skip
PYTEST = (sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-o", "timeout=0")


@dataclass(frozen=True)
class Part:
    """A part of the soak. `tried` parses the output of the command, and returns how much it tried, in words, and the
    number of losses.
    """

    name: str
    command: tuple[str, ...]
    variables: dict[str, str]
    tried: Callable[[str], tuple[str, int]]


def _of_table(heading: str, *columns: str) -> Callable[[str], tuple[str, int]]:
    """Return a parser that sums columns of the table that begins with `heading`."""

    def sums(text: str) -> tuple[str, int]:
        rows = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in text.splitlines()
                if line.startswith("| ")]  # fmt: skip
        at = next((number for number, row in enumerate(rows) if row[0] == heading), None)
        if at is None:
            return "nothing", 0
        names, found = rows[at], rows[at + 1 :]
        numbers = dict.fromkeys(names[1:], 0)
        for row in found:
            if len(row) == len(names) and not row[1].startswith("-"):
                for name, cell in zip(names[1:], row[1:], strict=True):
                    numbers[name] += int(cell.replace(",", ""))
        return ", ".join(f"{numbers[name]:,} {name}" for name in columns), numbers.get("losses", 0)

    return sums


def _of_hostile(text: str) -> tuple[str, int]:
    found, defects = re.findall(r"[\d,]+ inputs", text), re.findall(r"(\d+) defects", text)
    return ", ".join(found) or "nothing", sum(map(int, defects))


def _always(words: str) -> Callable[[str], tuple[str, int]]:
    """Return a parser for a part that fails if anything is lost."""
    return lambda text: (words, 0)


def parts() -> list[Part]:
    hostile = (sys.executable, "-m", "tests.hostile.fuzz", "--seed", SEED)
    kills = _of_table("killed", "kills", "states", "opened by Kafka")
    return [
        Part("kills", (*PYTEST, "tests/kills/test_forked.py", "tests/kills/test_protocols.py"),
             {"KEYTAIL_KILLS": KILLS}, kills),
        Part("real-kills", (*PYTEST, "tests/kills/test_real.py"), {"KEYTAIL_REAL_KILLS": REAL_KILLS}, kills),
        Part("cluster", (*PYTEST, "tests/run/test_cluster.py", "tests/import_/test_cluster.py"),
             {"KEYTAIL_SOAK": "1"}, _always("duplicates, retries, a lost executor")),
        Part("faults", (*PYTEST, "tests/crash", "tests/log/test_checkpoint.py", "tests/ledger/test_tables.py"),
             {"KEYTAIL_FAULTS": "all", "KEYTAIL_SOAK": "1"},
             _of_table("protocol", "stops", "faults", "states", "distinct")),
        Part("draws", (*PYTEST, "-m", "not spark and not interop", *DRAWING),
             {"KEYTAIL_DRAWS": DRAWS, "KEYTAIL_SOAK": "1"}, _always(f"random cases, {DRAWS} times as many")),
        Part("steps", (*PYTEST, "tests/kills/test_random_steps.py"),
             {"KEYTAIL_STEPS": "60", "KEYTAIL_LIVES": "20"}, _always("20 partitions of 60 random steps")),
        Part("owner", (*PYTEST, "tests/hostile/test_owner_attack.py"), {"KEYTAIL_ATTACKS": "40"},
             _always("40 attacks by the owner of the log dir")),
        Part("tests", (*PYTEST, "-m", "soak or one_of", "tests"), {"KEYTAIL_SOAK": "1"},
             _always("the tests with the marks `soak` and `one_of`")),
        Part("inputs", (*hostile, "--inputs", str(N)), {}, _of_hostile),
        Part("directories", (*hostile, "--directories", str(N // 100)), {}, _of_hostile),
        Part("interop", (*PYTEST, "tests/interop/test_differential.py", "tests/interop/test_audit.py"),
             {"KEYTAIL_FUZZ_LOGS": LOGS, "KEYTAIL_AUDIT_LOGS": LOGS}, _always(f"{LOGS} random logs")),
        Part("versions-of-kafka", (*PYTEST, "tests/versions_of_kafka"),
             {"KEYTAIL_KAFKA_VERSIONS": "soak", "KEYTAIL_SOAK": "1"},
             _always("brokers of 2.4.1, 3.0.2, 4.0.0 and 4.1.1")),
    ]  # fmt: skip


def run(part: Part) -> tuple[str, int, float, int]:
    """Run a part, forwarding its output. Return what it tried, the number of losses, the seconds and the exit status.
    """
    variables = {"KEYTAIL_SEED": SEED, **part.variables}
    words = [*(f"{key}={value}" for key, value in variables.items()), *part.command]
    print(f"\n=== {part.name}: {' '.join(words)}", flush=True)
    start_s, lines = time.monotonic(), []
    process = subprocess.Popen(
        part.command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        print(line, end="", flush=True)
    status = process.wait()
    return *part.tried("".join(lines)), time.monotonic() - start_s, status


def main() -> int:
    known = parts()
    wanted = sys.argv[1:] or [part.name for part in known]
    unknown = set(wanted) - {part.name for part in known}
    if unknown:
        print(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in known)}")
        return 2
    table = [(part.name, *run(part)) for part in known if part.name in wanted]
    print(f"\nseed {SEED}\n| What | Tried | Losses | Seconds | |\n| --- | --- | ---: | ---: | --- |")
    for name, tried, losses, seconds, status in table:
        print(f"| {name} | {tried} | {losses} | {seconds:.0f} | {'passed' if status == 0 else 'FAILED'} |")
    return int(any(losses or status for _, _, losses, _, status in table))


if __name__ == "__main__":
    sys.exit(main())
