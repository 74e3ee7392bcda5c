"""Writes, lists and reads the partitions of a target in an object store, through pyarrow's filesystems.

An object is written completely or not at all, but several objects are not written together: the output record of a
partition, written first as unfinished and last as finished, shows whether its objects are consistent
(compact/out_of_place/OUT_OF_PLACE.md). Credentials come from the environment or the URI; only a URI's scheme, host and
path are ever printed or stored.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from keytail.acting_user import as_caller
from keytail.compact.out_of_place.output_record import OutputRecord, PlacedFile, encode_record
from keytail.compact.out_of_place.output_tree import TargetEntry, classify, is_foreign_root_file
from keytail.compact.out_of_place.partition import outputs_of, to_copy
from keytail.compact.task import CleaningTask, NeedsFanOut
from keytail.errors import KeytailError, Refused, UsageProblem
from keytail.format import names
from keytail.kernels.native import file_digest
from keytail.log.fs import FileSystem
from keytail.log.replacement.replace import GroupOutput
from keytail.threads import Threads

T = TypeVar("T")

_BUFFER_BYTES = 8 << 20
_ATTEMPTS = 4
_LONGEST_WAIT_S = 20.0
_WITH_BUCKETS = ("s3", "gcs")
_READERS = 16  # maximum number of output records, one per partition, that are read concurrently


class StoreProblem(KeytailError):
    """The object store did not respond, or returned an error."""

    default_slug = "object-store-error"


@dataclass(frozen=True)
class Store:
    """A folder in an object store, given as a URI for `pyarrow.fs.FileSystem.from_uri`. A Store is small and picklable.
    The URI of a store may contain a secret; the printed form of a store does not.
    """

    uri: str
    folder: str = ""  # path below the URI, of a partition or, for display, of an object

    def __str__(self) -> str:
        return "/".join(filter(None, (shown(self.uri).rstrip("/"), self.folder)))

    __repr__ = __str__

    def below(self, name: str) -> Store:
        return replace(self, folder="/".join(filter(None, (self.folder, name))))

    def connect(self) -> tuple[Any, str]:
        """Return pyarrow's filesystem and the path of the folder in that filesystem. Raises UsageProblem if the URI
        cannot be opened."""
        try:
            with as_caller():  # credentials may be in files in the caller's home directory
                fs, path = _connected(self.uri)
        except Exception as problem:
            raise UsageProblem(
                f"the target cannot be reached: {self.without_secrets(str(problem))}",
                path=str(self),
                remedy="Give a path, or a URI that pyarrow supports, such as s3://bucket/prefix; set credentials in "
                "the environment",
                slug="target-unreachable",
            ) from None
        return fs, "/".join(filter(None, (path.rstrip("/"), self.folder)))

    def without_secrets(self, text: str) -> str:
        parts = urlsplit(self.uri)
        secrets = [part for part in (parts.username, parts.password, parts.query) if part]
        for secret in sorted([self.uri, *secrets], key=len, reverse=True):
            text = text.replace(secret, "...")
        return text

    def send(
        self, fs: FileSystem, task: CleaningTask, groups: Sequence[GroupOutput], started: OutputRecord
    ) -> tuple[PlacedFile, ...]:
        """Write the files of a partition as objects, in a task: cleaned files from its scratch directory, others from
        the source. Return the files that were written.

        The unfinished record `started` is written first. The size of each file's object is checked in the store.
        """
        assert task.out_of_place is not None
        store = self.below(started.name)
        outputs = outputs_of(groups)
        store.put(names.OUTPUT_RECORD, encode_record(started))
        placed = [
            store.put_file(fs, os.path.join(task.scratch_path, file.scratch_name), file.name, file) for file in outputs
        ]
        for seen in to_copy(task.out_of_place.source_files, groups):
            source = os.path.join(task.partition_path, seen.name)
            placed.append(store.put_file(fs, source, seen.name, PlacedFile(seen.name, "", seen.size_bytes, "")))
        return tuple(placed)

    def put_file(self, fs: FileSystem, source: str, name: str, wanted: PlacedFile) -> PlacedFile:
        """Stream a local file into an object; check the size, and the digest if `wanted` has one; return the object."""

        def once(remote: Any, path: str) -> PlacedFile:
            digest, position, buffer = file_digest(), 0, bytearray(_BUFFER_BYTES)
            fd = fs.open_read(source)
            try:
                with _store_errors(self, f"writing {name}"):
                    out = remote.open_output_stream(path)
                try:
                    while count := fs.read_into(fd, buffer, position):
                        part = memoryview(buffer)[:count]
                        digest.update(part)
                        position += count
                        with _store_errors(self, f"writing {name}"):
                            out.write(part)
                finally:
                    with _store_errors(self, f"writing {name}"):
                        out.close()
            finally:
                fs.close(fd)
            return PlacedFile(name, "", position, digest.hexdigest())

        sent = self._tried(name, once)
        if sent.size_bytes != wanted.size_bytes or wanted.digest_hex not in ("", sent.digest_hex):
            difference = "its contents differ from those that were proven"
            if sent.size_bytes != wanted.size_bytes:
                difference = f"it has {sent.size_bytes} bytes, and {wanted.size_bytes} bytes were to be sent"
            raise Refused(
                f"the file has changed: {difference}",
                path=source,
                remedy="Stop the process that writes to the directory, and run again",
                slug="file-changed",
            )
        self._check_size(name, sent.size_bytes)
        return sent

    def _check_size(self, name: str, size_bytes: int) -> None:
        there = self._tried(name, _size)
        if there != size_bytes:
            raise StoreProblem(
                f"the object has {there} bytes in the store, but {size_bytes} were sent",
                path=str(self.below(name)),
                remedy="Run again: the partition is incomplete, and is sent again",
            )

    def put(self, name: str, data: bytes) -> None:
        """Write a small object."""

        def once(remote: Any, path: str) -> None:
            with remote.open_output_stream(path) as out:
                out.write(data)

        self._tried(name, once)

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small object, or None if it does not exist."""

        def once(remote: Any, path: str) -> bytes | None:
            try:
                with remote.open_input_stream(path) as stream:
                    data: bytes = stream.read()
                    return data
            except FileNotFoundError:
                return None

        return self._tried(name, once)

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""

        def once(remote: Any, path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                remote.delete_file(path)

        self._tried(name, once)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all objects below the folder, by relative name. Raises UsageProblem if there is no
        such bucket."""
        import pyarrow.fs  # noqa: PLC0415 (not needed if the target is a mounted path)

        def once(remote: Any, path: str) -> dict[str, int]:
            found = remote.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True, recursive=True))
            if not found and remote.type_name in _WITH_BUCKETS:
                bucket = path.partition("/")[0]
                if remote.get_file_info(bucket).type == pyarrow.fs.FileType.NotFound:
                    raise UsageProblem(
                        f"the bucket {bucket} does not exist",
                        path=str(self),
                        remedy="Create the bucket, then run again",
                        slug="no-such-bucket",
                    )
            files = [info for info in found if info.type == pyarrow.fs.FileType.File]
            return {info.path[len(path) :].lstrip("/"): info.size for info in files}

        return self._tried("", once)

    def _tried(self, name: str, once: Callable[[Any, str], T]) -> T:
        """Return `once(filesystem, path)`; if the store fails, call the function again after a delay, _ATTEMPTS times
        at most."""
        retrying = Retrying(
            retry=retry_if_exception_type(StoreProblem),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential_jitter(initial=0.2, max=_LONGEST_WAIT_S),
            reraise=True,
        )

        def attempt() -> T:
            remote, path = self.connect()
            with _store_errors(self, name or "listing"):
                return once(remote, "/".join(filter(None, (path, name))))

        answer: T = retrying(attempt)
        return answer


@lru_cache(maxsize=4)
def _connected(uri: str) -> tuple[Any, str]:
    """Return pyarrow's filesystem and the path of a URI; connect once per process, because connecting looks for
    credentials."""
    import pyarrow.fs  # noqa: PLC0415 (not needed if the target is a mounted path)

    remote, path = pyarrow.fs.FileSystem.from_uri(uri)
    return remote, path


@contextlib.contextmanager
def _store_errors(store: Store, what: str) -> Iterator[None]:
    """Convert errors of the store, which pyarrow raises as OSError without a file name, to KeytailError. Errors of
    local files are re-raised.
    """
    try:
        yield
    except FileNotFoundError as missing:
        if missing.filename is not None:
            raise
        raise Refused(  # this error is not retried
            f"no such bucket, folder or object: {store.without_secrets(str(missing))}",
            path=str(store),
            remedy="Create the bucket, or correct the name, and run again",
            slug="no-such-object",
        ) from None
    except OSError as problem:
        if problem.filename is not None:
            raise
        raise StoreProblem(
            f"the object store reported an error ({what}): {store.without_secrets(str(problem))[:500]}",
            path=str(store),
            remedy="Correct the cause, and run again: finished partitions are kept",
        ) from None


def _size(remote: Any, path: str) -> int | None:
    size: int | None = remote.get_file_info(path).size
    return size


def shown(uri: str) -> str:
    """Return a URI without user, password and options."""
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def is_store(target: str) -> bool:
    """Return whether a target is a URI of an object store; a `file://` URI is a path."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", target) is not None and not target.startswith("file://")


