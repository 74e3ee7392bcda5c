"""A fake broker and a fake keytail, for fast tests of rolling runs: FOLDER BROKER WHAT [ARGUMENT...].

FOLDER/BROKER.json defines the broker's behaviour, FOLDER/BROKER.state has its state, and FOLDER/events gets a line for
each action.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

folder, name, what, *words = sys.argv[1:]
FOLDER = Path(folder)
BEHAVIOUR: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
STATE = FOLDER / f"{name}.state"
ROW = {"topic": "t", "partition": 0, "error": ""}


def state() -> dict[str, Any]:
    return json.loads(STATE.read_text()) if STATE.exists() else {"running": True, "clean": False, "starts": 0}


def set_state(**changes: Any) -> None:
    STATE.write_text(json.dumps({**state(), **changes}))


def record(event: str) -> None:
    with (FOLDER / "events").open("a") as events:
        events.write(f"{name} {event}\n")


def keytail(command: str) -> int:
    if command == "doctor":
        now = state()
        path = f"/logs/{name}"
        rows = [
            {"check": path, "status": "ok", "found": "", "log_dir": path, "clean_shutdown": now["clean"], "held": None},
            {"check": "lock", "status": "ok", "found": "", "log_dir": path, "held": now["running"]},
        ]
        print(json.dumps(rows))
        return 0
    if command == "compact" and "--prepare" in words:
        if BEHAVIOUR.get("prepare") == "hangs":
            time.sleep(60)
        record("prepare")
        (FOLDER / f"{name}.prepare").write_text(json.dumps(words))
        assert state()["running"], "a compaction must be prepared while the broker runs"
        answer = BEHAVIOUR.get("prepare", {"status": 0, "rows": [{**ROW, "status": "prepared"}]})
        print(json.dumps(answer["rows"]))
        return int(answer["status"])
    if command == "downtime":
        record("downtime")
        with (FOLDER / "ledger").open("a") as ledger:
            ledger.write(json.dumps([name, *words]) + "\n")
        print(json.dumps([] if "downtime" in BEHAVIOUR else [{"broker": name, "status": "recorded"}]))
        return int(BEHAVIOUR.get("downtime", 0))
    if command == "compact" and "--execute" not in words:
        answer = BEHAVIOUR.get("plan", {"status": 0, "rows": [{**ROW, "status": "would-compact"}]})
        print(json.dumps(answer["rows"]))
        return int(answer["status"])
    record(command)
    (FOLDER / f"{name}.{command}").write_text(json.dumps(words))
    assert not state()["running"], f"keytail {command} must not run while the broker runs"
    done = {"compact": {"status": "compacted", "prepared": "committed"}, "verify": {"status": "sound"}}
    answer = BEHAVIOUR.get(command, {"status": 0, "rows": [{**ROW, **done[command]}]})
    if command == "compact" and "--ledger" in words:
        print("keytail: ledger: this is run 20260101T000000Z-3f2a91c0; to show it: ...", file=sys.stderr)
    if answer == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps(answer["rows"]))
    return int(answer["status"])


def main() -> int:
    now = state()
    if what == "keytail":
        return keytail(words[0])
    if what == "stop":
        record("stop")
        set_state(stops=now.get("stops", 0) + 1)
        if now.get("stops", 0) < BEHAVIOUR.get("stop_fails", 0):
            return 1
        how = BEHAVIOUR.get("stop", "clean")
        if how != "hangs":
            set_state(running=False, clean=how == "clean")
    elif what == "start":
        set_state(starts=now["starts"] + 1)
        if now["starts"] < BEHAVIOUR.get("start_fails", 0):
            record("start fails")
            return 1
        record("start")
        set_state(running=True, clean=False)
    elif what == "reachable":
        return 0 if now["running"] else 1
    else:
        print(BEHAVIOUR.get("wrong", {}).get(f"{what} {'after' if now['starts'] else 'before'}", ""))
    return 0


sys.exit(main())
