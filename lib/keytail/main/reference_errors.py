"""Generates the page of all errors and findings, by their texts, from the program itself.

`python -m keytail.main.reference_errors` prints it; ERRORS.md beside this module is its last output.
"""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keytail
from keytail.log.lock import LockLost
from keytail.main.reference import cell
from keytail.verify.finding_kinds import KINDS

_HOME = Path(keytail.__file__).parent
_VARIES = "…"
_TOP = """\
# Errors by their slug

The slug is the name of an error for programs: it ends the message in brackets, is in `slugs` of JSON rows and of JSON
lines of `--log-format json`, and never changes. Each message also has the place: file, byte position and offset, as far
as they are known. "…" in a message stands for a number, a name or another error. `make reference` generates this page.
"""
_KINDS = {
    "Refused": (
        "Refused",
        "keytail does not act on this state: the partition, or everything selected for the run, is unchanged. The row "
        "has the status `refused`; the exit status is 1, or 3 if other partitions were done.",
    ),
    "CorruptLog": (
        "Corrupt",
        "Bytes are damaged. Nothing was changed; the row has the status `corrupt` (of `verify`: `damaged`). "
        "Remedies are in guide/undo-and-salvage.md, \"A partition is damaged\".",
    ),
    "UsageProblem": ("Wrong usage", "The exit status is 2; nothing was started."),
    "KeytailError": (
        "Failed",
        "The machine or another program caused an error. The row has the status `failed`. What is reported as done is "
        "complete, and the same command continues from there.",
    ),
}

_KIND_OF = {"LockLost": ("Refused", LockLost.default_slug or ""), "refusal": ("Refused", "")}  # the kinds of subclasses


@dataclass(frozen=True)
class ListedError:
    """An error as the code raises it; parts that are known only at run time are `…`."""

    kind: str
    text: str
    remedy: str
    slug: str
    is_raised: bool  # else a reason in a row, whose text contains the remedy


def page() -> str:
    """Return the whole page, as Markdown."""
    found = sorted(set(errors()), key=lambda item: (item.slug, item.text.lower(), item.remedy))
    parts = [_TOP]
    for kind, (title, about) in _KINDS.items():
        rows = [
            f"| `{item.slug}` | {cell(item.text)} | {cell(item.remedy)} |" for item in found if item.kind == kind
        ]
        head = ["| Slug | Message | What to do |", "|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *_filled(about), "", *head, *rows, ""]))
    parts.append(_findings())
    return "\n".join(parts)


def errors() -> Iterator[ListedError]:
    """Yield the errors of all modules that are raised with a text."""
    for path, name, node in _calls():
        kind, default = _KIND_OF.get(name, (name, ""))
        text = _text(node.args[0], path) if node.args else ""
        if text.replace(_VARIES, "").strip(" :;,."):
            given = {item.arg: _text(item.value, path) for item in node.keywords}
            yield ListedError(kind, text, given.get("remedy", ""), given.get("slug", default), name != "refusal")


def without_slug() -> Iterator[str]:
    """Yield the places, as `path:line`, of errors that are raised without a slug."""
    for path, name, node in _calls():
        if name not in _KIND_OF and "slug" not in {item.arg for item in node.keywords}:
            yield f"{path.relative_to(_HOME)}:{node.lineno}"


def _calls() -> Iterator[tuple[Path, str, ast.Call]]:
    for path in sorted(_HOME.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id in _KINDS or node.func.id in _KIND_OF:
                yield path, node.func.id, node


def _text(node: ast.expr, path: Path) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value or "")
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, path) if isinstance(part, ast.Constant) else _VARIES for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left, path) + _text(node.right, path)
    if isinstance(node, ast.Name) and node.id.isupper():
        module = ".".join(("keytail", *path.relative_to(_HOME).with_suffix("").parts))
        value: Any = getattr(importlib.import_module(module), node.id, _VARIES)
        return value if isinstance(value, str) else _VARIES
    return _VARIES


def _findings() -> str:
    about = (
        "The `kind` of each of a row's `findings`. verify/VERIFY.md describes the checks, and which findings mean that "
        "records are lost when a broker starts."
    )
    facts = re.compile(r"\{[^}]*\}")
    rows = [
        f"| `{name}` | {kind.severity} | {' | '.join(cell(facts.sub(_VARIES, text)) for text in texts)} |"
        for name, kind in sorted(KINDS.items())
        for texts in [(kind.what, kind.broker, kind.remedy)]
    ]
    head = ["| Kind | Severity | Message | What a broker does | What to do |", "|---|---|---|---|---|"]
    return "\n".join(["## Findings of `verify`", "", *_filled(about), "", *head, *rows, ""])


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_on_hyphens=False)


if __name__ == "__main__":
    print(page(), end="")
