"""What the driver knows of the storage under the log dirs: how full it may get, and whether others share it.

`ScratchSpace` keeps account of what tasks in flight may write beside their sources. It promises nothing about
writers outside this run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keytail.errors import Refused
from keytail.log.fs import FileSystem

NETWORK_TYPES = frozenset(
    {
        "9p",
        "acfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "efs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
    }
    | {"nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "wekafs"}
)
# A file system in user space may be a local one, but nothing tells: only these are known to be local.
_LOCAL_FUSE = frozenset({"fuse.ext2", "fuse.ext4", "fuse.lxcfs", "fuseblk"})


def is_network(kind: str) -> bool:
    """Whether a file system of this type may be mounted by a broker on another host as well."""
    return kind in NETWORK_TYPES or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)


def refuse_shared_storage(fs: FileSystem, log_dirs: Sequence[str]) -> None:
    """Refused when a log dir is on a network file system: locks protect from brokers on this host only."""
    for log_dir in log_dirs:
        kind = fs.file_system_type(log_dir)
        if is_network(kind):
            raise Refused(
                f"the log dir is on a network file system ({kind}), where a broker on another host could have "
                "it open and no lock would tell",
                path=log_dir,
                remedy="Make sure that no broker can reach it, then state so with --shared-storage",
            )


@dataclass
class ScratchSpace:
    """Reservations by file system (device number). Not thread safe: the caller holds its own lock.

    Without `limit_bytes` a file system is filled at most by half of what was free when it was first asked
    about. A partition that needs more is written in rounds (`for_rounds`).
    """

    fs: FileSystem
    limit_bytes: int | None = None
    reserved_bytes: dict[int, int] = field(default_factory=dict)
    _device_of: dict[str, int] = field(default_factory=dict)
    _path_of: dict[int, str] = field(default_factory=dict)
    _half_free: dict[int, int] = field(default_factory=dict)

    def device(self, log_dir: str) -> int:
        if log_dir in self._device_of:
            return self._device_of[log_dir]
        number = self._device_of[log_dir] = self.fs.stat(log_dir).device
        if number not in self._path_of:
            self._path_of[number] = log_dir
            self._half_free[number] = self.fs.free_bytes(log_dir) // 2
        return number

    def fits(self, needs: Mapping[int, int]) -> bool:
        """Whether these bytes, by device, may be written now beside what is reserved."""
        for device, need in needs.items():
            reserved = self.reserved_bytes.get(device, 0)
            limit = self._half_free[device] if self.limit_bytes is None else self.limit_bytes
            if reserved + need > limit or reserved + need > self.fs.free_bytes(self._path_of[device]):
                return False
        return True

    def reserve(self, needs: Mapping[int, int]) -> None:
        for device, need in needs.items():
            self.reserved_bytes[device] = self.reserved_bytes.get(device, 0) + need

    def release(self, needs: Mapping[int, int]) -> None:
        for device, need in needs.items():
            self.reserved_bytes[device] -= need

    def for_rounds(self, device: int, least: int) -> int | None:
        """What the rounds of one partition alone may take now; None where its largest group (`least`) does not fit.

        Half of what is free, where no limit is given, or `least` if that is more.
        """
        free = self.fs.free_bytes(self._path_of[device])
        bound = max(free // 2, least) if self.limit_bytes is None else self.limit_bytes
        return min(bound, free) if least <= min(bound, free) else None

    def refusal(self, device: int, need: int, what: str = "the largest group of segments") -> Refused:
        """Why a partition cannot be rewritten even alone, group by group: its largest (`what`) needs so much."""
        path = self._path_of[device]
        free = self.fs.free_bytes(path)
        if self.limit_bytes is not None and need > self.limit_bytes:
            return Refused(
                f"{what} needs up to {need} bytes of scratch space, and --max-scratch-bytes "
                f"is {self.limit_bytes} (free: {free})",
                path=path,
                remedy=f"Raise --max-scratch-bytes to {need} or more",
            )
        return Refused(
            f"{what} needs up to {need} bytes of scratch space, and {free} are free",
            path=path,
            remedy=f"Free {max(need - free, 1)} bytes more on this file system",
        )
