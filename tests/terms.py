"""Checks that words of the project's earlier private language do not return: `python -m tests.terms`, in `make lint`.

The words of TEXT are not used in pages, docstrings, comments and messages (strings with a blank in the code), and those
of NAMES not as parts of identifiers. Prints each use with its place and the word to use instead, and exits with 1 if
there is any. GLOSSARY.md defines the terms that are used.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

TEXT = {
    "anew": "again, rebuilt",
    "dull": "simple; a dull twin is a reference model",
    "held against": "compared with, checked against",
    "hold against": "compare with, check against",
    "holds against": "compares with, checks against",
    "handed on": "saved",
    "hands on": "saves",
    "hears": "is called with, is notified",
    "mend": "repair",
    "mended": "repaired",
    "mends": "repairs",
    "oddities": "quirks; of a message: warnings",
    "oddity": "quirk; of a message: warning",
    "stride": "chunk",
    "strides": "chunks",
    "take over": "load, adopt (a state)",
    "takes over": "loads, adopts (a state)",
    "told": "reported",
    "twin": "reference model",
    "twins": "reference models",
    "verb": "command",
    "verbs": "commands",
}
# Words that are not used as parts of identifiers.
NAMES = {
    "anew": "again, rebuilt",
    "mend": "repair",
    "mended": "repaired",
    "mends": "repairs",
    "oddities": "quirks, warnings",
    "oddity": "quirk, warning",
    "spoken": "printed",
    "twin": "model",
    "twins": "models",
}
ALLOWED = {
    "tests/terms.py": "the list itself",
    "LICENSE": "a legal text",
}
# By file: a part of a line in which the words are allowed, and the reason.
ALLOWED_LINES = {
    "tests/airflow_dags/test_commands.py": ("echo told", "code of a shell"),
    "tests/airflow_dags/test_rolling.py": ("deletes. mend", "the remedy of an invented row"),
    "tests/report/test_browser.py": ("Error('told')", "code of a page"),
}
CODE = ("lib", "jobs", "tests", "airflow_dags")
PAGES = (".md", "Makefile", ".toml", ".properties", ".conf")


def files() -> list[str]:
    """Return the files of the repository, or those of the source distribution if there is no work tree."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return listed.stdout.split()
    return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and ".venv" not in str(path)]


def texts(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of everything in a file that a person reads."""
    if not path.endswith(".py"):
        yield from enumerate(source.split("\n"), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
            yield from enumerate(token.string.split("\n"), token.start[0])


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield line number and name of everything that a file defines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def words_of(name: str) -> list[str]:
    """Split a name into words: `ListOf_VERBS` -> list, of, verbs."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


TEXT_WORDS = re.compile(r"(?<![\w.-])(" + "|".join(TEXT) + r")(?![\w-])", re.IGNORECASE)


def problems(path: str, source: str) -> Iterator[str]:
    part, _ = ALLOWED_LINES.get(path, (None, ""))
    # Few files have any of the words anywhere, and it would take seconds to parse all files.
    for number, text in texts(path, source) if TEXT_WORDS.search(source) else ():
        if part is not None and part in text:
            continue
        for match in TEXT_WORDS.finditer(re.sub(r"`[^`]*`|\{[^}]*\}|https?://\S+", "", text)):
            yield f"{path}:{number}: {match[0]!r}: {TEXT[match[0].lower()]}"
    if path.endswith(".py") and any(_words(name) for name in re.findall(r"[^\W\d]\w*", source)):
        for number, name in names(source):
            for word in _words(name):
                yield f"{path}:{number}: {word!r} in {name}: {NAMES[word]}"


@functools.cache
def _words(name: str) -> set[str]:
    """Return the words of a name that identifiers must not contain."""
    return set(words_of(name)) & NAMES.keys()


def main() -> int:
    found = []
    for path in files():
        is_code = path.endswith(".py") and path.startswith(CODE)
        if path not in ALLOWED and (is_code or path.endswith(PAGES)):
            found += problems(path, (ROOT / path).read_text())
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
