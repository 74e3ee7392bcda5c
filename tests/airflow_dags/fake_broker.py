"""A fake broker and a fake keytail, for fast tests of rolls: FOLDER BROKER WHAT [ARGUMENT...].

FOLDER/BROKER.json defines its behaviour, FOLDER/BROKER.state contains its state; FOLDER/events gets a line for each
action.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

folder, name, what, *words = sys.argv[1:]
FOLDER = Path(folder)
BEHAVIOUR: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
STATE = FOLDER / f"{name}.state"


def state() -> dict[str, Any]:
    return json.loads(STATE.read_text()) if STATE.exists() else {"running": True, "clean": False, "starts": 0}


def become(**changes: Any) -> None:
    STATE.write_text(json.dumps({**state(), **changes}))


def noted(event: str) -> None:
    with (FOLDER / "events").open("a") as events:
        events.write(f"{name} {event}\n")


def keytail(verb: str) -> int:
    if verb == "doctor":
        now = state()
        path = f"/logs/{name}"
        rows = [
            {"check": path, "status": "ok", "found": "", "log_dir": path, "clean_shutdown": now["clean"], "held": None},
            {"check": "lock", "status": "ok", "found": "", "log_dir": path, "held": now["running"]},
        ]
        print(json.dumps(rows))
        return 0
    if verb == "compact" and "--execute" not in words:
        print(json.dumps([{"topic": "t", "partition": 0, "status": "would-compact", "error": ""}]))
        return 0
    noted(verb)
    assert not state()["running"], f"{verb} beside a running broker"
    said = BEHAVIOUR.get(verb, {"status": 0, "rows": [{"topic": "t", "partition": 0, "status": "sound", "error": ""}]})
    if said == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps(said["rows"]))
    return int(said["status"])


def main() -> int:
    now = state()
    if what == "keytail":
        return keytail(words[0])
    if what == "stop":
        noted("stop")
        how = BEHAVIOUR.get("stop", "clean")
        if how != "hangs":
            become(running=False, clean=how == "clean")
    elif what == "start":
        become(starts=now["starts"] + 1)
        if now["starts"] < BEHAVIOUR.get("start_fails", 0):
            noted("start fails")
            return 1
        noted("start")
        become(running=True, clean=False)
    elif what == "reachable":
        return 0 if now["running"] else 1
    else:
        print(BEHAVIOUR.get("wrong", {}).get(f"{what} {'after' if now['starts'] else 'before'}", ""))
    return 0


sys.exit(main())
