"""Keep optimizer states in a file on a disk, which updates read and write by direct I/O, whole pages at a time.

Other readers and writers, such as checkpoints, use a mapping of the file. Linux keeps the two coherent on local file
systems if they do not overlap in time; it is tried at start. The file has no name, so that nothing is left of it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

NETWORK = (
    *("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "glusterfs", "9p", "virtiofs", "vboxsf"),
    *("afs", "beegfs", "gpfs", "wekafs", "pvfs2", "ocfs2", "gfs2"),
)
"""The beginnings of the types of file systems on which Linux does not keep direct I/O and a mapping coherent."""

TRIAL = bytes(range(256)) * (mmap.PAGESIZE // 256)
"""The contents of the page with which direct I/O and the mapping are compared."""

CHECKED_BYTES = 16 * 2**20
"""The size of one read of ``StateFile.check_readable``."""


class DiskError(RuntimeError):
    """The error for a folder or a disk that cannot hold the states."""


class StateFile:
    """A file of ``size_bytes`` in ``folder``, of which only reserved parts take space. Raise ``DiskError``."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        self.fd = _create(folder)
        self.is_direct = False
        if not file_system(folder).startswith(NETWORK):
            with suppress(OSError):
                self._set_direct(True)
        self._cached_path = f"/proc/self/fd/{self.fd}"
        self.close = weakref.finalize(self, os.close, self.fd)
        # At exit a write may be in flight, and another file could get the same descriptor.
        self.close.atexit = False
        with self._reported(f"a file of {_gb(size_bytes)} was refused"):
            os.ftruncate(self.fd, size_bytes)

    def reserve(self, offset_bytes: int, size_bytes: int) -> None:
        """Take the space of a part, which is zero. Raise ``DiskError`` if the disk is full."""
        with self._reported(f"{_gb(size_bytes)} refused"):
            os.posix_fallocate(self.fd, offset_bytes, size_bytes)

    def check_coherence(self, offset_bytes: int) -> None:
        """Use buffered I/O if direct I/O and a mapping differ in the page at ``offset_bytes``, which becomes zero."""
        page, agrees = mmap.mmap(-1, mmap.PAGESIZE), False
        with self._reported("a mapping of it was refused"):
            mapping = mmap.mmap(self.fd, mmap.PAGESIZE, offset=offset_bytes)
        with mapping as mapped:
            mapped[:] = TRIAL
            # A disk with larger blocks refuses a page.
            with suppress(DiskError):
                self.read(memoryview(page), offset_bytes)
                sees_mapping, page[:] = page[:] == TRIAL, bytes(mmap.PAGESIZE)
                self.write(memoryview(page), offset_bytes)
                agrees = sees_mapping and mapped[:] == page[:]
            if not agrees:
                page[:] = bytes(mmap.PAGESIZE)
                self._set_direct(False)
                self.write(memoryview(page), offset_bytes)

    def _set_direct(self, is_direct: bool) -> None:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
        self.is_direct = is_direct

    def caches_reads(self) -> bool:
        """Return whether direct reads fill the page cache: some file systems accept the flag and ignore it."""
        os.fsync(self.fd)
        os.posix_fadvise(self.fd, 0, mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)
        page = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
        self.read(page, 0)
        # Only a page in the cache is read without waiting for the disk.
        with open(self._cached_path, "rb", buffering=0) as cached, suppress(OSError):
            return os.preadv(cached.fileno(), [page], 0, os.RWF_NOWAIT) > 0
        return False

    def check_readable(self, offset_bytes: int, size_bytes: int) -> None:
        """Read a part by way of the page cache, as the mapping does. Raise ``DiskError``."""
        memory = memoryview(mmap.mmap(-1, min(size_bytes, CHECKED_BYTES)))
        with open(self._cached_path, "rb", buffering=0) as cached:
            for begin in range(0, size_bytes, CHECKED_BYTES):
                self._transfer(os.preadv, cached.fileno(), "read", memory[: size_bytes - begin], offset_bytes + begin)

    def read(self, memory: memoryview, offset_bytes: int) -> None:
        """Fill ``memory``, whole pages. Raise ``DiskError``."""
        self._transfer(os.preadv, self.fd, "read", memory, offset_bytes)

    def write(self, memory: memoryview, offset_bytes: int) -> None:
        """Write ``memory``, whole pages. Raise ``DiskError``."""
        self._transfer(os.pwritev, self.fd, "written", memory, offset_bytes)

    def _transfer(self, transfer: object, fd: int, verb: str, memory: memoryview, offset_bytes: int) -> None:
        done = 0
        with self._reported(f"{len(memory):,} bytes at offset {offset_bytes:,} could not be {verb}"):
            while done < len(memory):
                moved = transfer(fd, [memory[done:]], offset_bytes + done)  # type: ignore[operator]
                # Direct I/O starts at a page again.
                pages = moved if done + moved == len(memory) else moved // mmap.PAGESIZE * mmap.PAGESIZE
                if pages == 0:
                    raise OSError(errno.EIO, "not one page was transferred")
                done += pages

    @contextmanager
    def _reported(self, found: str) -> Iterator[None]:
        """Raise ``DiskError`` that states ``found`` for an ``OSError`` in the body."""
        try:
            yield
        except OSError as error:
            free = ", which is gone"
            with suppress(OSError):
                free = f", {_gb(shutil.disk_usage(self.folder).free)} free"
            raise DiskError(
                f"The optimizer states must be readable and writable in {self.folder}{free}; found that {found}: "
                f"{os.strerror(error.errno or errno.EIO)}.\n"
                f"Look for errors of this disk in dmesg, free space on it, or set another folder, and resume from the "
                f"last checkpoint."
            ) from error


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds ``folder``, such as "ext4"; empty if it is not known."""
    try:
        mounts = Path("/proc/mounts").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    # Blanks in the name of a mounted folder are written as \040.
    types = {folder.replace("\\040", " "): kind for _, folder, kind, *_ in map(str.split, mounts)}
    return types.get(max(filter(folder.resolve().is_relative_to, types), key=len, default=""), "")


def check_free_space(folders: Sequence[Path], needed_bytes: int, ranks: int) -> None:
    """Raise ``DiskError`` unless ``ranks`` ranks of this node can each keep ``needed_bytes`` in each of ``folders``."""
    disks = Counter(folder.stat().st_dev for folder in folders)
    for folder in folders:
        free_bytes, all_bytes = shutil.disk_usage(folder).free, disks[folder.stat().st_dev] * ranks * needed_bytes
        if all_bytes > free_bytes:
            raise DiskError(
                f"nvme_path or nvme_paths: must have room for the optimizer states of the {ranks} ranks of this node, "
                f"found {_gb(all_bytes)} needed and {_gb(free_bytes)} free at {folder}.\n"
                f"Free space there, or set another folder. With a larger host_memory_gb, fewer states are on disk."
            )


def _create(folder: Path) -> int:
    """Return the descriptor of a new file without a name."""
    try:
        with tempfile.TemporaryFile(prefix="deep_opt_states-", dir=folder) as file:
            return os.dup(file.fileno())
    except OSError as error:
        remedy = "Create it, or name" if error.errno == errno.ENOENT else "Name"
        raise DiskError(
            f"nvme_path or nvme_paths: must be folders in which this user, {os.getuid()}, can create files, found "
            f"{folder}: {error.strerror}.\n{remedy} a folder of yours on a local disk."
        ) from error


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3g} GB"
