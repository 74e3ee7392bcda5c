"""The asset of a ledger: a task that has written one adds an event, by which other DAGs can be scheduled.

A run's ledger is a Param, and is known only when its tasks run. Therefore these tasks have the outlet LEDGERS, an
alias, and add the asset of their ledger to it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from airflow.sdk import Asset, AssetAlias, get_current_context

LEDGERS = AssetAlias("keytail_ledger")


def uri_of(ledger: str, broker: str | None = None) -> str:
    """Return the URI of a ledger's asset: file://BROKER/PATH for a directory on a broker's host, file:///PATH for a
    directory on the worker; any other URI, such as s3a://bucket/ledger, is returned unchanged."""
    parts = urlsplit(ledger)
    if parts.scheme and parts.scheme != "file":
        return ledger
    path = posixpath.normpath(f"/{parts.path if parts.scheme else ledger}").replace("//", "/")
    return f"file://{quote(broker or '', safe='')}{quote(path)}"


def add_event(ledger: str | None, broker: str | None, command: str, run_id: str | None = None) -> None:
    """Add an event of the ledger that this task has written, if any. Airflow stores it only if the task succeeds."""
    if ledger:
        extra: Any = {"ledger": ledger, "broker": broker, "command": command, "run_id": run_id}
        get_current_context()["outlet_events"][LEDGERS].add(Asset(uri=uri_of(ledger, broker)), extra)


def written(extras: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, str | None]]:
    """Return each ledger of these events once, by the URI of its asset, with the broker on whose host the ledger is."""
    made: dict[str, tuple[str, str | None]] = {}
    for one in extras:
        if one.get("ledger"):
            made.setdefault(uri_of(one["ledger"], one.get("broker")), (one["ledger"], one.get("broker")))
    return made


def triggering() -> dict[str, tuple[str, str | None]]:
    """Return the ledgers of the events that have started this run, as `written` does; empty if no event has started
    it."""
    by_asset: Any = get_current_context()["triggering_asset_events"]
    return dict(sorted(written(event.extra for events in by_asset.values() for event in events).items()))
