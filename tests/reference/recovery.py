"""The logs that a Kafka broker has after a start that follows an unclean shutdown; shares no code with keytail."""

from __future__ import annotations

import re
from pathlib import Path

from tests.reference.batches import decode_log


def recovered_logs(partition_dir: Path, recovery_point: int) -> dict[int, bytes]:
    """Return the contents by base offset, for directories without `.swap` and `.cleaned` files."""
    names = {path.name for path in partition_dir.iterdir() if not path.name.endswith(".deleted")}
    logs = {int(name[:20]): (partition_dir / name).read_bytes() for name in sorted(names) if name.endswith(".log")}
    for base in logs:
        if f"{base:020d}.index" not in names:
            logs[base] = logs[base][: valid_bytes(logs[base])]
    first = max([base for base in logs if base <= recovery_point], default=min(logs))
    for base in [base for base in logs if base >= first]:
        valid = valid_bytes(logs[base])
        if valid < len(logs[base]):
            logs[base] = logs[base][:valid]
            return {other: log for other, log in logs.items() if other <= base}
    return logs


def valid_bytes(log: bytes) -> int:
    """Return the position of the first invalid batch, or the length of the log. A magic above 2 is treated as 2."""
    while True:
        try:
            decode_log(log)
        except ValueError as damage:
            found = re.match(r"batch at byte (\d+): (magic (\d+))?", str(damage))
            assert found is not None, damage
            at = int(found[1])
            if not found[3] or not 2 < int(found[3]) < 128:
                return at
            log = log[: at + 16] + b"\2" + log[at + 17 :]
        else:
            return len(log)
