"""Suggests commands and flags for an unknown name: those for which it is a synonym or, if there are none, those with
a similar spelling.

Errors of the command line's syntax are also printed as an object if --output json-v1 is among the arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from keytail.cli.envelope import last_output, print_syntax_error
from keytail.cli.options import FLAGS_MEANT
from keytail.cli.output_options import JSON_V1

# The class of errors about unknown names, from which BadParameter is derived; Typer does not export it.
_UsageError: Any = typer.BadParameter.__mro__[1]
_DRY_RUN = ("--dry-run", "--dryrun", "--check", "--simulate", "--no-execute", "-n")
_REPAIR = ("--fix", "--repair")
_BROKER = ("--bootstrap-server", "--bootstrap-servers", "--broker-list", "--zookeeper")


def commands_meant(name: str, also_called: Mapping[str, Collection[str]]) -> list[str]:
    """Return the commands that an unknown name may mean. `also_called` has the synonyms of each command by its name."""
    meant: dict[str, list[str]] = {}
    for command, words in also_called.items():
        for word in (command, *words):
            meant.setdefault(word, []).append(command)
    words = get_close_matches(name.lower(), meant, n=1)
    return [command for word in words for command in meant[word]]


def about_flag(flag: str, flags: Collection[str], flags_of_all: Mapping[str, Collection[str]]) -> str:
    """Return a hint about a flag that is not one of the command's `flags`; empty if there is no hint. `flags_of_all`
    are the flags of all commands, by command name."""
    if flag in _DRY_RUN:
        if "--execute" in flags:
            return "A dry run is the default: omit --execute"
        return "This command changes nothing in a log dir, so it needs no dry run"
    if flag in _BROKER:
        return "keytail connects to no broker: it reads the log dirs. Give --config or --log-dirs"
    if flag in _REPAIR and "--execute" not in flags:
        return "keytail rebuild-index repairs indexes; keytail salvage saves the intact batches of a damaged log"
    if meant := [name for name in FLAGS_MEANT.get(flag, ()) if name.split()[0] in flags]:
        return _did_you_mean(meant)
    if text := _about_setting(flag, flags):
        return text
    if others := [command for command, names in flags_of_all.items() if flag in names]:
        return f"{flag} is a flag of {_either(others, 'and')}"
    return _did_you_mean(get_close_matches(flag, flags))


def _about_setting(flag: str, flags: Collection[str]) -> str:
    from keytail.config.keys import BROKER_KEYS, TOPIC_KEYS  # noqa: PLC0415 (--help needs no settings)

    name = flag.strip("-").replace("-", ".").replace("_", ".")
    if any(name == key.name for key in TOPIC_KEYS):
        if "--topic-config" in flags:
            return f"{name} is a topic setting: give --topic-config TOPIC:{name}=VALUE"
        return f"{name} is a topic setting; this command uses no topic settings"
    if any(name in (key.name, *key.broker_names) for key in (*BROKER_KEYS, *TOPIC_KEYS)) and "--config" in flags:
        return f"{name} is a setting of the broker, which is read from the file that --config names"
    return ""


def _did_you_mean(names: Collection[str]) -> str:
    return f"Did you mean {_either(list(names), 'or')}?" if names else ""


def _either(names: list[str], word: str) -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


class Group(TyperGroup):
    """The group of all commands. `also_called` has the synonyms of each command by its name."""

    also_called: Mapping[str, Collection[str]] = {}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _use_help_table()
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as problem:
            if not hasattr(problem, "possibilities"):  # only errors about flags have this attribute
                if (flag := f"--{args[0]}") in ("--help", "--version"):
                    text = _did_you_mean([f"keytail {flag}"])
                else:
                    text = _did_you_mean(commands_meant(args[0], self.also_called))
                problem.message = f"No such command '{args[0]}'. {text}".rstrip()
            raise


class OneCommand(TyperCommand):
    """A command that suggests existing flags for unknown flags."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _use_help_table()
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        output = last_output(args)  # before the parser removes the arguments that it reads
        try:
            return super().parse_args(ctx, args)
        except _UsageError as problem:
            if hasattr(problem, "possibilities"):
                # Under spark-submit a job is run without the group of all commands.
                commands = ctx.parent.command.commands if ctx.parent is not None else {}
                of_all = {name: set(_flags(command)) for name, command in commands.items()}
                text = about_flag(problem.option_name, set(_flags(self)), of_all)
                problem.message = f"No such option: {problem.option_name}. {text}".removesuffix(". ")
                problem.possibilities = None
            elif "unexpected extra argument" in problem.message and "--topic-list" in _flags(self):
                problem.message += ". To select topics, give --topic-list TOPIC[,TOPIC]"
            if output == JSON_V1 and any(output in (item.metavar or "") for item in self.params):
                print_syntax_error(self.name or "", problem.format_message())
            raise


def _use_help_table() -> None:
    from keytail.main.help_table import use_help_table  # noqa: PLC0415 (a run needs no table of flags)

    use_help_table()


def _flags(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield from (*parameter.opts, *parameter.secondary_opts)
