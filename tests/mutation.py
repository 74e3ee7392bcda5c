"""Changes one operator, number or statement of the core at a time and checks that a test fails: `make mutants N=200`.

    KEYTAIL_SEED=7 python -m tests.mutation --n 200 --jobs 2      # draw 200 mutants, run those that have no result yet
    KEYTAIL_SEED=7 python -m tests.mutation --n 200 --survivors   # run the survivors again, after a new test
    KEYTAIL_SEED=7 python -m tests.mutation --n 200 --survivors --folders crash   # run them with other tests
    KEYTAIL_SEED=7 python -m tests.mutation --n 200 --table       # run nothing, print the results

Needs the extra `mutation` of pyproject.toml (cosmic-ray). Cosmic-ray lists and applies the mutations; `Remove` below
adds the removal of a statement. A position in the code is drawn first, then one of the mutations that are possible
there, so that each module is drawn in proportion to its code. Not drawn, because they do not change behaviour:

- annotations, statements under `TYPE_CHECKING`, and decorators (how a kernel is compiled, the slots of a class);
- the replacement of a comparison by `is` or `is not`, and of these two by any other comparison than each other.

A mutant is never written to a file, and its kernels are not compiled: `tests/mutated.py` describes how tests run with
it. The tests of `--folders` that need no JVM are first run once without a mutation, to record the lines of the core
that each of them executes; those that take too long without compilation are left out. A mutant is run with the tests
that execute its statement until one fails: the quickest test of each function first, then the next ones, up to
`--limit-s` seconds of tests. A mutant that exceeds its time limit or crashes the process counts as caught, and is
listed separately. `results.jsonl` in KEYTAIL_MUTANTS (by default a folder in the temporary directory) has a line for
each mutant; a stopped run continues there when it is started again, and lines of a changed test file are recorded
again. After a change of the package all results are out of date. Run it in a clone if the tree may change meanwhile.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.python.tree import ExprStmt, Keyword

from tests.mutated import Lines, SelectedTests, change_imports, run_tests

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lib/keytail"
PLACE = Path(os.environ.get("KEYTAIL_MUTANTS") or Path(tempfile.gettempdir()) / "keytail-mutants")
RESULTS = PLACE / "results.jsonl"

CORE = {
    "survivors": (
        "compact/map_phase/survivors.py", "compact/map_phase/offset_map.py", "compact/map_phase/reading.py",
        "log/records/key_scan.py", "log/transactions.py", "kernels/offset_map.py", "kernels/key_scan.py",
        "kernels/transactions.py",
    ),
    "rewriting": (
        "compact/plan.py", "compact/producers.py", "compact/write_phase/rewrite.py", "compact/write_phase/pieces.py",
        "compact/write_phase/passes.py", "kernels/pieces.py", "kernels/rewriting/*.py",
    ),
    "proof": ("compact/proof/*.py", "kernels/proof/*.py", "kernels/walk.py"),
    "swap": ("log/replacement/directory.py", "log/replacement/replace.py", "log/replacement/swap.py"),
    "recovery": ("log/replacement/recover.py",),
}  # fmt: skip
# Its kernels do not belong to the core, and mutants would change how all kernels are cached.
NOT_RUN = {"tests/kernels/test_jit.py"}
LONG_CPU_S = 30  # limit for all cases of a test together while lines are recorded; slower tests are not run


class Remove(Operator):
    """Removes a statement that is a call, an augmented assignment, or an assignment to an item or attribute."""

    def mutation_positions(self, node):
        parent = node.parent
        if parent is None or parent.type != "simple_stmt" or node is not parent.children[0]:
            return
        if isinstance(node, ExprStmt):
            target, sign = node.children[:2]
            wanted = len(getattr(sign, "value", "")) > 1 or (sign == "=" and target.type in ("atom_expr", "power"))
        else:
            wanted = node.type in ("atom_expr", "power") and node.children[-1].children[0] == "("
        if wanted:
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        return Keyword("pass", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls):
        return ()


@dataclass(frozen=True)
class Mutant:
    module: str  # below lib/keytail
    operator: str
    occurrence: int
    line: int

    @property
    def key(self) -> str:
        return f"{self.module}:{self.line} {self.operator} {self.occurrence}"

    def code(self, source: str) -> str:
        mutated = mutate_code(source, _operator(self.operator), self.occurrence)
        assert mutated is not None, self.key
        return str(mutated)


def _operator(name: str) -> Operator:
    return Remove() if name == "Remove" else get_operator(f"core/{name}")()


def _names() -> list[str]:
    names = [name.partition("/")[2] for name in operator_names() if not get_operator(name).arguments()]
    identity = re.compile(r"_(Is|IsNot)(_|$)")
    both = {"ReplaceComparisonOperator_Is_IsNot", "ReplaceComparisonOperator_IsNot_Is"}
    wanted = [name for name in names if name in both or not identity.search(name)]
    return [*(name for name in wanted if name not in ("NoOp", "RemoveDecorator")), "Remove"]


def modules() -> dict[str, str]:
    """Return each module of the core, and the part to which it belongs."""
    found = {}
    for part, patterns in CORE.items():
        for pattern in patterns:
            paths = sorted(PACKAGE.glob(pattern))
            assert paths, pattern
            found.update({str(path.relative_to(PACKAGE)): part for path in paths})
    return found


def _spans_without_behaviour(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for node in ast.walk(ast.parse(source)):
        spans: list[ast.AST | None] = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            spans += node.decorator_list
        if isinstance(node, ast.FunctionDef):
            spans.append(node.returns)
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            spans.append(node.annotation)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            spans.append(node)
        for span in spans:
            if span is not None:
                yield (span.lineno, span.col_offset), (span.end_lineno or 0, span.end_col_offset or 0)


def _mutants_of(module: str) -> dict[tuple[int, int], list[Mutant]]:
    """Return the mutants of a module by position."""
    source = (PACKAGE / module).read_text()
    without = list(_spans_without_behaviour(source))
    nodes = list(ast_nodes(get_ast(source)))
    found: dict[tuple[int, int], list[Mutant]] = defaultdict(list)
    for name in _names():
        operator = _operator(name)
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(positions):
            if not any(low <= start < high for low, high in without):
                found[start].append(Mutant(module, name, occurrence, start[0]))
    return found


def draw(n: int, seed: str) -> list[Mutant]:
    """Draw `n` mutants; a larger draw with the same seed begins with the same ones."""
    chance = random.Random(seed)
    places = [mutants for module in modules() for _, mutants in sorted(_mutants_of(module).items())]
    chance.shuffle(places)
    return [chance.choice(mutants) for mutants in places[:n]]


def diff_of(mutant: Mutant) -> str:
    source = (PACKAGE / mutant.module).read_text()
    lines = difflib.unified_diff(source.splitlines(), mutant.code(source).splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if line[:3] not in ("---", "+++"))


# Processes


@dataclass(frozen=True)
class Ended:
    number: int  # the number of the call
    status: int  # as returned by `waitstatus_to_exitcode`
    cpu_s: float
    printed: str
    found: Any  # what the call returned, if it was not killed


def in_processes(calls: Iterable[Callable[[Path], object]], jobs: int) -> Iterator[Ended]:
    """Run each call in a fork of this process, at most `jobs` at a time, each in a separate folder."""
    running: dict[int, tuple[int, Path]] = {}

    def end_of_one() -> Ended:
        pid, status, used = os.wait4(-1, 0)
        number, folder = running.pop(pid)
        try:
            os.killpg(pid, signal.SIGKILL)  # kill processes that its tests left
        except ProcessLookupError:
            pass
        found = folder / "found.json"
        ended = Ended(
            number,
            os.waitstatus_to_exitcode(status),
            round(used.ru_utime + used.ru_stime, 1),
            (folder / "printed.txt").read_text(errors="replace"),
            json.loads(found.read_text()) if found.exists() else None,
        )
        shutil.rmtree(folder)
        return ended

    for number, call in enumerate(calls):
        if len(running) == jobs:
            yield end_of_one()
        folder = PLACE / f"run-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        pid = os.fork()
        if not pid:
            _in_child(call, folder)
        running[pid] = number, folder
    while running:
        yield end_of_one()


def _in_child(call: Callable[[Path], object], folder: Path) -> None:
    status = 1
    try:
        os.setsid()
        printed = os.open(folder / "printed.txt", os.O_WRONLY | os.O_CREAT)
        for descriptor in (1, 2):
            os.dup2(printed, descriptor)
        found = call(folder / "tmp")
        (folder / "found.json").write_text(json.dumps(found))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# Selection of tests


def test_files(folders: Iterable[str]) -> list[str]:
    paths = [path for folder in folders for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]
    return [name for path in paths if (name := str(path.relative_to(ROOT))) not in NOT_RUN]


def _kernels() -> list[str]:
    return [_dotted(module) for module in modules() if module.startswith("kernels/")]


def _dotted(module: str) -> str:
    return "keytail." + module.removesuffix(".py").replace("/", ".")


@functools.cache
def _code() -> str:
    """Return a digest of the package."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))).hexdigest()[:16]


