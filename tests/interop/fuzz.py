"""Draws random logs for rounds.py from a seed, counts the cases that they cover, and shrinks a log for which the two
sides differ: its traffic is reduced as long as it fails in the same way, and printed. The directories of a failing log
are kept under target/failed.
"""

from __future__ import annotations

import base64
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from tests.chance import SEED, cases
from tests.interop.kafka import TARGET, Kafka, KafkaError, Opened
from tests.interop.rounds import Again, Case, Circumstances, Mode, Round, Side
from tests.interop.traffic import Traffic, random_traffic

SHRINK_S = 60.0


def run_cases(
    kafka: Kafka,
    directory: Path,
    ours: Side,
    *,
    logs: int,
    mode: Mode = "each",
    rounds: int | None = None,
    from_inside: bool = True,
    again: Again | None = None,
    case_of: Callable[..., Case] = Case,
    configs: Mapping[str, Any] | None = None,
    enough: Callable[[Counter[str]], object] = lambda seen: True,
    **traffic_options: Any,
) -> Counter[str]:
    """Run `logs` random logs, and more until `enough` of the cases, and return the number of cases by kind. The first
    difference is shrunk and fails the test.

    `from_inside` lets rounds start and end inside segments: with small maps, and checkpoints at any offset. If `rounds`
    is None, each log has three to five. `case_of` creates the case of each log. `configs` override those that are
    drawn.
    """
    print(f"KEYTAIL_SEED={SEED} KEYTAIL_FUZZ_LOGS={logs} mode {mode} {traffic_options}", flush=True)
    only = os.environ.get("KEYTAIL_FUZZ_LOG")
    keep_going = os.environ.get("KEYTAIL_FUZZ_KEEP_GOING") == "1"  # count the differences by kind, without shrinking
    seen: Counter[str] = Counter()
    started = time.monotonic()
    for number in cases(logs, lambda: enough(seen)) if only is None else [int(only)]:
        rng = random.Random(f"{SEED}-{number}")
        traffic = random_traffic(rng, **traffic_options)
        traffic.configs |= configs or {}
        case = case_of(kafka, directory / f"log-{number}", seen, mode, again)
        try:
            for _ in range(rounds or rng.choice([3, 3, 4, 5])):
                if not case.play(ours, *_drawn(traffic, rng, from_inside=from_inside)):
                    break
        except Exception as problem:
            if keep_going:
                kind = ": ".join(_signature(problem))
                print(f"log {number}: {kind}", flush=True)
                seen[f"DIFFERENT {kind}"] += 1
                shutil.rmtree(case.home)
                continue
            kept = TARGET / "failed" / f"{SEED}-{number}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(case.home, kept / "as found")
            script, last = _shrunk(case, ours, problem, directory / "shrinking", kept / "shrunk", case_of)
            report = "\n".join([*map(_described, script), f"{type(last).__name__}: {last}"])
            (kept / "steps.txt").write_text(report + "\n")
            problem.add_note(f"KEYTAIL_SEED={SEED} KEYTAIL_FUZZ_LOG={number}, mode {mode}, {traffic_options}")
            problem.add_note(f"{case.now}; directories and steps.txt in {kept}; shrunk:\n{report}")
            raise
        shutil.rmtree(case.home)
        seen["logs"] += 1
    different = [name for name in seen if name.startswith("DIFFERENT")]
    print(f"{dict(sorted(seen.items()))} in {time.monotonic() - started:.1f} s", flush=True)
    assert not different, different
    return seen


def _drawn(traffic: Traffic, rng: random.Random, *, from_inside: bool) -> tuple[Round, Any]:
    """Draw the next round of a log; return it with a function that draws its circumstances when the traffic is written.
    """
    options = dict(traffic.options)
    steps = traffic.steps()

    def draw(opened: Opened, checkpoint: int | None) -> Circumstances:
        start, end = opened.log_start_offset, opened.log_end_offset
        assert (start, end) == (traffic.log_start_offset, traffic.log_end_offset)
        if rng.random() < 0.7:
            traffic.pass_time()
        if rng.random() < 0.15 and from_inside:
            checkpoint = rng.choice([None, rng.randint(start, end), end + 1, start - 1 if start else 0, end])
        return Circumstances(
            configs={**traffic.configs, **_changed_configs(rng, opened)},
            now_ms=traffic.clock_ms,
            log_start_offset=start,
            log_end_offset=end,
            high_watermark=end if rng.random() < 0.75 else rng.randint(start, end),
            checkpoint=checkpoint,
            map_max_entries=rng.choice([1, 2, 5, 20]) if rng.random() < 0.3 and from_inside else None,
            producer_id_expiration_ms=traffic.producer_id_expiration_ms,
        )

    files_seed = rng.randrange(2**32) if rng.random() < 0.5 else None
    return Round(steps, {**options, "clock_ms": options["clock_ms"]}, files_seed), draw


