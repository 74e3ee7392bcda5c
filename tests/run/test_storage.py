from __future__ import annotations

from types import SimpleNamespace

import pytest

from keytail.errors import Refused
from keytail.log.fs import FileStat, FileSystem
from keytail.run.storage import ScratchSpace, is_local, refuse_shared_storage

SHARED = ["nfs", "nfs4", "cifs", "ceph", "lustre", "9p", "virtiofs", "gpfs"]
UNKNOWN = ["fuse", "fuseblk", "fuse.sshfs", "fuse.s3fs", "fuse.ext4", "fuse.lxcfs", "cluster-of-tomorrow", "proc", ""]


@pytest.mark.parametrize("kind", [*SHARED, *UNKNOWN])
def test_file_systems_of_unknown_types_are_not_local(kind: str) -> None:
    assert not is_local(kind)

    class OnFileSystem(FileSystem):
        def file_system_type(self, path: str) -> str:
            return kind

    with pytest.raises(Refused, match=rf"not known to be local \({kind or 'unknown type'}\).*--shared-storage"):
        refuse_shared_storage(OnFileSystem(), ["/var/kafka"])


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs", "btrfs", "zfs", "overlay", "f2fs", "bcachefs"])
def test_types_of_local_file_systems_are_recognised(kind: str) -> None:
    assert is_local(kind)


class OnNfs(FileSystem):
    def file_system_type(self, path: str) -> str:
        return "nfs4" if path.startswith("/mnt") else "ext4"


def test_a_log_dir_on_nfs_is_refused_with_its_path() -> None:
    refuse_shared_storage(OnNfs(), ["/var/kafka"])
    with pytest.raises(Refused, match=r"not known to be local .nfs4.*/mnt/logs.*--shared-storage"):
        refuse_shared_storage(OnNfs(), ["/var/kafka", "/mnt/logs"])


class FakeStorage(FileSystem):
    """Places log dirs under /a on device 1, others on device 2; `free` has the free space of each."""

    def __init__(self, free: dict[int, int]) -> None:
        super().__init__()
        self.free = free

    def stat(self, path: str) -> FileStat:
        return SimpleNamespace(device=1 if path.startswith("/a") else 2)  # type: ignore[return-value]

    def free_bytes(self, path: str) -> int:
        return self.free[self.stat(path).device]


def test_by_default_half_of_the_free_space_is_used() -> None:
    space = ScratchSpace(FakeStorage({1: 1000, 2: 1000}))
    item = space.device("/a/x")
    assert space.device("/a/y") == item
    space.reserve({item: 300})
    assert space.fits({item: 200})
    assert not space.fits({item: 201})
    assert space.fits({space.device("/b"): 500}), "each file system must be counted separately"
    space.release({item: 300})
    assert space.fits({item: 500})
    assert not space.fits({item: 501}), "a partition must not use more than half of the free space"
    assert space.for_passes(item, 100) == 500
    assert space.for_passes(item, 700) == 700, "a larger group must get the space that it needs"
    assert space.for_passes(item, 1001) is None


def test_a_given_limit_also_applies_to_a_single_partition() -> None:
    space = ScratchSpace(FakeStorage({1: 1000}), limit_bytes=100)
    item = space.device("/a")
    assert space.fits({item: 100})
    assert not space.fits({item: 101})
    assert space.for_passes(item, 100) == 100
    assert space.for_passes(item, 101) is None
    assert "--max-scratch-bytes to 101" in str(space.refusal(item, 101))
    assert isinstance(space.refusal(item, 101), Refused)


def test_free_space_that_shrinks_during_the_run_is_considered() -> None:
    storage_now = FakeStorage({1: 1000})
    space = ScratchSpace(storage_now)
    item = space.device("/a")
    storage_now.free[1] = 40
    assert not space.fits({item: 50})
    assert space.for_passes(item, 30) == 30
    assert space.for_passes(item, 50) is None
    refusal = str(space.refusal(item, 50))
    assert "needs up to 50 B" in refusal
    assert "40 B are free" in refusal
    assert "Free 10 B more" in refusal


def test_permanent_output_counts_after_its_task_has_ended() -> None:
    storage = FakeStorage({1: 1000, 2: 1000})
    space = ScratchSpace(storage, output_stays=True)
    item = space.device("/a/x")
    space.reserve({item: 300})
    storage.free[1] = 700  # the free space after the task has written
    space.release({item: 300})
    assert space.fits({item: 200})
    assert not space.fits({item: 201}), "the limit is half of the space that was free at the start"
    assert ScratchSpace(storage).device("/a/x") == item
    storage.free[1] = 400  # the free space after other processes have written
    assert not space.fits({item: 1})
    assert "of the limit of 500 B, 600 B are in use" in str(space.refusal(item, 10))