class StoreTree:
    """One log dir of the target in an object store, with the methods that `MountedTree` has for a mounted path."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __str__(self) -> str:
        return str(self.store)

    def partition_path(self, name: str) -> str:
        return str(self.store.below(name))

    def entries(self) -> dict[str, TargetEntry]:
        listings: dict[str, dict[str, tuple[int, int | None]]] = {}
        for name, size_bytes in self.store.sizes().items():
            directory, slash, file = name.partition("/")
            if slash:
                listings.setdefault(directory, {})[file] = (size_bytes, None)
        with_record = [name for name, listing in listings.items() if names.OUTPUT_RECORD in listing]
        with Threads(_READERS) as readers:
            read = readers.map(lambda name: self.store.below(name).read(names.OUTPUT_RECORD), with_record)
            records = dict(zip(with_record, read, strict=True))
        return {
            name: classify(name, listing, records.get(name), self.partition_path(name))
            for name, listing in listings.items()
        }

    def other_files(self) -> list[str]:
        return sorted(name for name in self.store.sizes() if "/" not in name and is_foreign_root_file(name))

    def make(self) -> None:
        """Do nothing: an object store has no folders."""

    def make_partition(self, name: str, source: str) -> None:
        """Do nothing: an object store has no folders for partitions, either."""

    def commit(self, record: OutputRecord, placed: Sequence[PlacedFile]) -> OutputRecord:
        """Finish a partition whose objects a worker has sent: remove other objects, and mark the record as finished.
        Return the record. Raises StoreProblem if an object is missing or has another size.
        """
        store = self.store.below(record.name)
        sizes = store.sizes()
        wanted = {file.name: file.size_bytes for file in placed}
        for name, size_bytes in wanted.items():
            if sizes.get(name) != size_bytes:
                raise StoreProblem(
                    f"the object has {sizes.get(name, 'no')} bytes in the store, but {size_bytes} were sent",
                    path=str(store.below(name)),
                    remedy="Run again: the partition is incomplete, and is sent again",
                )
        for name in sorted(sizes.keys() - {*wanted, names.OUTPUT_RECORD}):
            store.delete(name)
        done = replace(record, is_finished=True, files=tuple(placed))
        store.put(names.OUTPUT_RECORD, encode_record(done))
        return done

    def read(self, name: str) -> bytes | None:
        return self.store.read(name)

    def put(self, name: str, data: bytes) -> None:
        self.store.put(name, data)

    def remove(self, root_files: Iterable[str]) -> None:
        for name in root_files:
            self.store.delete(name)


@contextlib.contextmanager
def local_scratch(path: str) -> Iterator[None]:
    """Create directory `path` for cleaned files to be sent; remove it at the end unless a fan-out continues there."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    try:
        yield
    except NeedsFanOut:
        raise
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)
