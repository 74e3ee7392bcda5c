"""The decisions that the rolling run makes from the output of commands, and random sequences of its tasks.

KEYTAIL_SEED repeats the sequences.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from tests.airflow_dags.conftest import imported
from tests.chance import SEED

pytestmark = pytest.mark.xdist_group("airflow")  # all tests use one process of Airflow

rolling: Any = imported("keytail_provider.rolling")

LOSES = {"what": "w", "path": "/p", "byte_position": 3, "offset": 9, "broker": "deletes", "remedy": "mend",
         "severity": "error", "start_loses": True}  # fmt: skip
KEEPS = {**LOSES, "start_loses": False}


def log_dir(path: str, clean: bool | None, held: bool | None) -> list[dict[str, Any]]:
    return [
        {"check": path, "log_dir": path, "clean_shutdown": clean, "held": None},
        {"check": f"{path}: owner", "log_dir": path, "clean_shutdown": None, "held": None},
        {"check": f"{path}: lock", "log_dir": path, "clean_shutdown": None, "held": held},
    ]


@pytest.mark.parametrize(
    ("dirs", "state"),
    [
        ([(False, True)], "running"),
        ([(True, False)], "clean"),
        ([(False, False)], "unclean"),
        ([(True, True)], "busy"),
        ([(None, False)], "unknown"),
        ([(True, None)], "unknown"),
        ([], "unknown"),
        ([(True, False), (True, False)], "clean"),
        ([(True, False), (False, False)], "unclean"),
        ([(True, False), (True, True)], "busy"),
        ([(True, False), (False, True)], "running"),
        ([(True, False), (None, None)], "unknown"),
    ],
)
def test_the_state_of_a_broker_is_that_of_all_its_log_dirs(dirs: list[tuple[Any, Any]], state: str) -> None:
    rows = [row for n, (clean, held) in enumerate(dirs) for row in log_dir(f"/d{n}", clean, held)]
    rows += [{"check": "clock", "log_dir": None, "clean_shutdown": None, "held": None}, {"check": "Java"}]
    assert rolling.state_of(rows) == state
    missing = {"check": "log dirs", "status": "fail"}
    assert rolling.state_of([*rows, missing]) == "unknown"


def test_a_broker_is_unclean_only_after_two_checks_in_succession() -> None:
    cases = [([], None), (["running"], None), (["running", "unclean"], None), (["unclean", "clean"], "clean"),
             (["unclean", "unclean"], "unclean"), (["unclean", "unknown", "unclean"], None), (["busy"], None),
             (["unknown"], None), (["clean"], "clean"), (["clean", "running"], None)]  # fmt: skip
    for states, decided in cases:
        assert rolling.has_stopped(states) == decided, states


def test_a_check_without_output_succeeds() -> None:
    assert rolling.is_good("unavailable", 0, " \n")
    assert not rolling.is_good("unavailable", 0, "Topic: t")
    assert not rolling.is_good("unavailable", 1, "")
    assert rolling.is_good("reachable", 0, "b1 (id: 1) -> ...")
    assert not rolling.is_good("reachable", 1, "")


def row(status: str, *findings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"topic": "t", "partition": 1, "status": status, "error": "", "findings": list(findings), **more}


def test_the_result_of_verify_follows_from_its_findings() -> None:
    verdict = rolling.verdict(1, [row("sound"), row("damaged", KEEPS, LOSES), row("suspect", KEEPS), row("failed")])
    assert (verdict["ran"], verdict["loses_count"], verdict["bad_count"]) == (True, 1, 2)
    assert verdict["loses"] == ["t-1: w (/p, byte position 3, offset 9). A broker: deletes. mend"]
    assert not rolling.may_start(verdict)
    assert rolling.may_start(rolling.verdict(1, [row("damaged", KEEPS)]))
    assert rolling.may_start(rolling.verdict(255, []))
    assert rolling.may_start(None)
    of_log_dir = {"topic": None, "log_dir": "/d", "status": "damaged", "error": "", "findings": [LOSES]}
    assert rolling.verdict(1, [of_log_dir])["loses"][0].startswith("/d: w")
    for status, rows, ran in ((0, [], True), (1, [], False), (2, [], False), (124, [row("sound")], False)):
        assert rolling.verdict(status, rows)["ran"] is ran


def test_the_result_of_many_findings_is_small() -> None:
    long = {**LOSES, "what": "w" * 5000}
    verdict = rolling.verdict(1, [row("damaged", *[long] * 50, partition=n) for n in range(500)])
    assert (verdict["loses_count"], verdict["bad_count"]) == (25_000, 500)
    assert len(str(verdict)) < 30_000
    assert not rolling.may_start(verdict)


SOUND = {"ran": True, "loses": [], "loses_count": 0, "bad": [], "bad_count": 0}
CLEAN, COMPACTED = {"state": "clean"}, {"partial": True}


@pytest.mark.parametrize(
    ("left", "why"),
    [
        ((CLEAN, COMPACTED, SOUND), ""),
        ((None, COMPACTED, SOUND), "not stopped cleanly"),
        (({"state": "unclean"}, COMPACTED, SOUND), "not stopped cleanly"),
        ((CLEAN, None, SOUND), "compaction failed"),
        ((CLEAN, COMPACTED, None), "not be verified"),
        ((CLEAN, COMPACTED, {**SOUND, "ran": False}), "not be verified"),
        ((CLEAN, COMPACTED, {**SOUND, "loses": ["x"], "loses_count": 9}), "x; and 8 more"),
        ((CLEAN, COMPACTED, {**SOUND, "bad": ["y"], "bad_count": 1}), "damage: y"),
        ((CLEAN, {"counts": {"compacted": 1, "corrupt": 2}}, SOUND), "damage: 2 partitions are corrupt"),
        ((CLEAN, {"counts": {"compacted": 1, "failed": 2}}, SOUND), ""),
    ],
)
def test_reasons_for_stopping_the_rolling_run_are_reported(left: tuple[Any, Any, Any], why: str) -> None:
    reason = rolling.stops_the_roll(*left, stop_on_damage=True)
    assert why in reason
    assert bool(reason) == bool(why)
    assert bool(rolling.stops_the_roll(*left, stop_on_damage=False)) == (bool(why) and "damage" not in why)


TIMES = {"down_at_ms": 1000, "reachable_at_ms": 42_300, "in_sync_at_ms": 61_000}


def test_downtimes_are_determined_from_known_times() -> None:
    whole = rolling.downtime({**TIMES, "run_id": "x"})
    assert whole == TIMES
    assert rolling.downtime_text(whole) == "down for 41.3 s, in sync after 60.0 s"
    assert rolling.downtime_flags(whole) == [
        "--down-at", "1000", "--reachable-at", "42300", "--in-sync-at", "61000"
    ]  # fmt: skip
    for unknown, known, words in (
        ({"in_sync_at_ms": None}, 2, "down for 41.3 s, not in sync"),
        ({"reachable_at_ms": None}, 1, "has not answered since"),
        ({"reachable_at_ms": 999}, 1, "has not answered since"),  # this is the time of an earlier start
        ({"down_at_ms": None}, 0, "not seen to be down"),
    ):
        made = rolling.downtime({**TIMES, **unknown})
        assert made == {name: TIMES[name] if n < known else None for n, name in enumerate(TIMES)}
        assert words in rolling.downtime_text(made)
        assert len(rolling.downtime_flags(made)) == 2 * known


def test_committed_partitions_are_verified() -> None:
    rows = [
        row("compacted", partition=0, prepared="committed"), row("compacted", partition=1, prepared="discarded: why"),
        row("clean", partition=2), row("compacted", partition=3), row("failed", partition=4, prepared="not committed"),
    ]  # fmt: skip
    rows += [row("refused", partition=5), row("corrupt", partition=6), row("skipped", partition=7)]
    assert rolling.to_verify(rows) == ["t-0", "t-1", "t-3", "t-4", "t-6"]
    assert rolling.prepared(rows) == {"committed": 1, "discarded": 1, "not committed": 1}
    assert rolling.to_verify([row("compacted", partition=n) for n in range(9999)]) == []  # too long for a command line


def test_groups_of_tasks_are_named_after_brokers() -> None:
    assert rolling.group_ids(["b1", "b.1", "b 1", "ü", "b_1"]) == ["b1", "b_1", "b_1_2", "_", "b_1_3"]
    assert rolling.chosen(["a", "b", "c"], []) == ["a", "b", "c"]
    assert rolling.chosen(["a", "b", "c"], ["c", "a"]) == ["a", "c"]
    with pytest.raises(ValueError, match="has x, but the inventory has only a"):
        rolling.chosen(["a"], ["a", "x"])
    whole = dict.fromkeys(rolling.NEEDED, ("true",))
    assert rolling.lacking(whole) == ""
    assert rolling.lacking({**whole, "at_min_isr": ("x",)}) == ""
    assert rolling.lacking({**whole, "at_min_irs": ("x",), "stop": ()}) == (
        "lacks commands.stop and has the unknown commands.at_min_irs"
    )


# Random sequences of the DAG's tasks, by simplified rules of Airflow


def outcome_by_rule(task: Mapping[str, Any], states: Mapping[str, str], setups: set[str]) -> str | None:
    """Return the state of a task whose upstream tasks have ended; None if it is run."""
    above = {name: states[name] for name in task["upstream"]}
    values = list(above.values())
    failed = any(state in ("failed", "upstream_failed") for state in values)
    rule = task["rule"]
    if rule == "all_done":
        return None
    if rule == "none_failed":
        return "upstream_failed" if failed else None
    if rule == "all_done_min_one_success":
        if "success" in values:
            return None
        return "upstream_failed" if failed else "skipped"
    if rule == "all_done_setup_success":
        begun = [state for name, state in above.items() if name in setups]
        if "success" in begun:
            return None
        return "skipped" if all(state == "skipped" for state in begun) else "upstream_failed"
    assert rule == "all_success", rule
    return "upstream_failed" if failed else "skipped" if "skipped" in values else None


class FakeCluster:
    """Three brokers, and the effects of random tasks on them. A task that is killed may or may not have done its work.
    """

    def __init__(self, rng: random.Random, groups: list[str]) -> None:
        self.rng = rng
        self.down: set[str] = set()
        self.refused: set[str] = set()
        self.start_failed: set[str] = set()
        self.left: dict[str, Any] = {}
        self.over = False  # the rolling run has stopped, and nothing may be changed
        self.unrecorded = False
        self.skipped = {group for group in groups if rng.random() < 0.15}

    def run(self, group: str, step: str) -> str:
        rng, left = self.rng, self.left
        name = f"{group}.{step}"
        dies = rng.random() < 0.06
        if step == "prepare":
            if group in self.skipped or rng.random() < 0.2:  # the broker may also be off
                return "skipped"
            self.over |= dies
            return "failed" if dies else "success"
        if step == "downtime":
            self.unrecorded |= dies
            return "failed" if dies else "success"
        if step == "precheck":
            if group in self.skipped:
                return "skipped"
            good = not self.down and rng.random() < 0.93
            self.over |= not good or dies
            return "success" if good and not dies else "failed"
        if step == "begin":
            assert not self.over
            self.over |= dies
            return "failed" if dies else "success"
        if step == "stop":
            assert not self.over, "a broker is stopped although the rolling run has stopped"
            assert not self.down, "two brokers are down at the same time"
            if not dies or rng.random() < 0.5:
                self.down.add(group)
            return "failed" if dies or rng.random() < 0.05 else "success"
        if step == "stopped":
            state = rolling.has_stopped([rng.choice(["clean"] * 9 + ["unclean", "running"])] * 2)
            if dies or state != "clean":
                return "failed"
            left[name] = {"state": state}
            return "success"
        if step == "compact":
            assert group in self.down
            if dies or rng.random() < 0.1:
                return "failed"
            left[name] = {"partial": rng.random() < 0.3}
            return "success"
        if step == "verify":
            status, rows = rng.choice([(0, [row("sound")])] * 8 + [(1, [row("damaged", LOSES)]), (255, []),
                                      (1, [row("damaged", KEEPS)])])  # fmt: skip
            if dies:
                return "failed"
            left[name] = rolling.verdict(status, rows)
            return "success" if status == 0 else "failed"
        if step == "start":
            if not rolling.may_start(left.get(f"{group}.verify")):
                self.refused.add(group)
                self.over = True
                return "failed"
            if dies:  # all its retries are used
                self.start_failed.add(group)
                self.over = True
                return "failed"
            self.down.discard(group)
            return "success"
        if step == "in_sync":
            assert group not in self.down
            good = not dies and rng.random() < 0.95
            self.over |= not good
            return "success" if good else "failed"
        assert step == "go_on"
        why = rolling.stops_the_roll(
            *(left.get(f"{group}.{one}") for one in ("stopped", "compact", "verify")), stop_on_damage=True
        )
        self.over |= bool(why) or dies
        return "failed" if why or dies else "success"


GROUPS = ["a", "b", "c"]


@pytest.mark.long
def test_at_most_one_broker_is_down_in_random_sequences_of_tasks(rolls_of: dict[str, Any]) -> None:
    tasks = rolls_of["tasks"]
    setups = {name for name, task in tasks.items() if task["setup"]}
    seen: set[str] = set()
    for number in range(3000):
        rng = random.Random(f"{SEED}-{number}")
        cluster = FakeCluster(rng, GROUPS)
        states: dict[str, str] = {}
        stopped: set[str] = set()
        while len(states) < len(tasks):
            ready = [n for n in tasks if n not in states and all(above in states for above in tasks[n]["upstream"])]
            name = rng.choice(ready)
            decided = outcome_by_rule(tasks[name], states, setups)
            if decided is None:
                group, _, step = name.rpartition(".")
                decided = cluster.run(group, step) if group else "success"
                stopped |= cluster.down
            states[name] = decided
        # A stopped broker has been started again, unless verify forbade that, or the command failed on every try.
        assert cluster.down == {group for group in stopped if group in cluster.refused | cluster.start_failed}, number
        assert len(cluster.down) <= 1
        for group in cluster.refused:
            assert cluster.left[f"{group}.verify"]["loses"]
        ended = rolling.ending(dict(zip(GROUPS, GROUPS, strict=True)), {**states, "choose": "success"},
                               {f"{g}.start": rolling.KEPT for g in cluster.refused}, {})  # fmt: skip
        assert bool(ended.text) == (cluster.over or cluster.unrecorded), (number, states, ended)
        assert ("is not recorded" in ended.text) == cluster.unrecorded, (number, states, ended)
        for group in GROUPS:
            down = ended.brokers[group] in (rolling.DOWN, rolling.KEPT_DOWN)
            # If the stop and then the start were killed before they did anything, the broker is reported as down but is
            # not.
            assert down or group not in cluster.down, (number, ended)
            assert not down or group in cluster.down | cluster.start_failed, (number, ended)
            if down:
                assert f"broker {group}" in ended.text
                assert "is DOWN" in ended.text
            # The downtime of a broker is determined if and only if the broker may have been stopped.
            was_stopped = "success" in (states[f"{group}.stop"], states[f"{group}.in_sync"])
            assert (states[f"{group}.downtime"] in ("success", "failed")) == was_stopped
        seen |= {*ended.brokers.values(), "stopped" if ended.text else "through"}
    assert seen == {rolling.UP, rolling.DOWN, rolling.KEPT_DOWN, rolling.UNTOUCHED, "stopped", "through"}


@pytest.mark.long
def test_each_step_is_a_task_and_the_last_one_reports(rolls_of: dict[str, Any]) -> None:
    tasks = rolls_of["tasks"]
    assert set(tasks) == {"choose", "roll", *(f"{group}.{step}" for group in GROUPS for step in rolling.STEPS)}
    assert [name for name in tasks if not any(name in task["upstream"] for task in tasks.values())] == ["roll"]
    for before, group in zip(["choose", "a.go_on", "b.go_on"], GROUPS, strict=True):
        assert tasks[f"{group}.prepare"]["upstream"] == [before]
        assert tasks[f"{group}.precheck"]["upstream"] == [f"{group}.prepare"]
        start = tasks[f"{group}.start"]
        assert (start["teardown"], start["fails_run"], start["retries"] >= 10) == (True, True, True)
        assert tasks[f"{group}.begin"]["setup"]
        assert f"{group}.begin" in start["upstream"]
        assert tasks[f"{group}.compact"]["retries"] == 0
    assert rolls_of["max_active_runs"] == 1
    assert rolls_of["catchup"] is False
    for name, param in rolls_of["params"].items():
        assert param["description"], name
        assert param["schema"]["type"], name
    wanted = {"deadline_minutes", "only_brokers", "topic", "wait_for_sync_minutes", "dry_run", "prepare", "ledger"}
    assert wanted <= set(rolls_of["params"])


def test_a_rolling_run_that_is_not_started_is_reported() -> None:
    ended = rolling.ending({"a": "a"}, {"choose": "failed"}, {"choose": "no inventory"}, {})
    assert "did not begin: no inventory" in ended.text
    open_ = rolling.ending({"a": "A"}, {"choose": "success", "a.begin": "success"}, {}, {})
    assert "Check A (down)" in open_.text
