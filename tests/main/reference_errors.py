"""Generates the page of all errors by slug, and of all findings, from the program itself.

`python -m tests.main.reference_errors` prints it; lib/keytail/main/ERRORS.md is its last output.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import keytail
from keytail.errors import OF_SYSTEM, UnsafeFile
from keytail.verify.finding_kinds import KINDS
from tests.main.reference import cell

_HOME = Path(keytail.__file__).parent
_VARIES = "…"
_TOP = """\
# Errors by their slug

The slug is the name of an error for programs: it ends the message in brackets, is in `slugs` of JSON rows and of JSON
lines of `--log-format json`, in `error` of `--output json-v1`, and never changes. Each message also has the place:
file, byte position and offset, as far as they are known. "…" in a message stands for a number, a name or another error.
`make reference` generates this page.
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
        "The machine or another program caused an error. The row has the status `failed`. Partitions that are reported "
        "as done are complete, and the same command continues with the others.",
    ),
}

@dataclass(frozen=True)
class ListedError:
    """An error as the code raises it; parts that are known only at run time are `…`."""

    kind: str
    text: str
    remedy: str
    slug: str
    is_raised: bool  # False if the error is a reason in a row


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


@functools.cache
def errors(home: Path = _HOME) -> tuple[ListedError, ...]:
    """Return all errors. Raises ValueError for an error whose class or slug cannot be seen where it is raised."""
    return tuple(_errors(home))


def _errors(home: Path) -> Iterator[ListedError]:
    for code, (slug, remedy) in OF_SYSTEM.items():
        yield ListedError("KeytailError", os.strerror(code), remedy, slug, True)
    for unsafe in UnsafeFile.__subclasses__():
        yield ListedError("KeytailError", (unsafe.__doc__ or "").rstrip("."), unsafe.remedy, unsafe.slug, True)
    modules = {path: ast.parse(path.read_text()) for path in sorted(home.rglob("*.py"))}
    kinds = {name: (name, "") for name in _KINDS} | {"refusal": ("Refused", "")}
    for tree in modules.values():
        kinds |= _subclasses(tree)
    for path, tree in modules.items():
        used_at = 0
        for scope, name, node in _calls(tree, kinds):
            kind, default = kinds.get(name, ("", ""))
            given = {item.arg: item.value for item in node.keywords}
            found = _Texts(path, scope, used_at, node.lineno)
            texts, remedies, slugs = (found.of(item) for item in (node.args[0], given.get("remedy"), given.get("slug")))
            slugs = [slug for slug in slugs if slug not in ("", _VARIES)] or [default]
            is_copy = ast.unparse(given.get("slug", node)).endswith(".slug")
            if is_copy or (path.name == "errors.py" and not slugs[0]):  # errors.py has the code that all errors share
                continue
            if not kind or not slugs[0]:
                raise ValueError(f"{path}:{node.lineno}: show the class and the slug of the error in this call")
            for text, slug in product(texts if len(slugs) == 1 else [_VARIES], slugs):
                remedy = " or ".join(dict.fromkeys(filter(None, remedies)))
                yield ListedError(kind, text or _VARIES, remedy, slug, name != "refusal")
            used_at = node.lineno


def _subclasses(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the classes of errors in a module: name, and kind and default slug."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or node.name in _KINDS:
            continue
        for kind in _KINDS.keys() & set(map(ast.unparse, node.bases)):
            yield node.name, (kind, "".join(re.findall(r"default_slug = '(.*)'", ast.unparse(node))))


def _calls(tree: ast.Module, kinds: Collection[str]) -> Iterator[tuple[ast.AST, str, ast.Call]]:
    """Yield each call that creates an error with a message: its innermost function, the name of the class, the call."""
    inside: dict[ast.AST, tuple[ast.AST, str]] = {}
    for scope in ast.walk(tree):  # outer scopes come first
        if isinstance(scope, ast.Module | ast.ClassDef | ast.FunctionDef):
            of_class = scope.name if isinstance(scope, ast.ClassDef) else inside.get(scope, (tree, ""))[1]
            inside |= dict.fromkeys(ast.walk(scope), (scope, of_class))
    calls = [(node, *where) for node, where in inside.items() if isinstance(node, ast.Call) and node.args]
    raised = {node.exc for node in inside if isinstance(node, ast.Raise)}
    for node, scope, of_class in sorted(calls, key=lambda item: item[0].lineno):
        name = ast.unparse(node.func).replace("super().__init__", of_class)
        parameters = {item.arg for item in ast.walk(scope) if isinstance(item, ast.arg)} if node in raised else ()
        if name in kinds or name in parameters or any(item.arg == "slug" for item in node.keywords):
            yield scope, name, node


@dataclass(frozen=True)
class _Texts:
    """Finds the strings that an expression in a function may return; parts that are known only at run time are `…`.

    A name has the values assigned to it between `used_at`, the line of the previous error, and `line`; if there are
    none, it has the values assigned before.
    """

    path: Path
    scope: ast.AST
    used_at: int
    line: int

    def of(self, node: ast.expr | None) -> list[str]:
        match node:
            case None:
                return [""]
            case ast.Constant():
                return [str(node.value or "")]
            case ast.JoinedStr():
                return ["".join(str(part.value) if isinstance(part, ast.Constant) else _VARIES for part in node.values)]
            case ast.BinOp(op=ast.Add()):
                return [left + right for left, right in product(self.of(node.left), self.of(node.right))]
            case ast.BoolOp(values=values):
                return [text for value in values for text in self.of(value)]
            case ast.IfExp():
                return [*self.of(node.body), *self.of(node.orelse)]
            case ast.Call(func=ast.Name("ErrorText"), args=[of]):
                return self.of(of)
            case ast.Subscript(value=ast.Name() as table):
                return self._named(table.id)
            case ast.Call(func=ast.Attribute(value=ast.Name() as table, attr="get"), args=[_, default]):
                return [*self._named(table.id), *self.of(default)]
            case ast.Name():
                return self._named(node.id)
        return [_VARIES]

    def _named(self, name: str) -> list[str]:
        """Return the values of a constant of the module, or what is assigned in the function."""
        if name.isupper():
            module = ".".join(("keytail", *self.path.relative_to(_HOME).with_suffix("").parts))
            value: Any = getattr(importlib.import_module(module), name, _VARIES)
            texts = [value] if isinstance(value, str) else list(value.values()) if isinstance(value, dict) else []
            return list(dict.fromkeys(text for text in texts if isinstance(text, str))) or [_VARIES]
        assigned = [node for node in ast.walk(self.scope) if isinstance(node, ast.Assign) and node.lineno < self.line
                    and ast.unparse(node.targets[0]) == name]  # fmt: skip
        newer = [node for node in assigned if node.lineno > self.used_at]
        return [text for node in newer or assigned for text in self.of(node.value)] or [_VARIES]


def _findings() -> str:
    about = (
        "`kind` in `findings` of a row has one of these values. verify/VERIFY.md describes the checks, and which "
        "findings mean that records are lost when a broker starts."
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
