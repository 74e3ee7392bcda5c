"""Kafka's storage classes for tests, in one long-lived JVM, with one line of JSON per request and answer.

Resolves Kafka's jars with Maven once, compiles java/ after changes, restarts the JVM after a crash, and turns an
exception in Kafka into KafkaError. The tests interpret the answers.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

HERE = Path(__file__).parent
TARGET = HERE / "target"
VERSION = "4.3.1"
CLOCK_MS = 1_700_000_000_000
LOAD_FACTOR = 0.9
# Messages of the loader, including DEBUG, that something was deleted, renamed, recovered or truncated.
REPAIR_SIGNS = (
    " LogLoader: ",
    "Found invalid messages",
    "invalid bytes at the end",
    "Failed to load producer snapshot",
)


class KafkaUnavailable(Exception):
    """Java, Maven or the jars are missing; the text names what is missing."""


class KafkaError(Exception):
    """An exception in Kafka: its class and message, the Java trace, and what was logged before."""

    def __init__(self, error: Mapping[str, Any], messages: Sequence[str]) -> None:
        super().__init__(f"{error['class']}: {error['message']}")
        self.java_class: str = error["class"].rpartition(".")[2]
        self.java_message: str = error["message"]
        self.trace: list[str] = error["trace"]
        self.messages = list(messages)


class SegmentSizes(NamedTuple):
    """One segment as Kafka describes it while the log is open."""

    base_offset: int
    log_bytes: int
    index_bytes: int
    time_index_bytes: int
    largest_timestamp_ms: int


@dataclass(frozen=True)
class Opened:
    """The result of every command on a partition: the offsets and state that Kafka reports, and what it logged at INFO
    and above.
    """

    log_start_offset: int
    log_end_offset: int
    high_watermark: int
    last_stable_offset: int
    recovery_point: int
    segments: tuple[SegmentSizes, ...]
    messages: tuple[str, ...]

    @property
    def segment_bases(self) -> list[int]:
        return [segment.base_offset for segment in self.segments]

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.messages if line.startswith(("WARN", "ERROR"))]

    @property
    def repaired(self) -> list[str]:
        """Return the messages about repairs by the loader; there are none after a clean shutdown."""
        return [line for line in self.messages if any(sign in line for sign in REPAIR_SIGNS)]


@dataclass(frozen=True)
class Cleanable(Opened):
    """The selection by LogCleanerManager and LogToClean: what they report about a log."""

    first_dirty_offset: int
    first_uncleanable_dirty_offset: int
    first_uncleanable_offset: int
    clean_bytes: int
    cleanable_bytes: int
    total_bytes: int
    dirty_ratio: float
    must_compact_now: bool
    compaction_delay_ms: int
    rewrite_checkpoint: bool


@dataclass(frozen=True)
class Cleaned(Cleanable):
    """One round of Cleaner.doClean, with its CleanerStats. `cleaned` is False if nothing was cleanable."""

    cleaned: bool
    end_offset: int = -1
    map_max_entries: int = -1
    map_entries: int = -1
    bytes_read: int = -1
    bytes_written: int = -1
    records_read: int = -1
    records_written: int = -1
    records_without_key: int = -1
    records_mapped: int = -1


@dataclass(frozen=True)
class Retained(Opened):
    """A log after UnifiedLog.deleteOldSegments: the number of removed segments, the leader epochs (epoch, start), and
    the files.
    """

    deleted: int
    epochs: tuple[tuple[int, int], ...]
    files: tuple[str, ...]


OpenedT = TypeVar("OpenedT", bound=Opened)


class Record(NamedTuple):
    """A record as a consumer receives it; control records are marked."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    control: bool = False


@dataclass(frozen=True)
class Loaded(Opened):
    """A partition after Kafka's loader has opened it. `batches`, if requested, are header fields by name;
    `fetch_mismatches` are (requested offset, expected, received); `timestamps` maps each requested time to (time,
    offset).
    """

    records: tuple[Record, ...]
    batches: tuple[dict[str, Any], ...]
    files_open: tuple[str, ...]
    files: tuple[str, ...]
    fetch_mismatches: tuple[tuple[int, int | None, int | None], ...] = ()
    timestamps: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    # If requested: for each producer, its id, epoch, last sequence, first and last data offset, timestamp, coordinator
    # epoch, and the first offset of its open transaction (-1: none); for each aborted transaction, the producer id, and
    # the first, last and last stable offset; the offsets that a read_committed consumer receives.
    producers: tuple[tuple[int, ...], ...] = ()
    aborted: tuple[tuple[int, ...], ...] = ()
    committed: tuple[int, ...] = ()


