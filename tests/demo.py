"""Demonstrates the main job on a copy of the golden logs (`python -m tests.demo`): plan, compact, verify, results.

Every step is the real command line in a separate process, as an operator would type it. This module only unpacks the
logs first, and sums up the rows at the end.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.golden import TOPICS, unpack

KEYTAIL = Path(sys.executable).with_name("keytail")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="unpack here, and leave the result (default: a temporary folder)")
    parser.add_argument("--master", help="run on Spark, with this master (default: in processes of this host)")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        return demo(options.keep, options.master)
    with tempfile.TemporaryDirectory(prefix="keytail-demo-") as folder:
        return demo(Path(folder), options.master)


def demo(folder: Path, master: str | None) -> int:
    print_message("1. A log dir that a real Kafka 4.3.1 broker wrote and closed")
    log_dir = unpack(folder)
    properties = log_dir.parent / "server.properties"
    logs = list(log_dir.glob("*-*/*.log"))
    print(f"{log_dir}: {len({log.parent for log in logs})} partitions, {len(logs)} segments")
    print("The topics' own settings are taken from the metadata log among them, so no topic needs to be named.")
    choice = ["--log-dirs", str(log_dir), "--config", str(properties)]

    print_message("2. keytail plan: what is due, and what is not")
    planned = run("plan", choice)
    if planned.returncode not in (0, 3):
        return planned.returncode

    print_message(f"3. keytail compact --execute: {f'on Spark, {master}' if master else 'in processes of this host'}")
    started_s = time.monotonic()
    flags = ["--execute", *(["--master", master] if master else []), "--output", "json"]
    compacted = run("compact", [*choice, *flags], capture=True)
    seconds = time.monotonic() - started_s
    if compacted.returncode not in (0, 3):
        return compacted.returncode
    rows = json.loads(compacted.stdout)

    print_message("4. keytail verify: every checksum, every order, every index entry")
    verified = run("verify", choice)

    summary(rows, seconds, verified.returncode)
    return verified.returncode


def print_message(title: str) -> None:
    print(f"\n=== {title}", flush=True)


def run(command: str, arguments: list[str], *, capture: bool = False) -> subprocess.CompletedProcess[str]:
    print(f"$ keytail {command} {shlex.join(arguments)}", flush=True)
    return subprocess.run(
        [str(KEYTAIL), command, *arguments], stdout=subprocess.PIPE if capture else None, text=True, check=False
    )


def summary(rows: list[dict[str, Any]], seconds: float, verified: int) -> None:
    print_message("The result")
    by_topic: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_topic[row["topic"]].append(row)
    print(f"{'topic':24} {'partitions':>10} {'log bytes':>22} {'records':>18} {'segments':>11}  result")
    for topic, of_topic in sorted(by_topic.items()):
        statuses = ", ".join(sorted({row["status"] for row in of_topic}))
        print(
            f"{topic:24} {len(of_topic):>10} {arrow(of_topic, 'bytes'):>22} {arrow(of_topic, 'records'):>18} "
            f"{arrow(of_topic, 'segments'):>11}  {statuses}"
        )
    done = [row for row in rows if row["status"] == "compacted"]
    before, after = sum(row["bytes_before"] for row in done), sum(row["bytes_after"] for row in done)
    print(
        f"\n{len(done)} of {len(rows)} partitions compacted in {seconds:.1f} s: "
        f"{before:,} -> {after:,} bytes ({100 * (before - after) / max(before, 1):.0f} % less)."
    )
    print("Offsets are unchanged: where a record was removed there is a gap, as after Kafka's own cleaner.")
    left = [row for row in rows if row["status"] != "compacted"]
    if left:
        print("\nLeft as they were, and why:")
    for row in left:
        name = f"{row['topic']}-{row['partition']}"
        about = TOPICS[row["topic"]].what if row["topic"] in TOPICS else ""
        print(f"  {name} ({about}) {row['status']}: {row['error']}")
    if verified != 0:
        print(f"\nverify ended with status {verified}: see above. Do not start a broker on this.")
        return
    print("\nverify found nothing wrong. A broker that starts on this log dir finds a clean shutdown, opens every")
    print("partition without recovery, and serves, at its old offset, each key's latest record that was not aborted.")


def arrow(rows: list[dict[str, Any]], what: str) -> str:
    """Return the sums before and after, over the partitions for which both are known."""
    known = [row for row in rows if row[f"{what}_before"] is not None and row[f"{what}_after"] is not None]
    if not known:
        return ""
    before, after = sum(r[f"{what}_before"] for r in known), sum(r[f"{what}_after"] for r in known)
    return f"{before:,}" if before == after else f"{before:,} -> {after:,}"


if __name__ == "__main__":
    sys.exit(main())
