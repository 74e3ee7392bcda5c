"""Checks the storage of the log dirs on the driver: how many bytes may be written, and whether other hosts share it.

`ScratchSpace` tracks the bytes that running tasks may write. Bytes of writers outside this run only count as far as
they reduce the free space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from keytail.errors import Refused
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.lock import LockName, hold
from keytail.sizes import human_bytes

# Types of file systems that only one host mounts, so that this host sees every lock. Other file systems may be shared:
# network file systems, those of a hypervisor (9p, virtiofs), and FUSE, whose type does not show where the files are.
_LOCAL_TYPES = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "nilfs2", "reiserfs"}
    | {"tmpfs", "ramfs", "overlay", "aufs"}
)
_SHARED_REMEDY = "Make sure that no broker can reach this storage, then pass --shared-storage"


def is_local(kind: str) -> bool:
    """Return whether only this host can use a file system of type `kind`, which is the kernel's name of the type, or ""
    if that is unknown."""
    return kind in _LOCAL_TYPES


def refuse_shared_storage(fs: FileSystem, log_dirs: Sequence[str], for_host: str = "") -> None:
    """Raise Refused if a log dir is on a file system that may be shared: a lock excludes only brokers on this host.

    `for_host` names the host that reports the type of the file system, if it is not the driver.
    """
    for log_dir in log_dirs:
        kind = fs.file_system_type(log_dir)
        if not is_local(kind):
            where = f" on host {for_host}" if for_host else ""
            raise Refused(
                f"the log dir is on a file system that is not known to be local ({kind or 'unknown type'}){where}: a "
                "broker on another host could have it open, and the lock of that broker would have no effect here",
                path=log_dir,
                remedy=_SHARED_REMEDY,
                slug="shared-storage",
            )


def hold_local(
    fs: FileSystem, log_dirs: Sequence[str], shared_storage: bool, name: LockName = names.LOCK
) -> AbstractContextManager[None]:
    """Return what `lock.hold` returns. Unless `shared_storage`, raise Refused first if storage may be shared."""
    if not shared_storage:
        refuse_shared_storage(fs, log_dirs)
    return hold(log_dirs, fs, name)


def bytes_for_passes(free_bytes: int, limit_bytes: int | None, least_bytes: int) -> int | None:
    """Return the maximum scratch bytes of a partition that is written alone, or None if this is less than the
    `least_bytes` that its largest group needs.

    The result is `limit_bytes`, or without it the larger of `least_bytes` and half of `free_bytes`; in both cases at
    most `free_bytes`.
    """
    bound = max(free_bytes // 2, least_bytes) if limit_bytes is None else limit_bytes
    return min(bound, free_bytes) if least_bytes <= min(bound, free_bytes) else None


@dataclass
class ScratchSpace:
    """The bytes that are reserved on each file system, by device number. Not thread safe: the caller must hold a lock.

    `limit_bytes` is the maximum on each file system; None stands for half of the bytes that were free at the first
    query. A partition that needs more is written in passes (`for_passes`). With `output_stays`, written bytes still
    count after tasks have ended, even bytes that other processes have written: the free space does not fall below the
    bytes that were free at the start minus the limit.
    """

    fs: FileSystem
    limit_bytes: int | None = None
    output_stays: bool = False
    reserved_bytes: dict[int, int] = field(default_factory=dict)
    _device_of: dict[str, int] = field(default_factory=dict)
    _path_of: dict[int, str] = field(default_factory=dict)
    _free_at_start: dict[int, int] = field(default_factory=dict)
    _half_free: dict[int, int] = field(default_factory=dict)

    def device(self, log_dir: str) -> int:
        if log_dir in self._device_of:
            return self._device_of[log_dir]
        number = self._device_of[log_dir] = self.fs.stat(log_dir).device
        if number not in self._path_of:
            self._path_of[number] = log_dir
            self._free_at_start[number] = self.fs.free_bytes(log_dir)
            self._half_free[number] = self._free_at_start[number] // 2
        return number

    def count_as_used(self, log_dir: str, size_bytes: int) -> None:
        """Count `size_bytes` that an earlier run has written, and that remain, as bytes that this run has written."""
        device = self.device(log_dir)
        self._free_at_start[device] += size_bytes
        self._half_free[device] = self._free_at_start[device] // 2

    def fits(self, needs: Mapping[int, int]) -> bool:
        """Return whether the bytes in `needs`, by device, may be written now in addition to the reserved bytes."""
        return self._fit(needs, self.reserved_bytes)

    def could_fit(self, needs: Mapping[int, int]) -> bool:
        """Return whether the bytes in `needs`, by device, could be written if no bytes were reserved."""
        return self._fit(needs, {})

    def _fit(self, needs: Mapping[int, int], reserved_bytes: Mapping[int, int]) -> bool:
        for device, need in needs.items():
            reserved = reserved_bytes.get(device, 0)
            limit = self._half_free[device] if self.limit_bytes is None else self.limit_bytes
            free = self.fs.free_bytes(self._path_of[device])
            if self.output_stays:
                limit -= max(0, self._free_at_start[device] - free)
            if reserved + need > limit or reserved + need > free:
                return False
        return True

    def reserve(self, needs: Mapping[int, int]) -> None:
        for device, need in needs.items():
            self.reserved_bytes[device] = self.reserved_bytes.get(device, 0) + need

    def release(self, needs: Mapping[int, int]) -> None:
        for device, need in needs.items():
            self.reserved_bytes[device] -= need

    def for_passes(self, device: int, least: int) -> int | None:
        """Return the maximum scratch bytes of a partition that is written alone and in passes, or None if its largest
        group, which needs `least` bytes, does not fit (`bytes_for_passes`)."""
        return bytes_for_passes(self.fs.free_bytes(self._path_of[device]), self.limit_bytes, least)

    def refusal(self, device: int, need: int, *, out_of_place: bool = False) -> Refused:
        """Return the error for a partition that does not fit even if it is rewritten alone. `need` is the number of
        bytes for its largest group or, out of place or with `output_stays`, for the whole partition."""
        what = "the partition" if out_of_place or self.output_stays else "the largest group of segments"
        path = self._path_of[device]
        free = self.fs.free_bytes(path)
        if self.output_stays and need <= free:
            limit = self._half_free[device] if self.limit_bytes is None else self.limit_bytes
            return Refused(
                f"{what} needs up to {human_bytes(need)} of scratch space, but of the limit of {human_bytes(limit)}, "
                f"{human_bytes(max(0, self._free_at_start[device] - free))} are in use ({human_bytes(free)} are free)",
                path=path,
                remedy="Raise --max-scratch-bytes, or compact the partition without a preparation: `compact --execute` "
                "replaces it in several passes",
                slug="scratch-limit-too-low",
            )
        if self.limit_bytes is not None and need > self.limit_bytes:
            return Refused(
                f"{what} needs up to {human_bytes(need)} of scratch space, but --max-scratch-bytes "
                f"is {human_bytes(self.limit_bytes)} ({human_bytes(free)} are free)",
                path=path,
                remedy=f"Raise --max-scratch-bytes to {need} or more",
                slug="scratch-limit-too-low",
            )
        more = human_bytes(max(need - free, 1))
        return Refused(
            f"{what} needs up to {human_bytes(need)} of scratch space, but {human_bytes(free)} are free",
            path=path,
            remedy=f"Free {more} more on this file system, or give another --output-dir"
            if out_of_place
            else f"Free {more} more on this file system, write to another file system with --output-dir, or move the "
            "partition to another log dir of the broker",
            slug="not-enough-space",
        )
