"""Runs complete command lines on log dirs in which the bytes, names or file types of one partition are damaged.

In every state a command ends with an exit status and rows, never with a traceback. Commands that only read change
nothing. Outside partition directories, the others change only the checkpoints that they maintain. A partition that they
report as done has lost no records (promises 1 and 2, checked by the plain readers of tests/reference).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from keytail.log.fs import FileSystem
from keytail.main import main as cli
from tests.compact.logs import random_log
from tests.hostile.corpus import NOW, Corpus
from tests.hostile.mutator import LIMITS_64, Mutator, split, spoil_entries, spoil_snapshot, spoil_text
from tests.no_spark import without_spark
from tests.reference.batches import Rec
from tests.reference.indexing import index_files
from tests.reference.legacy import decode_any_log

CHECKPOINTS = ("cleaner-offset-checkpoint", "recovery-point-offset-checkpoint", "log-start-offset-checkpoint",
               "replication-offset-checkpoint")  # fmt: skip
OWNED = {"cleaner-offset-checkpoint", "replication-offset-checkpoint", ".lock"}
SPOILED, BYSTANDER = "t-0", "sound-0"
STATUSES = {"compacted", "clean", "skipped", "refused", "corrupt", "failed", "would-compact", "sound", "suspect",
            "damaged", "rebuilt", "would-rebuild", "found", "none", "out-of-range"}  # fmt: skip
BAD = {"refused", "corrupt", "failed", "damaged"}
_STAGES = (".swap", ".cleaned", ".deleted", ".clean")
NOBODY = 65534
_GIANT_BYTES = 1 << 24
Tree = dict[str, tuple[Any, ...]]


class Wrong(AssertionError):
    """A command did something that is not allowed."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


# Creation of damaged log dirs


@dataclass
class Case:
    """A log dir at `root`/logs, and files at `root`/outside that no command may change."""

    root: Path
    damages: list[str]
    as_nobody: bool = False
    meddle: Callable[[], None] | None = None  # a function that changes files while they are read
    meddle_at: int = 0

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def partition(self) -> Path:
        return self.logs / SPOILED


