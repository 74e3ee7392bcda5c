"""Changes one operator, number or statement of the core at a time and checks that a test fails: `make mutants N=200`.

    KEYTAIL_SEED=7 python -m tests.mutation --n 200 --jobs 2      # draw 200 mutants, run those that have no result yet
    KEYTAIL_SEED=7 python -m tests.mutation --n 200 --survivors   # run the survivors again, after a new test
    KEYTAIL_SEED=7 python -m tests.mutation --n 200 --table       # run nothing, print the results

Needs the extra `mutation` of pyproject.toml (cosmic-ray). Cosmic-ray lists and applies the mutations; `Remove` below
adds the removal of a statement. A position in the code is drawn first, then one of the mutations that are possible
there, so that each module is drawn in proportion to its code. Not drawn, because they do not change behaviour:

- annotations, statements under `TYPE_CHECKING`, and decorators (how a kernel is compiled, the slots of a class);
- the replacement of a comparison by `is` or `is not`, and of these by any comparison but each other.

Each mutant is applied to a copy of the tree in KEYTAIL_MUTANTS (by default a folder in the temporary directory),
never to the tree itself. The tests that need no JVM and reach the module by imports are run until one fails: first
the files that have caught mutants of this module, then those with a similar name, then those at the shortest
distance, up to about 40 s of tests. When all mutants are done, the survivors are run with more tests, up to about two
minutes. A time limit counts as caught and is listed separately, and so is a crash of the process. `results.jsonl` in
that folder has a line for each mutant; a stopped run continues there when it is started again.

The copy differs in three ways. Each kernel's entry in the cache of compiled kernels is named by the source of the
kernel and of all that it uses, not of all kernels, so that a mutant compiles only what it changes. Mutants of the
proof's kernels are first run without compiling these kernels. Hypothesis does not shrink failures.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import hashlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.python.tree import ExprStmt, Keyword

ROOT = Path(__file__).parents[1]
PLACE = Path(os.environ.get("KEYTAIL_MUTANTS") or Path(tempfile.gettempdir()) / "keytail-mutants")
RESULTS, SECONDS, CHECKED = (PLACE / name for name in ("results.jsonl", "seconds.json", "checked.txt"))

CORE = {
    "survivors": (
        "compact/map_phase/survivors.py", "compact/map_phase/offset_map.py", "compact/map_phase/reading.py",
        "log/records/key_scan.py", "log/transactions.py", "kernels/offset_map.py", "kernels/key_scan.py",
        "kernels/transactions.py",
    ),
    "rewriting": (
        "compact/plan.py", "compact/producers.py", "compact/write_phase/rewrite.py", "compact/write_phase/pieces.py",
        "compact/write_phase/rounds.py", "kernels/pieces.py", "kernels/rewriting/*.py",
    ),
    "proof": ("compact/proof/*.py", "kernels/proof/*.py", "kernels/walk.py"),
    "swap": ("log/directory.py", "log/replace.py", "log/swap.py"),
    "recovery": ("log/recover.py",),
}  # fmt: skip
FOLDERS = ("compact", "crash", "golden", "kernels", "log", "rebuild_index", "undo", "verify")
# The copy changes jit.py, which these tests test.
NOT_RUN = {"tests/kernels/test_jit.py"}
# These tests also pass with the following kernels as plain Python, which avoids compiling most of their mutants.
PLAIN = (*(f"proof.{name}" for name in ("checks", "meaning", "markers", "records", "rest", "step", "table")), "walk")
PLAIN_TESTS = [f"tests/compact/proof/test_{which}.py" for which in ("transactions", "prove", "legacy")]
# Seconds of tests that all mutants are run with, and that survivors are run with.
NEAR_S, FAR_S = 40.0, 120.0
LONG_S = 10.0  # the assumed maximum for one test
TEST_LIMIT_CPU_S = 60  # of one test, including the kernels that a mutant makes it compile
COMPILING_CPU_S = 900  # of the first test, which compiles nearly all kernels
TEST_LIMIT_S = 1800  # of a test that waits forever: a busy machine must not count as a caught mutant
MEMORY_BYTES = 12 << 30


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
    ours = [name for name in names if name in both or not identity.search(name)]
    return [*(name for name in ours if name not in ("NoOp", "RemoveDecorator")), "Remove"]


def modules() -> dict[str, str]:
    """Return each module of the core, and the part that it belongs to."""
    package = ROOT / "lib/keytail"
    found = {}
    for part, patterns in CORE.items():
        for pattern in patterns:
            paths = sorted(package.glob(pattern))
            assert paths, pattern
            found.update({str(path.relative_to(package)): part for path in paths})
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
    source = (ROOT / "lib/keytail" / module).read_text()
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
    source = (ROOT / "lib/keytail" / mutant.module).read_text()
    lines = difflib.unified_diff(source.splitlines(), mutant.code(source).splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if line[:3] not in ("---", "+++"))


# Which tests.


@functools.cache
def _imports(path: Path) -> frozenset[Path]:
    """Return the modules of keytail and of the tests that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        dotted: list[str] = []
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            dotted = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in dotted:
            place = ROOT / ("lib" if name.startswith("keytail") else "") / (name.replace(".", "/") + ".py")
            if name.startswith(("keytail.", "tests.")) and place.is_file():
                found.add(place)
    return frozenset(found)