def _record_lines(file: str, folder: Path) -> object:
    change_imports(_kernels(), {})
    plugin = Lines([str(PACKAGE / module) for module in modules()], LONG_CPU_S)
    run_tests([file], plugin, folder)
    tests = {
        name: {**test, "lines": {str(Path(path).relative_to(PACKAGE)): found for path, found in test["lines"].items()}}
        for name, test in plugin.tests.items()
    }
    return {"tests": tests, "left_out": plugin.left_out}


def measure(folders: Iterable[str], jobs: int) -> dict[str, dict]:
    """Return seconds and lines of each test in these folders that passes without compiled kernels."""
    (PLACE / "lines").mkdir(exist_ok=True)
    places = {}
    for file in test_files(folders):
        digest = hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]
        places[file] = PLACE / "lines" / f"{file.replace('/', '-')}.{_code()}.{digest}.json"
    todo = [file for file, place in places.items() if not place.exists()]
    for ended in in_processes((functools.partial(_record_lines, file) for file in todo), jobs):
        file = todo[ended.number]
        print("measured", file, f"{ended.cpu_s} s", "" if ended.found else f"status {ended.status}", flush=True)
        places[file].write_text(json.dumps(ended.found or {"tests": {}, "left_out": {file: ended.printed[-3000:]}}))
    found = [json.loads(place.read_text()) for place in places.values()]
    left_out = {name: why for file in found for name, why in file["left_out"].items()}
    (PLACE / "left-out.json").write_text(json.dumps(left_out, indent=1))
    tests = {name: test for file in found for name, test in file["tests"].items()}
    print(
        f"{len(tests)} tests; {len(left_out)} that take long or need compiled kernels are in left-out.json", flush=True
    )
    return tests


