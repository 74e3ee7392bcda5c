"""Params of the rolling run (rolling_maintenance.py)."""

from __future__ import annotations

from airflow.sdk import Param

PARAMS = {
    "only_brokers": Param(
        [], type="array", items={"type": "string"}, title="Only these brokers",
        description="Names of the inventory, one per line. Empty: all brokers, in the order of the inventory.",
    ),
    "topic": Param(
        None, type=["null", "string"], minLength=1, title="Topics by pattern",
        description="Regular expression that must match the whole topic name (--topic). Empty: all topics that the "
        "inventory's flags allow.",
    ),
    "prepare": Param(
        True, type="boolean", title="Prepare",
        description="Prepare the compaction of each running broker (compact --prepare), right before the broker is "
        "stopped. Partitions that could not be prepared are compacted while the broker is down, unless prepared_only "
        "is set.",
    ),
    "prepared_only": Param(
        False, type="boolean", title="Prepared only",
        description="While a broker is down, commit what is prepared, and compact nothing else (--prepared-only).",
    ),
    "prepare_minutes": Param(
        240, type="number", exclusiveMinimum=0, title="Deadline of the preparation",
        description="Minutes after which a preparation starts nothing new (--deadline).",
    ),
    "prepare_throttle": Param(
        None, type=["null", "string"], pattern=r"^[0-9.]+ ?[kmgtKMGT]?i?[bB]?$", title="Throttle of the preparation",
        description="Maximum bytes per second that a preparation reads and writes beside the running broker, such as "
        "100m (--throttle). Empty: no limit.",
    ),
    "deadline_minutes": Param(
        60, type="number", exclusiveMinimum=0, title="Deadline",
        description="Minutes after which a compaction starts nothing new (--deadline); the next rolling run continues.",
    ),
    "overrun_minutes": Param(
        60, type="number", minimum=0, title="Overrun",
        description="Minutes after its deadline that a preparation or a compaction may take to finish. After these "
        "minutes the run is stopped by SIGTERM.",
    ),
    "verify_everything": Param(
        False, type="boolean", title="Verify everything",
        description="Read every byte of the chosen topics again before the start. Without this, verify reads what a "
        "broker reads when it starts, of the partitions that were compacted (verify --only-ends): the compaction has "
        "compared every segment that it wrote with its sources.",
    ),
    "verify_minutes": Param(
        240, type="number", exclusiveMinimum=0, title="Verify",
        description="Minutes after which verify is stopped. Then the broker is started, and the rolling run stops.",
    ),
    "stop_minutes": Param(
        10, type="number", exclusiveMinimum=0, title="Stop",
        description="Minutes within which a broker must have stopped cleanly.",
    ),
    "wait_for_sync_minutes": Param(
        60, type="number", exclusiveMinimum=0, title="Wait for sync",
        description="Minutes to wait, before a broker is stopped and after it was started, until no partition is "
        "under-replicated or unavailable.",
    ),
    "ledger": Param(
        None, type=["null", "string"], minLength=1, title="Ledger",
        description="Record of runs (--ledger), a directory on the broker's host. The downtime of each broker is "
        "recorded there, too. Empty: there is no record.",
    ),
    "stop_on_damage": Param(
        True, type="boolean", title="Stop on damage",
        description="Stop the rolling run after damage that loses no records at a start; if off, the run continues. "
        "The broker is started either way. Verify cannot distinguish new damage from old damage.",
    ),
    "dry_run": Param(
        False, type="boolean", title="Dry run",
        description="Stop nothing: check once, print each broker's commands and what is due there.",
    ),
    "poll_seconds": Param(
        15, type="number", exclusiveMinimum=0, title="Poll", description="Seconds between two checks while waiting."
    ),
}  # fmt: skip
