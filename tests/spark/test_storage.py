from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from keytail.errors import Refused
from keytail.log.fs import FileStat, FileSystem
from keytail.spark import storage
from keytail.spark.storage import ScratchSpace, file_system_type, is_network, refuse_shared_storage

MOUNTS = """\
/dev/vda / ext4 rw 0 0
proc /proc proc rw 0 0
nas:/kafka /mnt/nas nfs4 rw,vers=4.2 0 0
nas:/old /mnt/with\\040blank nfs rw 0 0
/dev/vdb /mnt/nas/local xfs rw 0 0
user@host: /home/me/remote fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [
        ("/var/kafka", "/", "ext4"),
        ("/mnt/nas", "/mnt/nas", "nfs4"),
        ("/mnt/nas/a/b", "/mnt/nas", "nfs4"),
        ("/mnt/nasty", "/", "ext4"),
        ("/mnt/nas/local/logs", "/mnt/nas/local", "xfs"),
        ("/mnt/with blank/logs", "/mnt/with blank", "nfs"),
        ("/home/me/remote/x", "/home/me/remote", "fuse.sshfs"),
    ],
)
def test_the_longest_mount_point_that_contains_a_path(path: str, point: str, kind: str) -> None:
    assert file_system_type(path, MOUNTS) == (point, kind)


def test_a_later_mount_hides_an_earlier_one_at_the_same_point() -> None:
    assert file_system_type("/mnt/nas/x", MOUNTS + "/dev/vdc /mnt/nas ext4 rw 0 0\n") == ("/mnt/nas", "ext4")


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "fuse.sshfs", "ceph", "lustre", "9p", "fuse.s3fs"])
def test_network_types(kind: str) -> None:
    assert is_network(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs", "btrfs", "zfs", "overlay", "fuseblk"])
def test_local_types(kind: str) -> None:
    assert not is_network(kind)


def test_a_log_dir_on_nfs_is_refused_with_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"nas:/kafka {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(storage, "_MOUNTS", str(mounts))
    with pytest.raises(Refused, match=f"network file system .nfs4, mounted at {tmp_path}.*--shared-storage"):
        refuse_shared_storage((str(tmp_path / "logs"),))


class FakeStorage(FileSystem):
    """Log dirs under /a are on device 1, others on device 2; `free` says how much is left there."""

    def __init__(self, free: dict[int, int]) -> None:
        super().__init__()
        self.free = free

    def stat(self, path: str) -> FileStat:
        return SimpleNamespace(device=1 if path.startswith("/a") else 2)  # type: ignore[return-value]

    def free_bytes(self, path: str) -> int:
        return self.free[self.stat(path).device]


def test_by_default_half_of_what_is_free_is_used() -> None:
    space = ScratchSpace(FakeStorage({1: 1000, 2: 1000}))
    one = space.device("/a/x")
    assert space.device("/a/y") == one
    space.reserve({one: 300})
    assert space.fits({one: 200})
    assert not space.fits({one: 201})
    assert space.fits({space.device("/b"): 1000}), "another file system has its own account"
    space.release({one: 300})
    assert space.fits({one: 1000}), "alone it may have all that is free"
    assert not space.fits({one: 1001})


def test_a_given_limit_holds_also_for_one_alone() -> None:
    space = ScratchSpace(FakeStorage({1: 1000}), limit_bytes=100)
    one = space.device("/a")
    assert space.fits({one: 100})
    assert not space.fits({one: 101})
    assert "--max-scratch-bytes to 101" in str(space.refusal(one, 101))
    assert isinstance(space.refusal(one, 101), Refused)


def test_free_space_that_shrinks_meanwhile_counts() -> None:
    storage_now = FakeStorage({1: 1000})
    space = ScratchSpace(storage_now)
    one = space.device("/a")
    storage_now.free[1] = 40
    assert not space.fits({one: 50})
    refusal = str(space.refusal(one, 50))
    assert "needs up to 50 bytes" in refusal
    assert "40 are free" in refusal
    assert "Free 10 bytes" in refusal