class Indexes(NamedTuple):
    """The result of LogSegment.recover for a `.log` file; `txn_index` is None if it writes none."""

    offset_index: bytes
    time_index: bytes
    txn_index: bytes | None
    truncated_bytes: int


class Dumped(NamedTuple):
    """The result of DumpLogSegments: exit status, standard output and error, and the seconds without the start of the
    JVM.
    """

    status: int
    out: str
    err: str
    seconds: float


def slots_for(map_max_entries: int) -> int:
    """Return the smallest number of slots, at least 2, with which a SkimpyOffsetMap has room for exactly this many
    keys.
    """
    slots = max(2, int(map_max_entries / LOAD_FACTOR))
    while int(slots * LOAD_FACTOR) < map_max_entries:
        slots += 1
    return slots


def step_batch(
    records: Iterable[Record | tuple[Any, ...]],
    *,
    codec: str = "none",
    producer: tuple[int, int, int] | None = None,
    leader_epoch: int = 0,
    follower: bool = False,
    base_offset: int | None = None,
    last_offset: int | None = None,
    log_append_time: int | None = None,
    delete_horizon_ms: int | None = None,
    transactional: bool = False,
) -> dict[str, Any]:
    """Return a step that appends one batch. Records are (timestamp, key, value[, headers]), or Record to set offsets.

    `producer` is (id, epoch, base sequence). As a leader, the default, Kafka assigns offsets, and applies the topic's
    timestamp type and compression. As a `follower`, it appends the batch unchanged; offsets with gaps,
    `log_append_time` and `delete_horizon_ms` require this.
    """
    batch: dict[str, Any] = {"codec": codec, "records": [_wire_record(record) for record in records]}
    if producer is not None:
        batch |= dict(zip(("producer_id", "producer_epoch", "base_sequence"), producer, strict=True))
    optional = {
        "base_offset": base_offset,
        "last_offset": last_offset,
        "log_append_time": log_append_time,
        "delete_horizon_ms": delete_horizon_ms,
    }
    batch |= {name: value for name, value in optional.items() if value is not None}
    return {"batch": batch | {"leader_epoch": leader_epoch, "follower": follower, "transactional": transactional}}


def step_marker(
    kind: str,
    producer_id: int,
    producer_epoch: int,
    timestamp_ms: int,
    coordinator_epoch: int = 0,
    transaction_version: int = 0,
    leader_epoch: int = 0,
) -> dict[str, Any]:
    """Return a step that appends a marker, "COMMIT" or "ABORT". With version 2, its epoch must exceed the data's."""
    return {
        "marker": {
            "type": kind,
            "producer_id": producer_id,
            "producer_epoch": producer_epoch,
            "t": timestamp_ms,
            "coordinator_epoch": coordinator_epoch,
            "transaction_version": transaction_version,
            "leader_epoch": leader_epoch,
        }
    }


def step_raw(batches: bytes, leader_epoch: int = 0) -> dict[str, Any]:
    """Return a step that appends these bytes as a follower: batches of any magic, with any attributes, and unchanged
    offsets.
    """
    return {"raw": _text(batches), "leader_epoch": leader_epoch}


def step_roll(base_offset: int | None = None) -> dict[str, Any]:
    """Return a step that begins a new segment at the log end offset, or at `base_offset`, which is higher."""
    return {"roll": True if base_offset is None else base_offset}


def step_clock(clock_ms: int) -> dict[str, Any]:
    return {"clock_ms": clock_ms}


def step_delete_records(log_start_offset: int) -> dict[str, Any]:
    """Return a step that raises the log start offset like a DeleteRecords request; no segment is deleted."""
    return {"log_start_offset": log_start_offset}