def _changed_configs(rng: random.Random, opened: Opened) -> dict[str, Any]:
    """Sometimes draw other segment limits than those used for writing, which the segments reach exactly or miss by one.
    """
    first = rng.randrange(len(opened.segments))
    run = opened.segments[first : first + rng.randint(2, 4)]
    changed: dict[str, Any] = {}
    if rng.random() < 0.2:
        changed["internal.segment.bytes"] = max(1, sum(item.log_bytes for item in run) - rng.randint(0, 1))
    if rng.random() < 0.1:
        largest = max(sum(item.index_bytes for item in run), sum(item.time_index_bytes for item in run))
        # Kafka cannot load an active segment whose indexes exceed the limit.
        active = opened.segments[-1]
        least = max(active.index_bytes, active.time_index_bytes) + 24
        changed["segment.index.bytes"] = max(largest - rng.randint(0, 1), least)
    if rng.random() < 0.1:
        changed["index.interval.bytes"] = rng.choice([0, 77, 300])
    return changed


def _shrunk(
    case: Case, ours: Side, problem: Exception, work: Path, kept: Path, case_of: Callable[..., Case]
) -> tuple[list[Round], Exception]:
    """Return the shortest script found that fails like `case`, with its exception; its directories are in `kept`."""
    script, last, wanted = case.rounds, problem, _signature(problem)
    deadline = time.monotonic() + SHRINK_S
    smaller = True
    while smaller and time.monotonic() < deadline:
        smaller = False
        candidates = _with_less(script)
        for candidate in candidates:
            if time.monotonic() > deadline:
                break
            failure = _replayed(case_of(case.harness, work, Counter(), case.mode, case.again), ours, candidate)
            if failure is not None and _signature(failure) == wanted:
                script, last, smaller = candidate, failure, True
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(work, kept)
                break
    shutil.rmtree(work, ignore_errors=True)
    return script, last


def _signature(problem: Exception) -> tuple[str, str]:
    """Return the type of a failure, and the beginning of its text without numbers."""
    text = str(problem).partition("\n")[0]
    return type(problem).__name__, re.sub(r"[0-9]+", "", text)[:40]


def _replayed(again: Case, ours: Side, script: list[Round]) -> Exception | None:
    """Run these rounds from the beginning. Return the exception, or None if there is none or Kafka refuses the traffic.
    """
    shutil.rmtree(again.home, ignore_errors=True)
    try:
        for round_ in _resequenced(script):
            if not again.play(ours, round_):
                return None
    except (KafkaError, RuntimeError):
        return None
    except Exception as failure:
        return failure
    return None


def _with_less(script: list[Round]) -> Iterator[list[Round]]:
    """Yield the script without a round, without steps (first without many), and without records, one removal at a time.
    """
    for at in range(len(script) - 1):
        yield [*script[:at], *script[at + 1 :]]
    longest = max(len(round_.steps) for round_ in script)
    size = longest
    while size:
        for at, round_ in enumerate(script):
            for first in range(0, len(round_.steps) if size <= len(round_.steps) else 0, size):
                yield _replaced(script, at, [*round_.steps[:first], *round_.steps[first + size :]])
        size //= 2
    for at, round_ in enumerate(script):
        for number, step in enumerate(round_.steps):
            records = step.get("batch", {}).get("records", ())
            for record in range(len(records) if len(records) > 1 else 0):
                fewer = deepcopy(step)
                del fewer["batch"]["records"][record]
                yield _replaced(script, at, [*round_.steps[:number], fewer, *round_.steps[number + 1 :]])


def _replaced(script: list[Round], at: int, steps: list[dict[str, Any]]) -> list[Round]:
    old = script[at]
    new = Round(steps, old.options, old.files_seed, old.now, old.own_checkpoint)
    return [*script[:at], new, *script[at + 1 :]]


def _resequenced(script: list[Round]) -> list[Round]:
    """Return the script with consecutive sequence numbers for the remaining batches of each producer."""
    script = deepcopy(script)
    following: dict[tuple[int, int], int] = {}
    for round_ in script:
        for step in round_.steps:
            batch = step.get("batch", {})
            if "producer_id" in batch:
                producer = batch["producer_id"], batch["producer_epoch"]
                batch["base_sequence"] = following.get(producer, 0)
                count = len(batch["records"])
                if "base_offset" in batch:
                    count = batch["last_offset"] - batch["base_offset"] + 1
                following[producer] = batch["base_sequence"] + count
    return script


def _described(round_: Round) -> str:
    lines = [f"round at {round_.now}, files_seed {round_.files_seed}"]
    for step in round_.steps:
        batch = step.get("batch")
        if batch is None:
            lines.append(f"  {step}")
            continue
        rest = {k: v for k, v in batch.items() if k != "records" and v not in (False, 0, None, "none")}
        lines.append(f"  batch {rest} {' '.join(map(_record_described, batch['records']))}")
    return "\n".join(lines)


def _record_described(record: Mapping[str, Any]) -> str:
    key, value = (None if record[name] is None else base64.b64decode(record[name]) for name in ("k", "v"))
    offset = f"{record['o']}:" if "o" in record else ""
    headers = f"+{len(record['h'])}h" if record.get("h") else ""
    shown = "null" if value is None else f"{len(value)}B"
    return f"({offset}{key!r}={shown}{headers} at {record['t']})"
