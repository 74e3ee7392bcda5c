"""Generates the page of all commands, flags and settings from the command line and the table of Kafka's keys.

`python -m tests.main.reference` prints it; lib/keytail/main/REFERENCE.md is its last output.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from rich.text import Text

from keytail.config.keys import BROKER_KEYS, TOPIC_KEYS, Key, not_used
from keytail.main.main import COMMANDS, app

_TOP = """\
# Reference

This page lists all commands with their flags, and all of Kafka's settings that are read. `make reference` generates
it from the program, and a test compares the two. Rows and exit statuses: cli/ROWS.md; instructions by task: guide/.
"""
_SETTINGS = """\
## Settings

The tables list settings of topics and of brokers, by Kafka's names. The value is taken from the first of these sources
that has one: `--topic-config TOPIC:KEY=VALUE`, `--topic-config KEY=VALUE`, the file of `--topic-configs`, the topic's
setting in the metadata log, the setting with which a broker creates an internal topic, the dynamic settings of the
broker, then of all brokers (both in the metadata log), the broker's file, Kafka's default. If several names are listed
for a broker's file, the first name that it contains is used. `keytail describe --all` shows the effective values and
their sources. No other key is read. A setting that is "not used" has no effect on keytail; where a flag decides the
same, it is named. An invalid value in the broker's file stops a run only if the command uses the setting; otherwise, a
warning names it.
"""
_NOT_PRINTED = ("--help", "--install-completion", "--show-completion")


def page() -> str:
    """Return the whole page, as Markdown."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("keytail", [], resilient_parsing=True)
    parts = [_TOP, *(_command(name, group.commands[name], context) for name in COMMANDS), _SETTINGS]
    parts.append(_keys("Topic setting", TOPIC_KEYS))
    parts.append(_keys("Broker setting", BROKER_KEYS))
    return "\n".join(parts)


def _command(name: str, command: Any, context: Any) -> str:
    about = inspect.cleandoc(command.help or "").split("\n\n")
    lines = [f"## `keytail {name}`", ""]
    for paragraph in map(_plain, about):
        text = " ".join(paragraph.split())
        lines += [textwrap.fill(text, 120), ""]
    lines += [*(" \\\n".join(_wrapped(example)) for example in COMMANDS[name].examples), ""]
    groups: dict[str, list[str]] = {}
    for parameter in command.params:
        if not set(parameter.opts) & set(_NOT_PRINTED):
            group = getattr(parameter, "rich_help_panel", None) or "Other flags"
            groups.setdefault(group, []).append(_row(parameter, context))
    for group, rows in groups.items():
        lines += [f"| {group} | Value | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _wrapped(example: str) -> list[str]:
    """Return the lines of a shell command, to be joined by backslashes."""
    return textwrap.wrap(
        example, 116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False, break_long_words=False
    )


def _row(parameter: Any, context: Any) -> str:
    if parameter.param_type_name == "argument":
        names, value = f"`{parameter.metavar or parameter.name.upper()}`", ""
    else:
        options = [*parameter.opts, *parameter.secondary_opts]
        names = ", ".join(f"`{name}`" for name in sorted(options, key=lambda name: not name.startswith("--")))
        value = parameter.metavar if parameter.metavar is not None else parameter.display_type(context) or ""
    text = _plain(parameter.help or "")
    if isinstance(parameter.default, str | int | float) and not isinstance(parameter.default, bool):
        text += f" Default: {parameter.default}."
    return f"| {names} | {cell(f'`{value}`') if value else ''} | {cell(' '.join(text.split()))} |"


def _keys(title: str, keys: Sequence[Key]) -> str:
    head = [f"| {title} | Default | Allowed | Meaning | In a broker's file |", "|---|---|---|---|---|"]
    return "\n".join([*head, *_key_rows(keys), ""])


def _key_rows(keys: Sequence[Key]) -> Iterator[str]:
    for key in keys:
        value = key.default
        shown = "" if value is None else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        shown = shown.lower() if isinstance(value, bool) else shown
        names = ", ".join(f"`{name}`" for name in key.broker_names)
        meaning = f"{key.meaning} ({note})" if (note := not_used(key.name)) else key.meaning
        cells = (f"`{key.name}`", f"`{shown}`" if shown else "", cell(key.allowed), cell(meaning), names)
        yield f"| {' | '.join(cells)} |"


def _plain(markup: str) -> str:
    return Text.from_markup(markup, emoji=False).plain


def cell(text: str) -> str:
    """Return the text escaped for a table of Markdown."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