@functools.cache
def _distances(test: Path) -> dict[Path, int]:
    found, wave, distance = {test: 0}, [test], 0
    while wave:
        distance += 1
        wave = sorted({place for path in wave for place in _imports(path)} - found.keys())
        found.update(dict.fromkeys(wave, distance))
    return found


def test_files() -> list[str]:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / "tests" / folder).rglob("test_*.py"))
    return [name for path in paths if (name := str(path.relative_to(ROOT))) not in NOT_RUN]


def tests_for(module: str, seconds: dict[str, float], caught: dict[str, int]) -> tuple[list[str], list[str]]:
    """Return the files to run first, and those for survivors. `caught`: caught mutants of the module, by file."""
    place, words = ROOT / "lib/keytail" / module, set(re.findall("[a-z]+", Path(module).stem))

    def order(name: str) -> tuple[float, ...]:
        alike = len(words & set(re.findall("[a-z]+", Path(name).stem)))
        return -caught.get(name, 0), -alike, _distances(ROOT / name)[place] + seconds[name] / 10

    near: list[str] = []
    far: list[str] = []
    for name in sorted((name for name in seconds if place in _distances(ROOT / name)), key=order):
        for files, limit_s in ((near, NEAR_S), (far, FAR_S)):
            if not files or sum(seconds[file] for file in files) + seconds[name] <= limit_s:
                files.append(name)
                break
    return near, far


# Copies of the tree.

_DIGEST = '''

@functools.cache
def _top_of(path: str) -> dict[str, Any]:
    """What each name at the top of a module is: a statement, or the module and the name that it is imported from."""
    found: dict[str, Any] = {}
    with open(path) as file:
        body = ast.parse(file.read()).body
    for node in body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keytail.kernels"):
            for alias in node.names:
                other = os.path.join(os.path.dirname(os.path.abspath(__file__)), *node.module.split(".")[2:])
                is_module = os.path.isdir(other)
                other = (os.path.join(other, alias.name) if is_module else other) + ".py"
                found[alias.asname or alias.name] = (other, None if is_module else alias.name)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    found[name.id] = node
    return found


def _folder_of(function: Callable[..., Any]) -> str:
    """By the source of the function and of all that it names: functions and values of the kernels' modules."""
    path = function.__code__.co_filename
    todo: list[Any] = [(path, name) for name in (function.__name__, *_top_of(path))]
    if function.__name__ in _top_of(path):
        del todo[1:]
    seen: dict[Any, str] = {}
    while todo:
        place = path, name = todo.pop()
        if place in seen or os.path.basename(path) in ("jit.py", "native.py"):
            continue
        node = _top_of(path).get(name)
        seen[place] = ""
        if isinstance(node, tuple):
            todo += [(node[0], other) for other in ([node[1]] if node[1] else _top_of(node[0]))]
        elif node is not None:
            seen[place] = ast.dump(node)
            todo += [(path, part.id) for part in ast.walk(node) if isinstance(part, ast.Name)]
    texts = sorted((os.path.basename(path), str(name), text) for (path, name), text in seen.items())
    return os.path.join(CACHE_FOLDER, hashlib.sha256(repr(texts).encode()).hexdigest()[:24])
'''


_IN_CONFTEST = """

if os.environ.get("KEYTAIL_PLAIN"):
    from keytail.kernels import walk
    from keytail.kernels.opening.decoders import NOT_PLAIN
    from keytail.kernels.proof import step

    walk._memcmp = lambda a, i, b, j, n: int(bytes(a[i : i + n]) != bytes(b[j : j + n]))
    step.decompress_plain = lambda *given: NOT_PLAIN  # the caller decompresses it then


def pytest_runtest_logstart(nodeid, location):
    import signal
    # The default action ends the process, also inside a kernel.
    signal.setitimer(signal.ITIMER_VIRTUAL, float(os.environ["KEYTAIL_LIMIT_CPU_S"]))
"""


