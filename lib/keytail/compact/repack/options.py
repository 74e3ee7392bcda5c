"""Declares the flags of `compact --repack`, and refuses flags that cannot be combined with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from keytail.cli import options as o
from keytail.errors import UsageProblem
from keytail.format.codecs.table import CODECS

if TYPE_CHECKING:
    from keytail.compact.command import Request

DEFAULT_BATCH_BYTES = 256 << 10
MAX_BATCH_BYTES = 32 << 20  # larger batches are read in pieces and are not rebuilt


@dataclass(frozen=True)
class Compression:
    """The number of a codec, and a compression level; a level of None is the default level of Kafka's codec."""

    codec: int
    level: int | None = None


@dataclass(frozen=True)
class RepackFlags:
    """The flags of `--repack`. If `compression` is None, batches keep their codec."""

    compression: Compression | None = None
    batch_bytes: int = DEFAULT_BATCH_BYTES
    replicas_in_sync: bool = False
    forget_producers: bool = False


def _compression(text: str) -> Compression:
    name, colon, level = text.partition(":")
    if name not in CODECS:
        raise typer.BadParameter(f"unknown codec {name!r}: use {', '.join(CODECS)}, optionally with a level: zstd:6")
    return Compression(CODECS.index(name), o.within(-(2**31), 2**31 - 1)(level) if colon else None)


Repack = Annotated[bool, o.run_flag(
    "--repack",
    "Merge neighbouring batches into larger ones without removing records, in topics of every cleanup.policy. The "
    "active segment is not changed.",
)]
CompressionFlag = Annotated[Compression | None, o.run_flag(
    "--compression CODEC[:LEVEL]",
    "With --repack: codec of all batches (none, gzip, snappy, lz4 or zstd), for example zstd:6. Default: each batch "
    "keeps its codec.",
    parser=_compression,
)]
BatchBytes = Annotated[int | None, o.run_flag(
    "--batch-bytes SIZE",
    "With --repack: maximum size of a merged batch before compression, up to 32m; max.message.bytes also limits it. 0 "
    "disables merging. Default: 256k.",
)]
ReplicasInSync = Annotated[bool, o.safety_flag(
    "--replicas-in-sync",
    "With --repack: assert that all followers have every record below the high watermark, even if the metadata log "
    "does not show this. A follower whose log ends inside a merged batch of its leader fails.",
)]
ForgetProducers = Annotated[bool, o.run_flag(
    "--forget-producers",
    "With --repack: also merge batches of idempotent and transactional producers that have been idle for "
    "producer.id.expiration.ms. Their producer ids are removed; transactions must have been committed.",
)]


def repack_flags(
    repack: Repack = False,
    compression: CompressionFlag = None,
    batch_bytes: BatchBytes = None,
    replicas_in_sync: ReplicasInSync = False,
    forget_producers: ForgetProducers = False,
) -> RepackFlags | None:
    """Return the flags of a repack; None if --repack is not given. Raises UsageProblem for invalid values and
    combinations, and for flags that require --repack."""
    if repack:
        if compression is not None:
            from keytail.format.compression import check_level  # noqa: PLC0415 (--help needs no codec)

            check_level(compression.codec, compression.level)
        batch_bytes = DEFAULT_BATCH_BYTES if batch_bytes is None else batch_bytes
        if batch_bytes > MAX_BATCH_BYTES:
            raise UsageProblem(
                f"--batch-bytes {batch_bytes} is too large", remedy=f"Use at most {MAX_BATCH_BYTES >> 20}m",
                slug="batch-bytes-too-large",
            )  # fmt: skip
        if forget_producers and not batch_bytes:
            raise UsageProblem(
                "--forget-producers cannot be combined with --batch-bytes 0: only merged batches lose their producers",
                remedy="Omit one of the two flags",
                slug="conflicting-flags",
            )
        return RepackFlags(compression, batch_bytes, replicas_in_sync, forget_producers)
    given = {
        "--compression": compression is not None,
        "--batch-bytes": batch_bytes is not None,
        "--replicas-in-sync": replicas_in_sync,
        "--forget-producers": forget_producers,
    }
    for flag, is_given in given.items():
        if is_given:
            raise UsageProblem(f"{flag} requires --repack", remedy=f"Add --repack, or omit {flag}", slug="missing-flag")
    return None


_REMOVES = "a repack removes no record"
_ROUND_ONLY = "a repack is not a round of compaction"


def refuse_combinations(request: Request) -> None:
    """Raise UsageProblem for flags that cannot be combined with --repack."""
    if request.repack is not None and request.repack.forget_producers and request.unsafe_clock:
        raise UsageProblem(
            "--forget-producers cannot be combined with --unsafe-clock: brokers forget producers by their own clock",
            remedy="Omit one of the two flags",
            slug="conflicting-flags",
        )
    reasons = {
        "--prepare": (request.prepare, "a repack has no preparation"),
        "--prepared-only": (request.prepared_only, "a repack has no preparation"),
        "--output-dir": (bool(request.output_dirs), "a repack replaces segments in place"),
        "--scratch-dir": (request.scratch_dir is not None, "a repack replaces segments in place"),
        "--roll-active": (request.roll_active, "a repack does not change the active segment"),
        "--show-keys": (request.show_keys, "a repack counts no keys"),
        "--fan-out": (request.fan_out != "auto", "one task repacks a whole partition"),
        "--grouping": (request.grouping != "measured", "a repack merges no segments"),
        "--map-memory": (request.map_memory_bytes is not None, "a repack has no offset map"),
        "--force": (request.force, _ROUND_ONLY),
        "--from-log-start": (request.from_log_start, _ROUND_ONLY),
        "--drop-keyless": (request.drop_keyless, _REMOVES),
        "--replica": (bool(request.replicas), _REMOVES),
        "--broker-version": (request.configuration.broker_version is not None, _REMOVES),
        "--message-format": (
            request.configuration.message_format != "unknown",
            "a repack does not change messages of magic 0 and 1",
        ),
    }
    for flag, (is_given, why) in reasons.items():
        if is_given:
            raise UsageProblem(
                f"--repack cannot be combined with {flag}: {why}",
                remedy=f"Omit --repack, or run without {flag}",
                slug="conflicting-flags",
            )
