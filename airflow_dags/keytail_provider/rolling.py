"""Makes the decisions of the rolling run: functions of the output of the commands that rolling_maintenance.py runs.

The rules: a broker that was stopped is started again, unless `verify` reported that a start would lose records; no
broker is stopped while another one is down, or after the rolling run has stopped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The steps of a broker, in order, and the commands of the inventory that they need.
STEPS = (
    "prepare", "precheck", "begin", "stop", "stopped", "compact", "verify", "start", "in_sync", "downtime", "go_on",
)  # fmt: skip
NEEDED = ("stop", "start", "reachable", "under_replicated", "unavailable")
# Commands whose output must be empty: before a broker is stopped, and after it was started.
BEFORE = ("under_replicated", "unavailable", "under_min_isr", "at_min_isr")
AFTER = ("under_replicated", "unavailable")
KNOWN = (*NEEDED, "under_min_isr", "at_min_isr")

MAX_NAMED = 20
MAX_NAMES = 50_000  # characters of names in one argument; Linux allows 128 KiB
MAX_TEXT = 600
_BAD = ("damaged", "failed", "refused")


def lacking(commands: Mapping[str, Sequence[str]]) -> str:
    """Return what is wrong with a broker's commands; empty if nothing is wrong."""
    missing = [name for name in NEEDED if not commands.get(name)]
    unknown = sorted(set(commands) - set(KNOWN))
    texts = [f"lacks commands.{name}" for name in missing]
    texts += [f"has the unknown commands.{name}" for name in unknown]
    return " and ".join(texts)


def group_ids(names: Iterable[str]) -> list[str]:
    """Return, for each broker, a different name that Airflow accepts for a task group."""
    made: list[str] = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
        number, one = 1, plain
        while one in made:
            number += 1
            one = f"{plain}_{number}"
        made.append(one)
    return made