class Kafka:
    """The harness: a JVM with Kafka's classes. Commands take the directory of a partition, and the options of
    `_options`."""

    def __init__(self, *, heap: str = "512m", compiler: str = "quick") -> None:
        """Create a harness. `compiler="full"` is for benchmarks: the JVM's best compiler instead of the one that starts
        fastest.
        """
        java = _java()
        flags = ["-XX:+UseSerialGC", f"-Xmx{heap}", "-Xshare:auto"]
        if compiler == "quick":
            flags.append("-XX:TieredStopAtLevel=1")
        self._command = [java, *flags, "-cp", class_path(), "keytail.harness.Main"]
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()

    def append(
        self, partition: Path, steps: Sequence[Mapping[str, Any]], *, settle: bool = True, **options: Any
    ) -> Opened:
        """Apply the steps with UnifiedLog and close the log cleanly. `settle` opens and closes it once more."""
        return _opened(Opened, self._ask("append", partition, options, steps=list(steps), settle=settle))

    def cleanable(self, partition: Path, *, checkpoint: int | None = None, **options: Any) -> Cleanable:
        """Return what the cleaner would select in a log with this cleaner checkpoint, which is None if there is no
        entry.
        """
        return _opened(Cleanable, self._ask("cleanable", partition, options, checkpoint=checkpoint))

    def clean(
        self,
        partition: Path,
        *,
        checkpoint: int | None = None,
        first_dirty_offset: int | None = None,
        first_uncleanable_offset: int | None = None,
        map_max_entries: int | None = None,
        io_buffer_bytes: int | None = None,
        only_if_cleanable: bool = False,
        **options: Any,
    ) -> Cleaned:
        """Run one round of Kafka's cleaner at `clock_ms`, then shut down cleanly and remove `.deleted` files."""
        return _opened(
            Cleaned,
            self._ask(
                "clean",
                partition,
                options,
                checkpoint=checkpoint,
                first_dirty_offset=first_dirty_offset,
                first_uncleanable_offset=first_uncleanable_offset,
                map_slots=None if map_max_entries is None else slots_for(map_max_entries),
                io_buffer_bytes=io_buffer_bytes,
                only_if_cleanable=only_if_cleanable,
            ),
        )

    def expire(self, partition: Path, **options: Any) -> Retained:
        """Apply retention at `clock_ms` as a broker does, then shut down cleanly and remove `.deleted` files."""
        return _opened(Retained, self._ask("expire", partition, options))

    def load(
        self,
        partition: Path,
        *,
        records: bool = True,
        batches: bool = False,
        fetch: bool = False,
        transactions: bool = False,
        timestamps: Sequence[int] = (),
        **options: Any,
    ) -> Loaded:
        """Open a directory in any state, and read all of it; with `clean=False`, as after an unclean shutdown.

        `fetch` also reads through the indexes, from the offset of every record and from the offset after it;
        `timestamps` are looked up as by ListOffsets. Afterwards the log is closed cleanly.
        """
        return _opened(
            Loaded,
            self._ask(
                "load",
                partition,
                options,
                records=records,
                batches=batches,
                fetch=fetch,
                transactions=transactions,
                timestamps=list(timestamps),
            ),
        )

    def recover(self, partition: Path, base_offset: int, *, configs: Mapping[str, Any] | None = None) -> Indexes:
        """Return the indexes that LogSegment.recover builds from one `.log` file; the directory is unchanged."""
        with tempfile.TemporaryDirectory() as work_dir:
            answer = self._ask(
                "recover", partition, {"configs": configs or {}}, base_offset=base_offset, work_dir=work_dir
            )
        index, timeindex = (base64.b64decode(answer[name]) for name in ("index", "timeindex"))
        return Indexes(index, timeindex, _bytes(answer["txnindex"]), answer["truncated_bytes"])

    def lock(self, log_dir: Path) -> bool:
        """Take the broker's lock of a log dir and hold it; return False if another process holds it."""
        return bool(self.request({"command": "lock", "dir": str(log_dir)})["held"])

    def unlock(self, log_dir: Path) -> None:
        """Release the lock and remove its file, as a broker does at shutdown."""
        self.request({"command": "unlock", "dir": str(log_dir)})

    def read_checkpoint(self, path: Path) -> dict[str, int]:
        """Return the entries of a text checkpoint of a log dir, by "topic-partition"."""
        return dict(self.request({"command": "read_checkpoint", "path": str(path)})["entries"])

    def write_checkpoint(self, path: Path, entries: Mapping[str, int]) -> None:
        self.request({"command": "write_checkpoint", "path": str(path), "entries": dict(entries)})

    def dump(self, *arguments: str | Path, out: Path | None = None) -> Dumped:
        """Run DumpLogSegments with these arguments; standard output is written to the file `out`, if given."""
        request: dict[str, Any] = {"command": "dump", "arguments": [str(word) for word in arguments]}
        if out is not None:
            request["out"] = str(out)
        answer = self.request(request)
        return Dumped(answer["status"], answer["out"], answer["err"], answer["seconds"])

    def bench_generate(
        self,
        partition: Path,
        *,
        records: int = 5_000_000,
        batch_records: int = 100,
        keys: int = 500_000,
        value_bytes: int = 91,
        codec: str = "none",
        seed: int = 1,
        clean_records: int = 0,
        **options: Any,
    ) -> Opened:
        """Write one large log with uniformly distributed keys of 16 bytes. All segments with records are closed; the
        active one is empty.

        The first `clean_records` records have distinct keys, in order, as in a log that has been cleaned.
        """
        shape = {
            "records": records,
            "batch_records": batch_records,
            "keys": keys,
            "value_bytes": value_bytes,
            "codec": codec,
            "seed": seed,
            "clean_records": clean_records,
        }
        return _opened(Opened, self._ask("bench_generate", partition, options, **shape))

    def bench_clean(
        self,
        partitions: Sequence[Path],
        *,
        map_max_entries: int = 5_033_164,
        first_dirty_offset: int | None = None,
        **options: Any,
    ) -> tuple[list[float], list[float], Cleaned]:
        """Run one measured round on each directory in turn. Return the seconds of each doClean, elapsed and CPU, and
        the numbers of the last round.
        """
        answer = self._ask(
            "bench_clean",
            partitions[0],
            options,
            dirs=[str(path) for path in partitions],
            map_slots=slots_for(map_max_entries),
            first_dirty_offset=first_dirty_offset,
        )
        return list(answer["seconds"]), list(answer["cpu_seconds"]), _opened(Cleaned, answer)

    def bench_recover(self, partition: Path, base_offsets: Sequence[int], **options: Any) -> float:
        """Return the seconds of LogSegment.recover of these segments, which rewrites their indexes in place."""
        answer = self._ask("bench_recover", partition, options, base_offsets=list(base_offsets))
        return float(answer["seconds"])

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            process.wait()

    @staticmethod
    def _options(
        *,
        configs: Mapping[str, Any] | None = None,
        clock_ms: int = CLOCK_MS,
        log_start_offset: int = 0,
        recovery_point: int = 0,
        clean: bool = True,
        high_watermark: int | None = None,
        producer_id_expiration_ms: int = 86_400_000,
        topic_id: str | None = None,
        keep_deleted: bool = False,
    ) -> dict[str, Any]:
        """Return the options with which a log is opened. If `high_watermark` is None, it is the log end offset. `clean`
        means that the last shutdown was clean.
        """
        names = {name: str(value) for name, value in (configs or {}).items()}
        return {
            "configs": names,
            "clock_ms": clock_ms,
            "log_start_offset": log_start_offset,
            "recovery_point": recovery_point,
            "clean": clean,
            "high_watermark": high_watermark,
            "producer_id_expiration_ms": producer_id_expiration_ms,
            "topic_id": topic_id,
            "keep_deleted": keep_deleted,
        }

    def _ask(self, command: str, partition: Path, options: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
        request = {"command": command, "dir": str(partition)} | self._options(**options) | extra
        return self.request(request)

    def request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send one command through the pipe, and return its answer."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        if not line:
            status = process.wait()
            self._process = None  # so that the next request starts a new JVM
            raise RuntimeError(f"the JVM died with status {status} in {request['command']}: {self._end_of_stderr()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KafkaError(answer["error"], answer["messages"])
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr
            )
        return self._process

    def _end_of_stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-2000:].decode(errors="replace")