def make_copy(number: int) -> Path:
    tree = PLACE / f"tree-{number}"
    shutil.rmtree(tree, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "target", ".git", ".venv*", ".*_cache", "build", "spark-warehouse")
    shutil.copytree(ROOT, tree, ignore=ignored)
    for pattern, changes in {
        "lib/keytail/kernels/jit.py": (
            ("        digest.update(source.read_bytes())\n", ""),
            ("numba.config.CACHE_DIR = CACHE_FOLDER", "numba.config.CACHE_DIR = _folder_of(function)"),
            ("class _Folder(caching.UserProvidedCacheLocator):\n",
             "class _Folder(caching.UserProvidedCacheLocator):\n"
             "    def __init__(self, py_func, py_file):\n"
             "        super().__init__(py_func, py_file)\n"
             "        self._cache_path = numba.config.CACHE_DIR  # the same for all copies of the tree\n\n"
             "    def get_source_stamp(self):\n"
             "        return 0, 0\n\n"),
            ("    options = {\"nogil\": True,",
             "    plain = os.environ.get('KEYTAIL_PLAIN', '').split(',')\n"
             "    if function.__module__.removeprefix('keytail.kernels.') in plain:\n"
             "        return function\n"
             "    options = {\"nogil\": True,"),
            ("import hashlib\n", "import ast\nimport functools\nimport hashlib\n"),
            ("\n\ndef kernel(", _DIGEST + "\n\ndef kernel("),
        ),
        "tests/conftest.py": (
            ("import settings\n", "import Phase, settings\n"),
            ("\n\nclass Watch:", _IN_CONFTEST + "\n\nclass Watch:"),
            ("deadline=None)",
             "deadline=None, database=None, derandomize=True, phases=[Phase.explicit, Phase.generate])"),
        ),
    }.items():  # fmt: skip
        text = (tree / pattern).read_text()
        for old, new in changes:
            assert text.count(old) == 1, (pattern, old)
            text = text.replace(old, new)
        (tree / pattern).write_text(text)
    return tree


def run_tests(
    tree: Path,
    files: Sequence[str],
    *options: str,
    limit_s: float,
    plain: bool = False,
    test_limit_cpu_s: float = TEST_LIMIT_CPU_S,
) -> tuple[int | None, str]:
    """Return exit status, None for a time limit, and output. `plain`: do not compile the kernels of the proof."""
    temporary = tree / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([f"{tree}/lib", str(tree)]),
        "KEYTAIL_CACHE_DIR": str(PLACE / "kernels"),
        "KEYTAIL_SEED": "1",
        "KEYTAIL_LIMIT_CPU_S": str(test_limit_cpu_s),
        "KEYTAIL_PLAIN": ",".join(PLAIN) if plain else "",
        "TMPDIR": str(temporary),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not interop and not spark", "-rfE",
               "--tb=line", "--timeout", str(TEST_LIMIT_S), "--timeout-method", "thread", *options, *files]  # fmt: skip
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=printed, stderr=subprocess.STDOUT, process_group=0
        )
        resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return status, printed.read()


def measure(tree: Path) -> dict[str, float]:
    """Return the seconds of each file of tests, all of which must pass on the copy without a mutation."""
    if SECONDS.exists():
        return dict(json.loads(SECONDS.read_text()))
    print("measures the tests, which compile the kernels first", flush=True)
    status, text = run_tests(
        tree, test_files(), "--junit-xml", f"{tree}/tests.xml", limit_s=7200, test_limit_cpu_s=COMPILING_CPU_S
    )
    if status != 0:
        sys.exit(f"{text}\nThe tests fail on the copy without a mutation (exit status {status}).")
    seconds = dict.fromkeys(test_files(), 0.0)
    for case in ElementTree.parse(tree / "tests.xml").iter("testcase"):
        dotted = case.attrib["classname"].replace(".", "/")
        name = next((name for name in seconds if dotted.startswith(name[:-3])), None)
        if name:  # if a test compiled kernels, that is most of its time
            seconds[name] += min(float(case.attrib["time"]), LONG_S)
    SECONDS.write_text(json.dumps(seconds, indent=1))
    return seconds


