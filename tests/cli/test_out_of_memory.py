"""A lack of memory in the process of the driver fails one partition, and the run continues with the others."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Run, rows_of

COMPACT = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact", "--force")
EXPIRE = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=delete")
EXPIRE += ("--topic-config", "retention.ms=-1", "--topic-config", "retention.bytes=-1")


@pytest.mark.parametrize(
    ("command", "place", "status"),
    [
        (("plan", *COMPACT), "keytail.compact.planning.decide", "refused"),
        (("compact", *COMPACT, "--execute"), "keytail.compact.running.replacing.Replacing.install", "failed"),
        (("expire", *EXPIRE, "--execute"), "keytail.expire.partition.decide", "failed"),
        (("rebuild-index", "--execute"), "keytail.rebuild_index.driver.plan_partition", "failed"),
        (("describe", "--records"), "keytail.log.records.chunk.SegmentReader.chunks", ""),
        (("lookup", "--offset", "1"), "keytail.lookup.driver.lookup_offset", "failed"),
    ],
)
def test_a_partition_without_memory_has_the_reason_in_its_row(
    command: tuple[str, ...], place: str, status: str, run: Run, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pkgutil.resolve_name(place)

    def of_one(*arguments: Any, **more: Any) -> Any:
        seen = [getattr(item, "task", item) for item in arguments]
        if any((getattr(item, "topic", ""), getattr(item, "partition", "")) == ("orders", 0) for item in seen) or any(
            "orders-0" in item for item in seen if isinstance(item, str)
        ):
            raise MemoryError
        return real(*arguments, **more)

    monkeypatch.setattr(place, of_one)
    done = run(*command, "--log-dirs", log_dir, "--topic", "orders", "--output", "json")
    rows = rows_of(done)
    assert done.exit_code == 3, done.output
    assert "out of memory on host" in rows["orders-0"]["error"]
    assert rows["orders-0"].get("status", "") == status
    assert rows["orders-1"]["error"] == ""