def chosen(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the brokers of this run, in the inventory's order. Raises ValueError for an unknown broker."""
    unknown = sorted(set(only) - set(names))
    if unknown:
        raise ValueError(f"only_brokers has {', '.join(unknown)}, but the inventory has only {', '.join(names)}")
    return [name for name in names if not only or name in only]


# -- whether a broker runs, by the rows of `keytail doctor`

RUNNING = "running"  # the broker holds a lock, and a clean shutdown file is missing
BUSY = "busy"  # a lock is held although the files exist, by a broker that is ending or by a compaction
CLEAN = "clean"  # all locks are free, all log dirs have the file
UNCLEAN = "unclean"  # all locks are free, and a log dir has no such file
UNKNOWN = "unknown"


def state_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the state of a broker's log dirs: RUNNING, BUSY, CLEAN, UNCLEAN, or UNKNOWN if a log dir is unchecked."""
    clean: dict[str, bool | None] = {}
    held: dict[str, bool | None] = {}
    for row in rows:
        path = row.get("log_dir")
        if path is None:
            if row.get("check") == "log dirs":
                return UNKNOWN
            continue
        for kept, key in ((clean, "clean_shutdown"), (held, "held")):
            kept.setdefault(path, None)
            if row.get(key) is not None:
                kept[path] = row[key]
    if not clean or None in clean.values() or None in held.values():
        return UNKNOWN
    if any(held[path] and not clean[path] for path in held):
        return RUNNING
    if any(held.values()):
        return BUSY
    return CLEAN if all(clean.values()) else UNCLEAN


def has_stopped(states: Sequence[str]) -> str | None:
    """Return CLEAN or UNCLEAN by the states seen so far, one per check, or None if the broker may still end.

    UNCLEAN requires two checks in succession. A broker writes its file before it releases its lock, but may do both
    after a check has read the file and before the same check tests the lock.
    """
    if states and states[-1] == CLEAN:
        return CLEAN
    return UNCLEAN if states[-2:] == [UNCLEAN, UNCLEAN] else None


def is_good(name: str, exit_status: int, output: str) -> bool:
    """Return whether a check found nothing: `reachable` by its status alone, the other checks also by an empty
    output."""
    return exit_status == 0 and (name == "reachable" or not output.strip())


# -- the result of the compaction


def to_verify(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the partitions that were compacted, are corrupt, or whose compaction failed; empty if the
    names are too long for one argument."""
    names = [_name(row) for row in rows if row.get("status") in ("compacted", "failed", "corrupt")]
    return names if sum(len(name) + 1 for name in names) <= MAX_NAMES else []


def prepared(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many preparations were committed, discarded, or neither."""
    return dict(Counter(str(row["prepared"]).partition(":")[0] for row in rows if row.get("prepared")))


# -- the downtime

TIMES = ("down_at_ms", "reachable_at_ms", "in_sync_at_ms")


def downtime(left: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the times of a broker's downtime: when its stop began, when it answered again, and when all replicas were
    in sync again. A time is None if it or an earlier time is unknown or out of order.
    """
    made: dict[str, int | None] = dict.fromkeys(TIMES)
    before = 0
    for name in TIMES:
        at = left.get(name)
        if at is None or at < before:
            break
        made[name] = before = at
    return made


def downtime_text(found: Mapping[str, int | None]) -> str:
    down, reachable, in_sync = (found[name] for name in TIMES)
    if down is None:
        return "it was not seen to be down; its downtime is not known"
    if reachable is None:
        return "it was stopped, and has not answered since; its downtime is not known"
    text = f"down for {(reachable - down) / 1000:.1f} s"
    return f"{text}, in sync after {(in_sync - down) / 1000:.1f} s" if in_sync is not None else f"{text}, not in sync"


def downtime_flags(found: Mapping[str, int | None]) -> list[str]:
    """Return the flags of `keytail downtime` for the times that are known."""
    return [
        word for name in TIMES if (at := found[name]) is not None
        for word in (f"--{name.removesuffix('_ms').replace('_', '-')}", str(at))
    ]  # fmt: skip


# -- the result of verify


def verdict(exit_status: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the relevant facts about a run of verify: `ran`, whether it was completed; `loses`, the findings because
    of which a start would lose records; `bad`, partitions that are damaged or were not read. The lists `loses` and
    `bad` have a limited number of items, and the total counts beside them."""
    losing = [
        _words(row, finding) for row in rows for finding in row.get("findings") or () if finding.get("start_loses")
    ]
    bad = [_row_words(row) for row in rows if row.get("status") in _BAD]
    return {
        "ran": exit_status == 0 or (exit_status in (1, 3) and bool(rows)),
        "loses": losing[:MAX_NAMED],
        "loses_count": len(losing),
        "bad": bad[:MAX_NAMED],
        "bad_count": len(bad),
    }


def may_start(said: Mapping[str, Any] | None) -> bool:
    """Return False only if verify reported that a start would lose records. Without a verdict, a start is allowed."""
    return not (said and said.get("loses"))


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("log_dir")) if row.get("topic") is None else f"{row['topic']}-{row.get('partition')}"


def _words(row: Mapping[str, Any], finding: Mapping[str, Any]) -> str:
    where = [str(finding["path"])] if finding.get("path") else []
    where += [f"{key.replace('_', ' ')} {finding[key]}" for key in ("byte_position", "offset")
              if finding.get(key) is not None]  # fmt: skip
    text = f"{_name(row)}: {finding.get('what')} ({', '.join(where)}). A broker: {finding.get('broker')}"
    return short(f"{text}. {finding.get('remedy')}")


def _row_words(row: Mapping[str, Any]) -> str:
    findings = row.get("findings") or ()
    worst = next((one for one in findings if one.get("severity") == "error"), None)
    return short(f"{_name(row)} {row.get('status')}: {worst['what'] if worst else row.get('error')}")


def short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


# -- whether the rolling run continues


def stops_the_roll(
    stopped: Mapping[str, Any] | None,
    compacted: Mapping[str, Any] | None,
    said: Mapping[str, Any] | None,
    *,
    stop_on_damage: bool,
) -> str:
    """Return the reason why the rolling run ends at a broker that is back in sync; empty if the run continues.

    Each argument is the result of a step, or None if the step has no result.
    """
    if not stopped or stopped.get("state") != CLEAN:
        return "the broker was not stopped cleanly, so it was started again without a compaction"
    if not compacted:
        return "the compaction failed"
    if not said or not said.get("ran"):
        return "the logs could not be verified after the compaction"
    if said.get("loses"):
        return f"verify reports that a start would lose records: {_list(said['loses'], said['loses_count'])}"
    if stop_on_damage and (corrupt := compacted.get("counts", {}).get("corrupt")):
        return f"the compaction reports damage: {corrupt} partitions are corrupt; see the log of compact"
    if said.get("bad") and stop_on_damage:
        return f"verify reports damage: {_list(said['bad'], said['bad_count'])}"
    return ""


def _list(texts: Sequence[str], count: int) -> str:
    more = count - min(len(texts), 3)
    return "; ".join(texts[:3]) + (f"; and {more} more" if more > 0 else "")


# -- how the rolling run ended


@dataclass(frozen=True)
class Ending:
    """The end of a rolling run. `brokers`: the state of each broker. `text`: the alert, empty if all went well."""

    brokers: Mapping[str, str]
    text: str


UP, DOWN, KEPT_DOWN, UNTOUCHED = "up", "down", "kept down", "not touched"
KEPT = "not started: "  # prefix of the reason why a start was refused
_SILENT = "the task ended without a message: its worker died, or it was killed; see its log"
NEXT = {
    "prepare": "Nothing was replaced, and what is prepared is kept. Resolve the reported problem, then clear "
    "{group}.prepare with all downstream tasks; or start a run with prepare off.",
    "precheck": "Nothing was changed. Resolve the reported problem, then clear {group}.precheck with all downstream "
    "tasks.",
    "begin": "Nothing was changed. Clear {group}.begin with all downstream tasks.",
    "start": "Start it by hand now: {start}. See the broker's log. When it runs again, clear {group}.start with all "
    "downstream tasks: the rolling run continues from there.",
    "kept down": "Do not start it. On its host apply the remedy of the finding (copy the partition's directory first), "
    "or, if other replicas are in sync, move the partition's directory out of the log dir. Then clear {group}.verify "
    "with all downstream tasks: the logs are verified again, and the broker is started if that loses nothing.",
    "in_sync": "It was started. See its log and the under-replicated partitions. When there are none, clear "
    "{group}.in_sync with all downstream tasks: the rolling run continues from there. Do not stop another broker "
    "before that.",
    "go_on": "It runs and is in sync. To continue with the next broker, mark {group}.go_on as success and clear its "
    "downstream tasks. To repeat this broker, start a run with only_brokers.",
}


def ending(
    groups: Mapping[str, str], states: Mapping[str, str | None], whys: Mapping[str, str], starts: Mapping[str, str]
) -> Ending:
    """Return how the rolling run ended. `groups`: broker by its task group, in order; `states` and `whys` by
    "group.step" (and "choose", the first task): the state of the task, and the reason why it failed, if it reported
    one; `starts`: the command that starts a broker, by group."""
    became = {broker: _became(group, states, whys) for group, broker in groups.items()}
    unrecorded = [
        f"The downtime of broker {broker} is not recorded: {whys.get(f'{group}.downtime', _SILENT)}. The times are in "
        f"the log of {group}.downtime; `keytail downtime` records them."
        for group, broker in groups.items() if states.get(f"{group}.downtime") == "failed"
    ]  # fmt: skip
    for group, broker in groups.items():
        step = next((step for step in STEPS if states.get(f"{group}.{step}") == "failed"), None)
        last = _stopping_step(group, states)
        if last is None:
            continue
        kept = became[broker] == KEPT_DOWN
        first = step if step in ("stop", "stopped", "compact", "verify") else last
        texts = [f"The rolling run stopped at broker {broker}, step {first}: {whys.get(f'{group}.{first}', _SILENT)}"]
        if first != last:
            texts.append(f"Step {last}: {whys.get(f'{group}.{last}', _SILENT)}")
        state = {UP: "runs", DOWN: "is DOWN", KEPT_DOWN: "is DOWN, and is kept down"}.get(became[broker])
        texts.append(f"Broker {broker} {state or 'was not touched'}.")
        texts.append(NEXT["kept down" if kept else last].format(group=group, start=starts.get(group, "its command")))
        others = [name for name, one in became.items() if one == UNTOUCHED and name != broker]
        if others:
            texts.append(f"Not touched: {', '.join(others)}.")
        return Ending(became, "\n".join([*texts, *unrecorded]))
    texts = []
    if states.get("choose") != "success":
        texts.append(
            f"The rolling run did not begin: {whys.get('choose', _SILENT)}. Nothing was changed; resolve this first."
        )
    elif open_ := [f"{broker} ({became[broker]})" for group, broker in groups.items()
                   if states.get(f"{group}.go_on") not in ("success", "skipped")]:  # fmt: skip
        texts.append(f"The rolling run did not finish, and no step reported why. Check {', '.join(open_)}.")
    return Ending(became, "\n".join([*texts, *unrecorded]))


def _became(group: str, states: Mapping[str, str | None], whys: Mapping[str, str]) -> str:
    if states.get(f"{group}.begin") != "success":
        return UNTOUCHED
    if states.get(f"{group}.start") == "success":
        return UP
    return KEPT_DOWN if whys.get(f"{group}.start", "").startswith(KEPT) else DOWN


def _stopping_step(group: str, states: Mapping[str, str | None]) -> str | None:
    """Return the step at which the rolling run stopped at this broker; None if the run did not stop at this broker, or
    did not reach it."""
    for step in ("prepare", "precheck", "begin", "start", "in_sync", "go_on"):
        if states.get(f"{group}.{step}") == "failed":
            return step
    return None