def result_of(
    mutant: Mutant, tree: Path, first: Sequence[str], files: Sequence[str], limit_s: float
) -> dict[str, object]:
    """Run a mutant with `first` without compiling the kernels of the proof, then with `files`; return its result."""
    target = tree / "lib/keytail" / mutant.module
    source, times = target.read_text(), target.stat()
    start_s = time.monotonic()
    outcome, by = "survived", ""
    try:
        target.write_text(mutant.code(source))
        # Python's cached bytecode is identified by the size and the modification seconds of the source: give each
        # mutant another second.
        os.utime(target, (next(_times_s), 0))
        status, text = 0, ""
        if first:
            status, text = run_tests(tree, first, "-x", limit_s=limit_s, plain=True)
        if status == 0:
            status, text = run_tests(tree, files, "-x", limit_s=limit_s)
        if status != 0:
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
            by = failed[1] if failed else ""
            if status == -signal.SIGVTALRM or re.search(r"\+ Timeout \+", text):
                outcome = "time"
            elif (status is not None and status < 0) or "Fatal Python error" in text:
                outcome = "crash"
            else:
                outcome = "caught" if failed else "unclear"
            if outcome != "caught":
                (PLACE / f"{outcome}-{re.sub(r'[^A-Za-z0-9_]+', '-', mutant.key)}.txt").write_text(text)
    finally:
        target.write_text(source)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
    took_s = round(time.monotonic() - start_s, 1)
    return {"key": mutant.key, "outcome": outcome, "by": by, "seconds": took_s, "diff": diff_of(mutant)}


_times_s = itertools.count(1)


# Results.


def results() -> dict[str, dict[str, object]]:
    """Return the last result of each mutant."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {result["key"]: result for result in map(json.loads, lines)}


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
    parser.add_argument("--survivors", action="store_true", help="run those again that survived")
    parser.add_argument("--table", action="store_true", help="print the results only")
    options = parser.parse_args()
    seed = os.environ.get("KEYTAIL_SEED") or str(random.SystemRandom().randrange(2**32))
    print(f"KEYTAIL_SEED={seed}, in {PLACE}", flush=True)
    PLACE.mkdir(parents=True, exist_ok=True)
    mutants = draw(options.n, seed)
    if not options.table:
        for stage in (0, 1):
            known = results()
            again = [m for m in mutants if known.get(m.key, {}).get("outcome") in ("survived", "unclear")]
            todo = [m for m in mutants if m.key not in known]
            if stage or options.survivors:
                todo += [m for m in again if options.survivors or known[m.key]["stage"] < stage]
            run(todo, stage, options.jobs)
    table(mutants)
    return 0


def _is_plain(module: str) -> bool:
    return module in {f"kernels/{name}.py" for name in PLAIN}


def run(todo: Sequence[Mutant], stage: int, jobs: int) -> None:
    """Run the mutants with the tests of that stage (0: near, 1: the next ones)."""
    trees: SimpleQueue[Path] = SimpleQueue()
    for number in range(jobs):
        trees.put(make_copy(number))
    lock = threading.Lock()
    tree = trees.get()
    seconds = measure(tree)
    sources = [*tree.glob("lib/keytail/kernels/*.py"), *(tree / name for name in PLAIN_TESTS)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()
    is_checked = CHECKED.exists() and CHECKED.read_text() == digest
    if not is_checked and any(_is_plain(mutant.module) for mutant in todo):
        status, text = run_tests(tree, PLAIN_TESTS, limit_s=1800, plain=True)
        if status != 0:
            sys.exit(f"{text}\nThe tests of the proof fail without a mutation, where its kernels are not compiled.")
        CHECKED.write_text(digest)
    trees.put(tree)
    caught: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def count(key: str, by: str) -> None:
        if by:
            caught[key.partition(":")[0]][by.partition("::")[0]] += 1

    for result in results().values():
        count(str(result["key"]), str(result["by"]))

    def one(numbered: tuple[int, Mutant]) -> None:
        number, mutant = numbered
        tree = trees.get()
        try:
            files = tests_for(mutant.module, seconds, dict(caught[mutant.module]))[stage]
            first = PLAIN_TESTS if stage == 0 and _is_plain(mutant.module) else []
            result = result_of(mutant, tree, first, files, limit_s=4 * TEST_LIMIT_S) | {"stage": stage}
        finally:
            trees.put(tree)
        with lock:
            count(mutant.key, str(result["by"]))
            with RESULTS.open("a") as file:
                file.write(json.dumps(result) + "\n")
            words = (mutant.key, result["outcome"], result["by"], result["seconds"])
            print(f"{number}/{len(todo)}", *words, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, enumerate(todo, 1)))


if __name__ == "__main__":
    sys.exit(main())