def _statement(module: str, line: int) -> set[int]:
    """Return the lines of the statement at this line; for a compound statement, those before its body."""
    inner = (1, 0)
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else (node.end_lineno or 0)
            if node.lineno >= inner[0] and line <= end:
                inner = node.lineno, end
    return {line, *range(inner[0], inner[1] + 1)}


def _executed(mutant: Mutant) -> dict[str, set[int]]:
    """Return lines by module of the core: only tests that execute one of them are run with this mutant.

    Statements outside of functions are executed by an import; tests are run that use a name that such a statement
    assigns.
    """
    nodes = list(ast.walk(ast.parse((PACKAGE / mutant.module).read_text())))
    lines = _statement(mutant.module, mutant.line)
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    if any(node.lineno <= mutant.line <= (node.end_lineno or 0) for node in functions):
        return {mutant.module: lines}
    stores = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names = sorted({node.id for node in stores if node.lineno in lines})
    word = re.compile(rf"\b({'|'.join(names)})\b" if names else "")
    found = {}
    for module in modules() if names else [mutant.module]:
        text = (PACKAGE / module).read_text().splitlines()
        found[module] = {number for number, line in enumerate(text, 1) if word.search(line)}
    return found


def tests_for(mutant: Mutant, tests: dict[str, dict], limit_s: float) -> dict[str, float]:
    """Return the tests that execute the mutant's statement, with their seconds, in the order in which they are run."""
    wanted = _executed(mutant)
    of_function: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, test in tests.items():
        if any(lines.intersection(test["lines"].get(module, ())) for module, lines in wanted.items()):
            of_function[name.partition("[")[0]].append((test["seconds"], name))
    order = []
    for found in of_function.values():
        total_s = 0.0
        for seconds, name in sorted(found):
            total_s += seconds
            order.append((total_s, name, seconds))
    chosen, total_s = {}, 0.0
    for _, name, seconds in sorted(order):
        total_s += seconds
        if chosen and total_s > limit_s:
            break
        chosen[name] = seconds
    return chosen


# Results


