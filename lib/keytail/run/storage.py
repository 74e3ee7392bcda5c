"""The storage under the log dirs, as the driver sees it: how much may be written, and whether other hosts share it.

`ScratchSpace` tracks the bytes that tasks in flight may write beside their sources. `ScratchSpace` gives no guarantee
about writers outside this run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keytail.errors import Refused
from keytail.log.fs import FileSystem
from keytail.sizes import human_bytes

# File systems that only one host mounts, which therefore sees every lock. All others may be shared: network file
# systems, file systems of a hypervisor (9p, virtiofs), and FUSE, whose types do not show where the files are.
_LOCAL_TYPES = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "nilfs2", "reiserfs"}
    | {"tmpfs", "ramfs", "overlay", "aufs"}
)
_SHARED_REMEDY = "Make sure that no broker can reach this storage, then pass --shared-storage"


def is_local(kind: str) -> bool:
    """Return whether a file system of this type (the kernel's name; "" if unknown) is known to be used by this host
    only."""
    return kind in _LOCAL_TYPES


def refuse_shared_storage(fs: FileSystem, log_dirs: Sequence[str], for_host: str = "") -> None:
    """Raise Refused when a log dir is on a file system that may be shared: locks only exclude brokers on this host.

    `for_host` names the host that reports the type, if it is not the driver.
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


def bytes_for_passes(free_bytes: int, limit_bytes: int | None, least_bytes: int) -> int | None:
    """Return the bytes that a partition alone may use of `free_bytes`, or None if `free_bytes` are too few for the
    partition's largest group. Without a limit this is half of the free space, or `least_bytes` if that is more."""
    bound = max(free_bytes // 2, least_bytes) if limit_bytes is None else limit_bytes
    return min(bound, free_bytes) if least_bytes <= min(bound, free_bytes) else None


@dataclass
class ScratchSpace:
    """Reserved bytes by file system (device number). Not thread safe: the caller must hold its own lock.

    Without `limit_bytes`, at most half of the space that was free on a file system when the file system was first
    queried is used. A partition that needs more is written in passes (`for_passes`). With `output_stays`, bytes that
    tasks have written, and bytes that others have written meanwhile, still count after the tasks have ended: the free
    space does not fall below the space that was free at the start minus the limit.
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
        """Count bytes that an earlier run has written and that remain, as if this run had written them."""
        device = self.device(log_dir)
        self._free_at_start[device] += size_bytes
        self._half_free[device] = self._free_at_start[device] // 2

    def fits(self, needs: Mapping[int, int]) -> bool:
        """Return whether these bytes, by device, may be written now in addition to the reserved bytes."""
        return self._fit(needs, self.reserved_bytes)

    def could_fit(self, needs: Mapping[int, int]) -> bool:
        """Return whether these bytes, by device, could be written if nothing were reserved."""
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
        """Return the bytes that the passes of one partition alone may use now, or None if its largest group (`least`)
        does not fit (`bytes_for_passes`)."""
        return bytes_for_passes(self.fs.free_bytes(self._path_of[device]), self.limit_bytes, least)

    def refusal(self, device: int, need: int, *, out_of_place: bool = False) -> Refused:
        """Return the reason why a partition cannot be rewritten even alone: its largest group or, out of place
        and with `output_stays`, all of it needs `need` bytes."""
        what = "the partition" if out_of_place or self.output_stays else "the largest group of segments"
        path = self._path_of[device]
        free = self.fs.free_bytes(path)
        if self.output_stays and need <= free:
            limit = self._half_free[device] if self.limit_bytes is None else self.limit_bytes
            return Refused(
                f"{what} needs up to {human_bytes(need)} of scratch space; of the limit of {human_bytes(limit)}, "
                f"{human_bytes(max(0, self._free_at_start[device] - free))} are in use; {human_bytes(free)} are free",
                path=path,
                remedy="Raise --max-scratch-bytes, or leave the partition to `compact --execute`, which replaces it in "
                "several passes",
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
