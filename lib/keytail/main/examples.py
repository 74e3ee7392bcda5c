"""Examples of each command, for `--help` and the reference: one line each, most frequent first."""

from __future__ import annotations

from rich.markup import escape

_BROKER = "--config /etc/kafka/server.properties"

EXAMPLES: dict[str, tuple[str, ...]] = {
    "plan": (
        f"keytail plan {_BROKER}",
        "keytail plan --log-dirs /var/lib/kafka --topic-config orders:cleanup.policy=compact --topic-list orders",
    ),
    "compact": (
        f"keytail compact {_BROKER}",
        f"keytail compact {_BROKER} --execute",
        f"keytail compact {_BROKER} --topic 'orders|users' --force --execute --report /tmp/run.html",
        "keytail compact --log-dirs /var/lib/kafka --output-dir /backup/kafka --execute",
    ),
    "verify": (
        f"keytail verify {_BROKER}",
        "keytail verify --log-dirs /var/lib/kafka --topic 'orders|users'",
    ),
    "describe": (f"keytail describe {_BROKER} --topic orders --all",),
    "rebuild-index": (
        f"keytail rebuild-index {_BROKER}",
        f"keytail rebuild-index {_BROKER} --truncate --execute",
    ),
    "expire": (f"keytail expire {_BROKER}", f"keytail expire {_BROKER} --execute"),
    "lookup": (
        "keytail lookup --log-dirs /var/lib/kafka --partitions orders-0 --offset 700",
        "keytail lookup --log-dirs /var/lib/kafka --partitions orders-0 --timestamp 2023-11-14T22:13:20Z --explain",
    ),
    "dump": (
        "keytail dump --print-data-log --from-offset 7 --to-offset 9 /var/lib/kafka/orders-0/00000000000000000000.log",
        "keytail dump --output json --offsets-decoder /var/lib/kafka/__consumer_offsets-0",
    ),
    "audit": ("keytail audit --replica a=/mnt/broker-1 --replica b=/mnt/broker-2 --topic orders",),
    "import": (
        "keytail import orders.parquet --topic orders --log-dirs /var/lib/kafka --codec zstd",
        "keytail import orders.parquet --topic orders --log-dirs /var/lib/kafka --codec zstd --execute",
    ),
    "export": ("keytail export --log-dirs /var/lib/kafka --topic-list users --to /lake --key-format utf8 --execute",),
    "salvage": (
        "keytail salvage --log-dirs /var/lib/kafka --partitions orders-0 --to /backup/saved",
        "keytail salvage --log-dirs /var/lib/kafka --partitions orders-0 --to /backup/saved --execute",
    ),
    "undo": (
        "keytail undo --originals /var/lib/originals",
        "keytail undo --originals /var/lib/originals --run 3f2a91c0 --execute",
    ),
    "history": (
        "keytail history --ledger /var/lib/keytail/ledger",
        "keytail history --ledger /var/lib/keytail/ledger --run 3f2a91c0",
    ),
    "report": ("keytail report --ledger /var/lib/keytail/ledger --run 3f2a91c0 /tmp/run.html",),
    "doctor": (
        f"keytail doctor {_BROKER}",
        "keytail doctor --warm",
        "keytail doctor --master spark://host:7077 --log-dirs /var/lib/kafka",
    ),
}


def epilog(verb: str) -> str:
    """Return the text below the flags in `--help`; each paragraph there is printed as a line."""
    return "\n\n".join(["[bold]Examples:[/]", *map(escape, EXAMPLES[verb])])