def _run_mutant(mutant: Mutant, chosen: dict[str, float], folder: Path) -> object:
    source = (PACKAGE / mutant.module).read_text()
    change_imports(_kernels(), {_dotted(mutant.module): mutant.code(source)})
    plugin = SelectedTests(chosen)
    if not chosen:
        return {"status": 0, "by": ""}
    status = run_tests(sorted({name.partition("::")[0] for name in chosen}), plugin, folder, "-x")
    return {"status": status, "by": plugin.failed}


def _outcome(ended: Ended) -> tuple[str, str]:
    """Return the outcome, and the test that failed."""
    if not isinstance(ended.found, dict):
        return ("time" if ended.status in (-signal.SIGVTALRM, -signal.SIGALRM) else "crash"), ""
    by = str(ended.found["by"])
    if ended.found["status"] == 0:
        return "survived", ""
    return ("caught" if by else "unclear"), by


def run(todo: Sequence[Mutant], tests: dict[str, dict], limit_s: float, jobs: int) -> None:
    chosen = [tests_for(mutant, tests, limit_s) for mutant in todo]
    calls = (functools.partial(_run_mutant, *given) for given in zip(todo, chosen, strict=True))
    for count, ended in enumerate(in_processes(calls, jobs), 1):
        mutant = todo[ended.number]
        outcome, by = _outcome(ended)
        if outcome in ("time", "crash", "unclear"):
            (PLACE / f"{outcome}-{re.sub(r'[^A-Za-z0-9_]+', '-', mutant.key)}.txt").write_text(ended.printed)
        result = {
            "key": mutant.key, "code": _code(), "outcome": outcome, "by": by, "cpu_s": ended.cpu_s,
            "tests": len(chosen[ended.number]), "diff": diff_of(mutant),
        }  # fmt: skip
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{count}/{len(todo)}", mutant.key, outcome, by, f"{ended.cpu_s} s", flush=True)


def results() -> dict[str, dict]:
    """Return the last result of each mutant of this code."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {result["key"]: result for result in map(json.loads, lines) if result["code"] == _code()}


def table(mutants: Sequence[Mutant]) -> None:
    known, of_module = results(), defaultdict(list)
    for mutant in mutants:
        if mutant.key in known:
            of_module[mutant.module].append(known[mutant.key])
    columns = ("caught", "time", "crash", "survived", "unclear")
    print("\n| Part | Module | Drawn | Caught | By time | By a crash | Survived | Unclear |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    totals = [0] * (len(columns) + 1)
    for module, part in modules().items():
        found = of_module[module]
        numbers = [len(found), *(sum(item["outcome"] == outcome for item in found) for outcome in columns)]
        totals = [a + b for a, b in zip(totals, numbers, strict=True)]
        if found:
            print(f"| {part} | `{module}` | {' | '.join(map(str, numbers))} |")
    print(f"| all | | {' | '.join(map(str, totals))} |")
    for outcome in ("survived", "unclear"):
        for found in of_module.values():
            for item in found:
                if item["outcome"] == outcome:
                    print(f"\n{outcome}: {item['key']}\n{item['diff']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=200, help="mutants to draw (default 200)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--limit-s", type=float, default=60, help="seconds of tests for one mutant (default 60)")
    parser.add_argument(
        "--folders", default="kernels,compact,log,erase", help="folders of tests (default kernels,compact,log,erase)"
    )
    parser.add_argument("--survivors", action="store_true", help="run again the mutants that survived")
    parser.add_argument("--table", action="store_true", help="only print the results")
    options = parser.parse_args()
    seed = os.environ.get("KEYTAIL_SEED") or str(random.SystemRandom().randrange(2**32))
    print(f"KEYTAIL_SEED={seed}, in {PLACE}", flush=True)
    PLACE.mkdir(parents=True, exist_ok=True)
    mutants = draw(options.n, seed)
    if not options.table:
        # The variables are set for this process, whose forks import the package, and for processes that tests start.
        sys.path.insert(0, str(ROOT / "lib"))
        os.environ["PYTHONPATH"] = os.pathsep.join([f"{ROOT}/lib", str(ROOT)])
        os.environ.update({"KEYTAIL_SEED": "1", "KEYTAIL_CACHE_DIR": str(PLACE / "kernels")})
        known = results()
        again = ("survived", "unclear") if options.survivors else ()
        todo = [m for m in mutants if m.key not in known or known[m.key]["outcome"] in again]
        run(todo, measure(options.folders.split(","), options.jobs), options.limit_s, options.jobs)
    table(mutants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