def class_path(*, with_logging: bool = False) -> str:
    """Return the class path of the harness: Kafka's jars and the compiled classes, resolved and compiled if needed.

    The harness has a logging binding that returns Kafka's messages. With `with_logging`, return the class path of a
    broker process instead: without the harness, and with a binding that writes to standard error.
    """
    if with_logging:
        return broker_class_path(VERSION)
    with compiling():
        jars = [jar for jar in sorted(kafka_jars().glob("*.jar")) if not jar.name.startswith("slf4j-simple")]
        classes = compiled(sorted((HERE / "java").rglob("*.java")), os.pathsep.join(map(str, jars)))
    return os.pathsep.join(str(path) for path in [classes, *jars])


def broker_class_path(version: str) -> str:
    """Return the jars of a version of Kafka, resolved if needed, with a logging binding that writes to standard error.
    """
    with compiling():
        return os.pathsep.join(str(jar) for jar in sorted(kafka_jars(version).glob("*.jar")))


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Hold the lock with which only one process compiles at a time."""
    TARGET.mkdir(exist_ok=True)
    with (TARGET / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise KafkaUnavailable("no java: neither JAVA_HOME nor PATH has one")
    return java


def jar_folder(version: str) -> Path:
    """Return the folder for the jars of a version. It may not exist yet."""
    return TARGET / version / "jars"


def kafka_jars(version: str = VERSION) -> Path:
    """Return target/<version>/jars, which Maven fills once for each version of pom.xml."""
    profiles = [] if int(version.partition(".")[0]) >= 4 else ["-Plog4j-1"]
    return fetched_jars(HERE / "pom.xml", jar_folder(version), version, profiles)


def fetched_jars(pom: Path, jars: Path, version: str, profiles: Sequence[str] = ()) -> Path:
    """Return `jars`, which Maven fills with the dependencies of `pom` once for each version of that file."""
    stamp = jars.with_suffix(".stamp")
    digest = hashlib.sha256(pom.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest and jars.is_dir():
        return jars
    maven = shutil.which("mvn")
    if maven is None:
        raise KafkaUnavailable(f"no mvn on PATH, and tests/interop/{jars.relative_to(HERE)} is not filled")
    jars.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=jars.parent) as work:
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={work}/jars", "-DincludeScope=runtime"]
        command = [maven, "-q", "-B", "-f", str(pom), f"-Dkafka.version={version}", *profiles, *goal]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise KafkaUnavailable(f"mvn could not fetch Kafka {version}: {(done.stdout + done.stderr).strip()[-500:]}")
        shutil.rmtree(jars, ignore_errors=True)
        Path(work, "jars").rename(jars)
    stamp.write_text(digest)
    return jars


def compiled(sources: Sequence[Path], path: str) -> Path:
    """Return target/classes/<digest of sources and class path>, which javac compiles once. The folder of a running JVM
    is not changed.
    """
    digest = hashlib.sha256(b"".join([path.encode(), *(source.read_bytes() for source in sources)])).hexdigest()
    classes = TARGET / "classes" / digest[:16]
    if classes.is_dir():
        return classes
    javac = str(Path(_java()).with_name("javac"))
    if not Path(javac).exists():
        javac = shutil.which("javac") or ""
    if not javac:
        raise KafkaUnavailable("no javac: a JDK is required, a JRE is not enough")
    classes.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET) as work:
        command = [javac, "-nowarn", "-encoding", "UTF-8", "-d", f"{work}/classes", "-cp", path]
        done = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the Java code of the tests does not compile:\n{done.stdout}{done.stderr}")
        Path(work, "classes").rename(classes)
    return classes


def _wire_record(record: Record | tuple[Any, ...]) -> dict[str, Any]:
    wire: dict[str, Any] = {}
    if isinstance(record, Record):
        wire["o"] = record.offset
        timestamp_ms, key, value, headers = record.timestamp_ms, record.key, record.value, record.headers
    else:
        timestamp_ms, key, value, headers = (*record, ())[:4]
    wire |= {"t": timestamp_ms, "k": _text(key), "v": _text(value)}
    if headers:
        wire["h"] = [[_text(name.encode()), _text(content)] for name, content in headers]
    return wire


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def _record(row: Sequence[Any]) -> Record:
    offset, timestamp_ms, key, value, headers, control = row
    pairs = tuple((name, _bytes(content)) for name, content in headers)
    return Record(offset, timestamp_ms, _bytes(key), _bytes(value), pairs, control)


def _opened(kind: type[OpenedT], answer: dict[str, Any]) -> OpenedT:
    known = {item.name for item in fields(kind)}
    values = {name: value for name, value in answer.items() if name in known}
    values["segments"] = tuple(SegmentSizes(**row) for row in values["segments"])
    for name in known & {"messages", "files", "files_open", "batches"}:
        values[name] = tuple(values[name])
    if "epochs" in values:
        values["epochs"] = tuple(map(tuple, values["epochs"]))
    if "committed" in values:
        values["committed"] = tuple(values["committed"])
        for name in ("producers", "aborted"):
            values[name] = tuple(map(tuple, values[name]))
    if "dirty_ratio" in values:
        values["dirty_ratio"] = float(values["dirty_ratio"])
    if "records" in values:
        values["records"] = tuple(map(_record, values["records"]))
        values["fetch_mismatches"] = tuple(map(tuple, values.get("fetch_mismatches", ())))
        values["timestamps"] = {row[0]: tuple(row[1:]) or None for row in values["timestamps"]}
    return kind(**values)
