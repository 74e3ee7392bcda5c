"""The target of a compaction out of place: what `--output-dir` may name, and what is already there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from keytail.acting_user import as_caller
from keytail.cli.outside import refuse_unsuitable, refuse_unwritable
from keytail.compact.command import Request
from keytail.compact.out_of_place.object_store import Store, StoreTree, is_store
from keytail.compact.out_of_place.output_tree import MountedTree, TargetEntry
from keytail.compact.out_of_place.placing import Tree
from keytail.errors import KeytailError, Refused, UsageProblem
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.run.processes import Processes
from keytail.run.spark.stores import refuse_slash_in_password
from keytail.run.tasks import run_attempt


@dataclass(frozen=True)
class Target:
    """The targets of `log_dirs`, in the same order: absolute paths (`places`) or folders of an object store
    (`stores`)."""

    fs: FileSystem
    log_dirs: tuple[str, ...]
    places: tuple[str, ...]
    stores: tuple[Store, ...] = ()
    scratch_dir: str | None = None

    @property
    def is_store(self) -> bool:
        return bool(self.stores)

    @property
    def by_log_dir(self) -> dict[str, Store]:
        return dict(zip(self.log_dirs, self.stores, strict=True)) if self.stores else {}

    def tree(self, log_dir: str) -> Tree:
        store = self.by_log_dir.get(log_dir)
        if store is None:
            return MountedTree(self.fs, self.places[self.log_dirs.index(log_dir)], log_dir)
        return StoreTree(store)

    def partition_path(self, log_dir: str, name: str) -> str:
        return self.tree(log_dir).partition_path(name)

    def make(self) -> None:
        for log_dir in self.log_dirs:
            self.tree(log_dir).make()

    def entries(self) -> dict[str, dict[str, TargetEntry]]:
        """Return the target's directories by log dir of the source and by name. Raises Refused if the target has files
        that keytail did not write.

        A child process lists an object store: the client starts threads, and this process may still have to fork.
        """
        if not self.is_store:
            return self._entries()
        with Processes(1, lambda target, attempt: run_attempt(Target._entries, target, attempt)) as item:
            [outcome] = item.run([self])
        if outcome is None or outcome.value is None:
            raise (outcome and outcome.problem) or KeytailError(
                "the process that listed the target was killed twice",
                remedy="See the kernel's log: the usual cause is a lack of memory",
                slug="listing-process-killed",
            )
        known: dict[str, dict[str, TargetEntry]] = outcome.value
        return known

    def _entries(self, attempt: str = "") -> dict[str, dict[str, TargetEntry]]:
        known = {log_dir: self.tree(log_dir).entries() for log_dir in self.log_dirs}
        for log_dir, found in known.items():
            self._refuse_foreign(log_dir, found)
        return known

    def _refuse_foreign(self, log_dir: str, found: dict[str, TargetEntry]) -> None:
        tree = self.tree(log_dir)
        foreign = sorted(name for name, item in found.items() if item.is_foreign) or tree.other_files()
        if not found and not foreign and tree.read(names.META_PROPERTIES) is not None:
            source = os.path.join(log_dir, names.META_PROPERTIES)
            if tree.read(names.META_PROPERTIES) != self.fs.read_bytes(source):
                foreign = [names.META_PROPERTIES]
        if foreign:
            raise Refused(
                f"the target has files that keytail did not write: {', '.join(foreign[:5])}"
                f"{' ...' if len(foreign) > 5 else ''}",
                path=str(tree),
                remedy="Give an empty directory, or one that --output-dir has written and no broker has started on",
                slug="unknown-files-in-target",
            )

    def scratch(self, at_end: contextlib.ExitStack) -> str | None:
        """Return a directory, removed at the end, for files to be sent to a store; None if the target is mounted."""
        if not self.is_store:
            return None
        directory = tempfile.TemporaryDirectory(prefix="keytail-output-", dir=self.scratch_dir)
        return at_end.enter_context(directory)


def target_of(fs: FileSystem, request: Request) -> Target:
    """Return the target that the flags name. Raises UsageProblem for conflicting flags, and for a place that cannot
    contain a log dir."""
    given, log_dirs = request.output_dirs, request.partition_filter.log_dirs
    if not given:
        raise UsageProblem(
            "--scratch-dir needs an --output-dir in an object store", slug="scratch-dir-without-object-store"
        )
    for flag, is_given in (
        ("--keep-originals", request.keep_originals is not None or request.copy_originals),
        ("--max-scratch-bytes", request.max_scratch_bytes is not None),
        ("--ledger", request.ledger.path is not None),
    ):
        if is_given:
            raise UsageProblem(
                f"{flag} is for files that are replaced, and --output-dir replaces none",
                remedy="Omit one of these flags",
                slug="conflicting-flags",
            )
    if len(given) != len(log_dirs):
        raise UsageProblem(
            f"--output-dir names {len(given)} director{'y' if len(given) == 1 else 'ies'}, but there are "
            f"{len(log_dirs)} log dirs",
            remedy=f"Give one directory per log dir, in this order: {', '.join(log_dirs)}",
            slug="output-dir-count-differs",
        )
    kinds = {is_store(item) for item in given}
    if len(kinds) > 1:
        raise UsageProblem("--output-dir names both paths and object stores: give one kind", slug="mixed-output-dirs")
    if kinds == {True}:
        for item in given:
            refuse_slash_in_password(item, "--output-dir")
        stores = tuple(map(Store, given))
        _refuse_nested([f"{store}/" for store in stores])
        if request.scratch_dir is not None:
            with as_caller():
                if not os.path.isdir(request.scratch_dir):
                    raise UsageProblem(
                        "--scratch-dir is not a directory", path=request.scratch_dir, slug="not-a-directory"
                    )
            refuse_unwritable(request.scratch_dir, "--scratch-dir")
        return Target(fs, log_dirs, tuple(map(str, stores)), stores, request.scratch_dir)
    if request.scratch_dir is not None:
        raise UsageProblem(
            "--scratch-dir needs an --output-dir in an object store", slug="scratch-dir-without-object-store"
        )
    with as_caller():
        places = tuple(os.path.realpath(_path_of(item)) for item in given)
    _refuse_nested([os.path.join(place, "") for place in places])
    for place in places:
        refuse_unsuitable(fs, place, log_dirs, "--output-dir", may_be_log_dir=True)
    return Target(fs, log_dirs, places)


def _path_of(given: str) -> str:
    return unquote(urlsplit(given).path) if given.startswith("file://") else given


def _refuse_nested(places: Sequence[str]) -> None:
    for item in range(len(places)):
        for other in range(len(places)):
            if item != other and places[item].startswith(places[other]):
                raise UsageProblem(
                    "--output-dir names the same directory twice, or one inside another",
                    path=places[item],
                    slug="overlapping-output-dirs",
                )