def make(rng: random.Random, root: Path, of: Corpus) -> Case:
    """Create a valid log dir, damage it in up to three ways, and return it."""
    shutil.rmtree(root, ignore_errors=True)
    case = Case(root, [])
    case.logs.mkdir(parents=True)
    (root / "outside").mkdir()
    (root / "outside" / "file").write_bytes(b"not ours")
    (root / "linked").write_bytes(b"ours too, by a hard link")
    ends = {
        SPOILED: _partition(rng, case.partition, of),
        BYSTANDER: _partition(random.Random(7), case.logs / BYSTANDER, None),
    }
    lines = [f"{name.rpartition('-')[0]} 0 {end}\n" for name, end in ends.items()]
    for name in ("replication-offset-checkpoint", "recovery-point-offset-checkpoint"):
        (case.logs / name).write_text("".join(["0\n", f"{len(lines)}\n", *lines]))
    (case.logs / "meta.properties").write_text("version=1\nbroker.id=1\n")
    if rng.random() < 0.5:
        (case.logs / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')
    else:
        (case.logs / "recovery-point-offset-checkpoint").write_text("0\n1\nsound 0 0\n")
    strategies = [rng.choice(_DAMAGES) for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
    # Files are replaced by pipes last, because damaging the bytes of a pipe would block forever.
    strategies.sort(key=lambda strategy: strategy in _LAST)
    if any(strategy in _LAST for strategy in strategies):
        strategies = [strategy for strategy in strategies if strategy is not changing]
    for strategy in strategies:
        case.damages.append(strategy.__name__)
        with contextlib.suppress(OSError):  # earlier damage may make a later one impossible
            strategy(rng, case, of)
    return case


def _partition(rng: random.Random, path: Path, of: Corpus | None) -> int:
    """Write segments of a random log, or consecutive pieces of the corpus. Return the log end offset."""
    path.mkdir()
    logs: list[tuple[int, bytes]] = []
    if of is not None and rng.random() < 0.3:
        log = rng.choice(of.logs)
        parts = split(log)
        at = rng.randrange(len(parts) + 1)
        first = decode_any_log(log)
        logs = [(max(first[0].base_offset, 0), b"".join(parts[:at]))] if at else []
        if at < len(parts):
            logs.append((max(first[at].base_offset, 0), b"".join(parts[at:])))
        end = first[-1].last_offset + 1
    else:
        made = random_log(rng, NOW, codecs=(0, 0, 1, 2, 3, 4))
        logs, end = [(segment.base_offset, segment.log) for segment in made.segments], made.log_end_offset
    if logs[-1][1] and rng.random() < 0.8:
        logs.append((end, b""))
    for base, log in logs:
        index, times = index_files(log, base, 200) if not log or log[16] == 2 else (b"", b"")
        stem = path / f"{base:020d}"
        for suffix, data in ((".log", log), (".index", index), (".timeindex", times)):
            stem.with_suffix(suffix).write_bytes(data)
            os.utime(stem.with_suffix(suffix), ns=((NOW - 5000) * 10**6,) * 2)
    (path / "leader-epoch-checkpoint").write_text(f"0\n1\n0 {logs[0][0]}\n")
    (path / f"{end:020d}.snapshot").write_bytes(rng.choice(of.snapshots) if of else b"\x00\x01\x91\xde\x09\xd0\0\0\0\0")
    return end


def _pick(rng: random.Random, case: Case, suffix: str = "") -> Path:
    found = sorted(
        file
        for file in case.partition.iterdir()
        if file.name.endswith(suffix) and file.lstat().st_size < _GIANT_BYTES and file.stem.isprintable()
    )
    if not found:
        raise FileNotFoundError
    return rng.choice(found)


def damaged_log(rng: random.Random, case: Case, of: Corpus) -> None:
    file = _pick(rng, case, ".log")
    data = file.read_bytes()
    if not data:
        data = rng.choice(of.logs)
    for _ in range(rng.choice((1, 1, 2))):
        data = Mutator(list(of.logs)).spoil(rng, data)
    file.write_bytes(data)


def damaged_index(rng: random.Random, case: Case, of: Corpus) -> None:
    suffix, entry = rng.choice(((".index", 8), (".timeindex", 12), (".txnindex", 34)))
    if suffix == ".txnindex":
        file = _pick(rng, case, ".log").with_suffix(suffix)
        file.write_bytes(spoil_entries(rng, rng.choice(of.indexes)[3], entry))
        return
    file = _pick(rng, case, suffix)
    file.write_bytes(spoil_entries(rng, file.read_bytes(), entry))


def damaged_small_file(rng: random.Random, case: Case, of: Corpus) -> None:
    file = rng.choice((case.partition / "leader-epoch-checkpoint", case.partition / "partition.metadata",
                       *(case.logs / name for name in CHECKPOINTS)))  # fmt: skip
    file.write_bytes(spoil_text(rng, file.read_bytes() if file.exists() else rng.choice(of.texts)))


def checkpoint_at_a_limit(rng: random.Random, case: Case, of: Corpus) -> None:
    (case.logs / rng.choice(CHECKPOINTS)).write_text(f"0\n1\nt 0 {rng.choice(LIMITS_64)}\n")


def damaged_snapshot(rng: random.Random, case: Case, of: Corpus) -> None:
    file = _pick(rng, case, ".snapshot")
    file.write_bytes(spoil_snapshot(rng, rng.choice(of.snapshots)))


def unexpected_name(rng: random.Random, case: Case, of: Corpus) -> None:
    """Add a file, usually with content, whose name stops a broker, cannot be parsed, or is not text."""
    zeros = f"{0:020d}"
    name = rng.choice((
        b"x.log", b"0.log", b".log", b"-1.log", b"99999999999999999999.log", b"09223372036854775807.log",
        f"{zeros}.log.swap".encode(), f"{zeros}.log.cleaned".encode(), f"{zeros}.log.deleted".encode(),
        f"{zeros}.index.swap".encode(), f"{5:020d}.snapshot.deleted".encode(), f"{zeros}.log.rabc.a1.clean".encode(),
        b"a\nb.log", b"a\nb", b"\xff\xfe.log", b"\xff\xfe", "\u0660.log".encode(), "\u202e.index".encode(),
        b"[bold]x.log",
        b"\x1b[2J.log", b" ", b"a" * 255, f"{zeros}.LOG".encode(), f"{zeros}.log ".encode(),
        f"{7:020d}.timeindex".encode(),
    ))  # fmt: skip
    path = os.path.join(os.fsencode(case.partition), name)
    data = rng.choice((b"", rng.choice(of.logs), rng.randbytes(100)))
    with open(path, "xb") as file:
        file.write(data)


def renamed(rng: random.Random, case: Case, of: Corpus) -> None:
    """Give the log of a segment another base offset, to create overlaps, gaps, or the largest offsets."""
    file = _pick(rng, case, ".log")
    number = int(file.stem) if file.stem.isdecimal() and file.stem.isascii() else 0
    base = rng.choice((0, 1, 5, number + 1, max(number - 1, 0), 2**31, 2**62, 2**63 - 1, 2**63 - 2))
    target = file.with_name(f"{base:020d}.log")
    (shutil.copy if rng.random() < 0.5 else os.rename)(file, target)


def removed(rng: random.Random, case: Case, of: Corpus) -> None:
    _pick(rng, case).unlink()


def other_file_type(rng: random.Random, case: Case, of: Corpus) -> None:
    """Replace a file of the partition, or a file of the log dir, by a link, a pipe, a directory or a hard link."""
    beside = [case.logs / name for name in (*CHECKPOINTS, ".lock", "meta.properties", ".kafka_cleanshutdown")]
    file = _pick(rng, case) if rng.random() < 0.8 else rng.choice(beside)
    if file.exists():
        file.unlink()
    strategy = rng.randrange(6)
    if strategy == 0:
        file.symlink_to(rng.choice((case.root / "outside" / "file", Path("/dev/zero"), Path("gone"), file)))
    elif strategy == 1:
        os.mkfifo(file)
    elif strategy == 2:
        file.mkdir()
    elif strategy == 3:
        file.mkdir()
        (file / "inside").write_bytes(b"x")
    elif strategy == 4:
        file.symlink_to(case.root / "outside")
    else:
        # A broker would truncate the file in place, under both names.
        os.link(case.root / "linked", file)


def unexpected_directory(rng: random.Random, case: Case, of: Corpus) -> None:
    name = rng.choice((b"foreign", b"t-0.abc-future", b"t-0.abc-delete", b"t-0.abc-stray", b"t--1", b"t-99999999999",
                       b"t-00",
                       b"u-0", b"\xff-0", b"a\nb-0", b"__cluster_metadata-0", "\u0660-0".encode()))  # fmt: skip
    os.mkdir(os.path.join(os.fsencode(case.logs), name))


def sparse(rng: random.Random, case: Case, of: Corpus) -> None:
    """Make a file sparse and larger than any memory, with hardly any data."""
    beside = [case.logs / name for name in CHECKPOINTS]
    file = _pick(rng, case) if rng.random() < 0.8 else rng.choice(beside)
    os.truncate(file, rng.choice((1 << 40, (1 << 31) + 5, 1 << 36)) if file.exists() else 0)


def unreadable(rng: random.Random, case: Case, of: Corpus) -> None:
    file = rng.choice((_pick(rng, case), case.partition, case.logs / "cleaner-offset-checkpoint"))
    file.chmod(rng.choice((0, 0o200, 0o100)))
    case.as_nobody = True


def changing(rng: random.Random, case: Case, of: Corpus) -> None:
    """Make a file grow, shrink, be replaced or disappear while a command reads."""
    file = _pick(rng, case)
    data = file.read_bytes()
    more = rng.choice((b"x" * 50, rng.choice(of.logs)))

    def meddle() -> None:
        with contextlib.suppress(OSError):
            strategy = len(more) % 4
            if strategy == 0:
                file.write_bytes(data + more)
            elif strategy == 1:
                os.truncate(file, len(data) // 2)
            elif strategy == 2:
                file.unlink()
                file.write_bytes(more)
            else:
                file.unlink()

    case.meddle, case.meddle_at = meddle, rng.randrange(12)


def replaced_partition(rng: random.Random, case: Case, of: Corpus) -> None:
    """Replace the partition directory itself by a link, a file or an empty directory."""
    strategy = rng.randrange(3)
    elsewhere = case.root / "outside" / "t-0"
    shutil.move(case.partition, elsewhere)
    if strategy == 0:
        case.partition.symlink_to(elsewhere)
    elif strategy == 1:
        case.partition.write_bytes(b"x")
    else:
        case.partition.mkdir()


_DAMAGES = (damaged_log,) * 9 + (damaged_index,) * 3 + (damaged_small_file, checkpoint_at_a_limit) * 2 + (
    damaged_snapshot, unexpected_name, unexpected_name, renamed, renamed, removed, other_file_type, other_file_type,
    unexpected_directory, sparse, unreadable, changing, changing, replaced_partition,
)  # fmt: skip
_LAST = (other_file_type, replaced_partition)


# Command lines


@dataclass
class Answer:
    status: int
    out: bytes
    err: str

    def rows(self) -> list[dict[str, Any]]:
        found = json.loads(self.out or b"[]")
        assert isinstance(found, list)
        return found


def run(arguments: list[str], meddle: Callable[[], None] | None = None, meddle_at: int = 0) -> Answer:
    """Run a command line in this process, including the tasks of Spark, and call `meddle` at read number `meddle_at`.
    """
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    status = 0
    with mock.patch.object(sys, "stdout", out), mock.patch.object(sys, "stderr", err), _without_spark():
        with _meddling(meddle, meddle_at):
            try:
                cli.main(arguments)
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else 1
    return Answer(status, out.buffer.getvalue(), err.buffer.getvalue().decode())  # type: ignore[attr-defined]


@contextlib.contextmanager
def _without_spark() -> Iterator[None]:
    """Run without a JVM: damaged files of terabytes would start one, which needs more memory than a parser may use."""
    with (
        without_spark(),
        mock.patch("keytail.verify.driver.HERE_BYTES", 1 << 62),
        mock.patch("keytail.rebuild_index.driver.HERE_BYTES", 1 << 62),
    ):
        yield


@contextlib.contextmanager
def _meddling(meddle: Callable[[], None] | None, at: int) -> Iterator[None]:
    if meddle is None:
        yield
        return
    real, seen = FileSystem.read_into, [0]

    def read_into(self: FileSystem, fd: int, buffer: Any, position: int) -> int:
        seen[0] += 1
        if seen[0] == at + 1:
            meddle()
        return real(self, fd, buffer, position)

    with mock.patch.object(FileSystem, "read_into", read_into):
        yield


def tree(root: Path) -> Tree:
    """Return type, mode, size, time, contents and link target of everything in a tree, without the contents of huge
    files.
    """
    found: Tree = {}
    for directory, names, files in os.walk(os.fsencode(root)):
        for name in [*names, *files]:
            path = os.path.join(directory, name)
            facts = os.lstat(path)
            what: Any = None
            if stat.S_ISLNK(facts.st_mode):
                what = os.readlink(path)
            elif stat.S_ISREG(facts.st_mode) and facts.st_size < _GIANT_BYTES:
                with open(path, "rb") as file:
                    what = hashlib.md5(file.read(), usedforsecurity=False).digest()
            relative = os.path.relpath(path, os.fsencode(root)).decode(errors="surrogateescape")
            is_dir = stat.S_ISDIR(facts.st_mode)
            found[relative] = (facts.st_mode, 0 if is_dir else facts.st_size, 0 if is_dir else facts.st_mtime_ns, what)
    return found


def hidden_keys(partition: Path) -> set[bytes | None]:
    """Return the keys of transactional records, whose latest values are not checked because they may have been aborted.
    """
    found: set[bytes | None] = set()
    for file in partition.glob("*.log"):
        with contextlib.suppress(Exception):
            batches = decode_any_log(file.read_bytes()) if file.is_file() and file.stat().st_size < _GIANT_BYTES else []
            found |= {rec.key for batch in batches if batch.transactional for rec in batch.records}
    return found


def records_of(partition: Path) -> list[tuple[int, list[Rec] | None, int]]:
    """Return the base offset, the records and the byte size of each segment; None as records if the plain reader finds
    damage.
    """
    found: list[tuple[int, list[Rec] | None, int]] = []
    for file in sorted(partition.glob("*.log")):
        is_segment = len(file.stem) == 20 and file.stem.isdecimal() and file.is_file()
        if not is_segment or file.stat().st_size > _GIANT_BYTES:
            continue
        data = file.read_bytes()
        try:
            recs: list[Rec] | None = [rec for batch in decode_any_log(data) for rec in batch.records]
        except Exception:  # the plain reader has no exception type for damage
            recs = None
        found.append((int(file.stem), recs, len(data)))
    return found


COMMON = ["--output", "json"]


def check(seed: int, number: int, root: Path, of: Corpus) -> str:
    """Check one directory with some of the commands, and return its first kind of damage."""
    rng = random.Random(f"{seed}/directory/{number}")
    case = make(rng, root, of)
    try:
        with _as_nobody(case):
            _check(rng, case)
    except Exception as problem:
        problem.add_note(f"directory {number}: {', '.join(case.damages)}")
        raise
    return case.damages[0] if case.damages else "sound"


@contextlib.contextmanager
def _as_nobody(case: Case) -> Iterator[None]:
    """Run as another user who, unlike root, cannot read everything."""
    if not case.as_nobody or os.geteuid() != 0:
        yield
        return
    for directory, names, files in os.walk(case.root):
        for name in [*names, *files]:
            os.chown(os.path.join(directory, name), NOBODY, NOBODY, follow_symlinks=False)
    os.chown(case.root, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def _check(rng: random.Random, case: Case) -> None:
    logs = str(case.logs)
    offset = rng.choice((0, 5, 100, 2**40, 2**63 - 1))
    read_only = [
        ["verify", "--log-dirs", logs, *COMMON],
        ["plan", "--log-dirs", logs, "--topics-have-no-overrides", "--topic-config", "t:cleanup.policy=compact",
         *COMMON],
        ["rebuild-index", "--log-dirs", logs, *COMMON],
        ["describe", "--log-dirs", logs, "--records", *COMMON],
        ["lookup", "--log-dirs", logs, "--offset", str(offset), *COMMON],
        ["lookup", "--log-dirs", logs, "--timestamp", str(NOW - 9_000), *COMMON],
        ["verify", "--log-dirs", logs],
    ]  # fmt: skip
    before = _as_root(lambda: tree(case.root))
    for arguments in rng.sample(read_only, rng.choice((1, 1, 2, 4))):
        answer = _run(arguments, case)
        _judge(answer, arguments)
    if rng.random() < 0.3:
        _dump(rng, case)
    if case.meddle is None:
        after = _as_root(lambda: tree(case.root))
        expect(before == after, f"a command that only reads changed {_difference(before, after)}")
    writing = [
        ["compact", "--log-dirs", logs, "--topics-have-no-overrides", "--topic-config", "t:cleanup.policy=compact",
         "--topic-config", "sound:cleanup.policy=compact", "--high-watermark", "log-end", "--force",
         "--map-memory", "4m", "--fan-out", "never", "--execute",
         "--grouping", rng.choice(("kafka", "measured")), *COMMON],
        ["rebuild-index", "--log-dirs", logs, "--execute", "--truncate", *COMMON],
    ]  # fmt: skip
    for arguments in rng.sample(writing, rng.choice((1, 1, 1, 2))):
        _act(arguments, case)


def _as_root(action: Callable[[], Any]) -> Any:
    """Return the result of `action`, called as root if root started this process."""
    user = os.geteuid()
    if user == NOBODY:
        os.seteuid(0)
    try:
        return action()
    finally:
        if user == NOBODY:
            os.seteuid(user)


def _cpu_s() -> float:
    """Return the CPU seconds of this process and its children."""
    return sum(os.times()[:4])


def _run(arguments: list[str], case: Case) -> Answer:
    started = _cpu_s()
    answer = run(arguments, case.meddle, case.meddle_at)
    took = _cpu_s() - started  # CPU time, because the machine may be busy
    expect(took < 60, f"{arguments[0]} took {took:.0f} s of a processor")
    return answer


def _judge(answer: Answer, arguments: list[str]) -> None:
    command = arguments[0]
    expect("Traceback" not in answer.err and "internal error" not in answer.err, f"{command}: {answer.err[-3000:]}")
    expect(answer.status in (0, 1, 2, 3), f"{command}: exit status {answer.status}")
    if "json" not in arguments:
        return
    if answer.status == 2:
        expect(bool(answer.err), f"{command}: exit status 2 without a message")
        return
    for row in answer.rows():
        text = json.dumps(row)
        expect("internal error" not in text and "Traceback" not in text, f"{command}: {text[:3000]}")
        status = row.get("status")
        if status is not None:
            expect(status in STATUSES, f"{command}: status {status}")
            expect(status not in BAD or bool(row.get("error")), f"{command}: {status} without a reason: {text[:500]}")


def _dump(rng: random.Random, case: Case) -> None:
    files = [os.path.join(case.partition, name) for name in os.listdir(case.partition)] if _is_open_dir(case) else []
    if not files:
        return
    flags = rng.choice(
        ([], ["--print-data-log"], ["--deep-iteration"], ["--index-sanity-check"], ["--offsets-decoder"])
    )
    arguments = ["dump", *flags, *rng.choice(([], COMMON)), rng.choice([str(case.partition), *files])]
    answer = _run(arguments, case)
    expect("Traceback" not in answer.err, f"dump: {answer.err[-3000:]}")
    expect(answer.status in (0, 1, 2), f"dump: exit status {answer.status}")


def _is_open_dir(case: Case) -> bool:
    return case.partition.is_dir() and os.access(case.partition, os.R_OK | os.X_OK, effective_ids=True)


def _act(arguments: list[str], case: Case) -> None:
    """Run a command that changes files, and check what it changed, and that no record is lost."""
    before = _as_root(lambda: tree(case.root))
    hidden = {name: _as_root(lambda name=name: hidden_keys(case.logs / name)) for name in (SPOILED, BYSTANDER)}
    leftovers = {path.split(os.sep)[1] for path in before if any(word in path for word in _STAGES)}
    records = {name: _as_root(lambda name=name: records_of(case.logs / name)) for name in (SPOILED, BYSTANDER)}
    answer = _run(arguments, case)
    _judge(answer, arguments)
    after = _as_root(lambda: tree(case.root))
    rows = answer.rows() if answer.status != 2 else []
    status = {f"{row['topic']}-{row['partition']}": row["status"] for row in rows}
    ends = {f"{row['topic']}-{row['partition']}": row.get("end_dirty_offset") for row in rows}
    if case.meddle is None:
        _check_owned(before, after, status, arguments)
        for name in (SPOILED, BYSTANDER):
            found = _as_root(lambda name=name: records_of(case.logs / name))
            if name in leftovers:  # as in a broker, a completed replacement supersedes its sources
                continue
            if arguments[0] == "compact":
                _compacted(name, status.get(name), records[name], found, hidden[name], ends.get(name))
            else:
                _rebuilt(name, records[name], found)
    left = [name for name in after if name.endswith(".clean") and name not in before]
    expect(not left, f"scratch files are left: {left}")


def _check_owned(before: Tree, after: Tree, status: dict[str, str], arguments: list[str]) -> None:
    for path in {*before, *after}:
        if before.get(path) == after.get(path):
            continue
        parts = path.split(os.sep)
        expect(parts[0] == "logs", f"{arguments[0]} changed {path}, outside of the log dir")
        if len(parts) == 2:
            expect(parts[1] in OWNED, f"{arguments[0]} changed {path}, which it does not maintain")
            continue
        expect(len(parts) == 3 and parts[1] in (SPOILED, BYSTANDER), f"{arguments[0]} changed {path}")
        if arguments[0] == "compact":
            # Leftovers of an interrupted replacement are resolved before the decision about the partition.
            resolved = any(word in path for word in _STAGES)
            was_left = any(word in name for name in before for word in _STAGES)
            done = status.get(parts[1]) == "compacted"
            expect(done or resolved or was_left, f"compact changed {path}, but reports {status.get(parts[1])}")


Segments = list[tuple[int, list[Rec] | None, int]]


def _compacted(
    name: str,
    status: str | None,
    before: Segments,
    after: Segments,
    hidden: set[bytes | None],
    end: int | None,
) -> None:
    """Check promises 1 and 2 up to offset `end`, if the command reported success."""
    if status != "compacted" or end is None:
        return
    sound = [recs for _, recs, _ in before]
    # A segment above the cleaned range is not read, and may be damaged. Damage below it would have been refused.
    for base, recs, _ in before[:-1]:
        expect(recs is not None or base >= end, f"{name} was compacted, but its segment {base} is damaged")
    above = [segment for segment in before if segment[0] >= end]
    expect([segment for segment in after if segment[0] >= end] == above, f"{name}: changed above offset {end}")
    was = {rec.offset: rec for recs in sound for rec in recs or ()}
    offsets = [rec.offset for base, recs, _ in before if base < end for rec in recs or ()]
    expect(offsets == sorted(set(offsets)), f"{name} was compacted, but its offsets do not ascend")
    if any(recs is None for recs in sound):
        return
    expect(all(recs is not None for _, recs, _ in after), f"{name}: damaged by compaction")
    now = {rec.offset: rec for _, recs, _ in after for rec in recs or ()}
    for offset, rec in now.items():
        expect(was.get(offset) is not None and _same(was[offset], rec), f"{name}: the command added a record: {rec}")
    newest = {rec.key: rec for rec in was.values() if rec.key is not None}
    for rec in newest.values():
        may_be_removed = rec.value is None or rec.key in hidden
        expect(rec.offset in now or may_be_removed, f"{name}: lost {rec}")


def _same(item: Rec, other: Rec) -> bool:
    return (item.offset, item.timestamp, item.key, item.value) == (
        other.offset,
        other.timestamp,
        other.key,
        other.value,
    )


def _rebuilt(name: str, before: Segments, after: Segments) -> None:
    """Check that a log lost at most an incomplete tail; index files contain no data of their own."""
    kept = {base: size for base, _, size in after}
    for number, (base, recs, size) in enumerate(before):
        if kept.get(base) == size:
            continue
        after_damage = any(earlier is None for _, earlier, _ in before[:number])
        expect(after_damage or base in kept, f"{name}: segment {base} is missing")
        expect(after_damage or recs is None, f"{name}: segment {base} was valid, but was truncated")


def _difference(before: Tree, after: Tree) -> list[str]:
    return [path for path in {*before, *after} if before.get(path) != after.get(path)][:5]


def one_of(root: str, of: Corpus) -> Callable[[int, int], str]:
    """Return the check for the runner of tests/hostile/fuzz.py; each process works in its own directory."""

    def one(seed: int, number: int) -> str:
        work = Path(root) / f"work-{os.getpid()}"
        try:
            return check(seed, number, work, of)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    return one
