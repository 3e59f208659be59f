"""The files of the snapshot store in one directory, which several processes use at once.

All files of one snapshot begin with the same random id:

    ID.reservation   as long as what the snapshot may take, all of it a hole; there while the
                     snapshot is made, and locked by the process that makes it
    ID.state         what the engine writes
    ID.meta          the meta data as it is written
    ID.DEPLOYMENT.KEY.EPOCH.OPENING.NUMBER.EXPIRES.parked
                     the meta data, renamed: from that instant on there is a snapshot. The
                     name says all that it takes to find it and to sweep it.

A process that dies before the rename leaves a reservation that nobody holds, and the next
sweep removes it all. Whoever lists, makes, renames or removes files holds the lock of the
directory. Contents are read and written without it: only one process has them before the
rename, and nobody changes them afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from protocol.errors import CapacityExceeded, ConfigError
from protocol.messages import SnapshotOrder

_BLOCK_BYTES = 4096
_READ_BYTES = 1024 * 1024
_ID = re.compile(r"[0-9a-f]{16}\.")
_PARKED = re.compile(
    r"[0-9a-f]{16}\.([0-9a-f]{16})\.([0-9a-f]{32})" + r"\.([0-9]{1,19})" * 4 + r"\.parked"
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Label(msgspec.Struct, frozen=True):
    """What the name of a snapshot says: the digests of its deployment and of its session and
    stage, which of several is the newest, and until when it is kept."""

    deployment: str
    key: str
    order: SnapshotOrder
    expires_ms: int


@dataclass
class Files:
    """The files of one snapshot, or of one that is being made, with their sizes in bytes."""

    directory: Path
    id: str
    sizes: dict[str, int] = field(default_factory=dict)
    label: Label | None = None

    @property
    def state(self) -> Path:
        """What the engine writes."""
        return self.directory / self._state_name

    @property
    def reservation(self) -> Path:
        """As long as what the snapshot may take; there only while it is made."""
        return self.directory / self._reservation_name

    @property
    def meta(self) -> Path:
        """The meta data, where they are now."""
        return self.directory / self._meta_name

    @property
    def reserved_bytes(self) -> int:
        """What was reserved for it."""
        return self.sizes.get(self._reservation_name, 0)

    @property
    def written_bytes(self) -> int:
        """What its files take."""
        return sum(map(whole_blocks, self.sizes.values())) - whole_blocks(self.reserved_bytes)

    @property
    def bytes(self) -> int:
        """What it counts with."""
        return max(self.reserved_bytes, self.written_bytes)

    def park(self, label: Label) -> None:
        """From now on there is a snapshot."""
        self.relabel(label)
        self.tidy()

    def relabel(self, label: Label) -> None:
        """It is another one from now on."""
        before = self.meta
        self.label = label
        os.rename(before, self.meta)
        self.sizes[self._meta_name] = self.sizes.pop(before.name)

    def tidy(self) -> None:
        """Remove what only the making of the snapshot needed."""
        self._remove(self.sizes.keys() - {self._meta_name, self._state_name})

    def drop(self) -> None:
        """Remove all of it; first the file that makes it a snapshot."""
        self._remove({self._meta_name})
        self._remove({*self.sizes})

    @property
    def _state_name(self) -> str:
        return f"{self.id}.state"

    @property
    def _reservation_name(self) -> str:
        return f"{self.id}.reservation"

    @property
    def _meta_name(self) -> str:
        if (label := self.label) is None:
            return f"{self.id}.meta"
        order = label.order
        words = (label.deployment, label.key, order.epoch, order.opening, order.number)
        return ".".join([self.id, *map(str, words), str(label.expires_ms), "parked"])

    def _remove(self, names: set[str]) -> None:
        for name in names:
            path = self.directory / name
            try:
                path.unlink(missing_ok=True)
            except IsADirectoryError:
                # No engine should, but one may have made a directory of its file.
                shutil.rmtree(path)
            self.sizes.pop(name, None)


@dataclass
class Listing:
    """What there is in a directory: files by id, and the bytes of what is not the store's."""

    files: dict[str, Files] = field(default_factory=dict)
    other_bytes: int = 0

    @property
    def bytes(self) -> int:
        """What everything counts with together."""
        return self.other_bytes + sum(files.bytes for files in self.files.values())


class Directory:
    """A directory of mode 0700, and the bytes that all files in it may take together.

    Raises ConfigError, now or later, when it cannot be made or others have access to it.
    """

    def __init__(self, path: str, budget_bytes: int, name: str) -> None:
        given = Path(path).absolute()
        self.path = given.parent.resolve() / given.name
        self.budget_bytes = budget_bytes
        self.name = name
        with self._opened() as handle:
            status = os.fstat(handle)
        self.identity = (status.st_dev, status.st_ino)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Shut all other threads and processes out meanwhile."""
        # The directory itself is locked, not a file in it that a cleaner of temporary files
        # may take away. A lock ends with the process that holds it, however it dies.
        with self._opened() as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)

    def sync(self) -> None:
        """Have what was renamed and removed on the disk."""
        with self._opened() as handle:
            os.fsync(handle)

    def listing(self) -> Listing:
        """Everything that is here."""
        found = Listing()
        with os.scandir(self.path) as entries:
            for entry in entries:
                try:
                    size = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue  # An engine does what it likes beside its file.
                if _ID.match(entry.name) is None:
                    found.other_bytes += whole_blocks(size)
                    continue
                owner = entry.name.partition(".")[0]
                files = found.files.setdefault(owner, Files(self.path, owner))
                files.sizes[entry.name] = size
                if (words := _PARKED.fullmatch(entry.name)) is not None:
                    order = SnapshotOrder(int(words[3]), int(words[4]), int(words[5]))
                    files.label = Label(words[1], words[2], order, int(words[6]))
        return found

    def room_bytes(self) -> int:
        """What the budget, and the file system, have left for one more snapshot."""
        listing = self.listing()
        system = os.statvfs(self.path)
        unwritten = sum(files.bytes - files.written_bytes for files in listing.files.values())
        free = system.f_bavail * system.f_frsize - unwritten
        return max(min(self.budget_bytes - listing.bytes, free), 0)

    def reserve(self, size_bytes: int) -> tuple[str, io.FileIO]:
        """Count `size_bytes` as taken by a new snapshot: its id, and the lock that says so for
        as long as it is held.

        Raises CapacityExceeded when the file system has no room even for that.
        """
        owner = secrets.token_hex(8)
        path = Files(self.path, owner).reservation
        with room_required(self.name), contextlib.ExitStack() as undo:
            lock = io.FileIO(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "r+")
            undo.callback(path.unlink)
            undo.enter_context(lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock.fileno(), size_bytes)
            undo.pop_all()
        return owner, lock

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            self.path.mkdir(0o700, parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise ConfigError(f"snapshots cannot be kept in {self.path}: {error}") from error
        try:
            status = os.fstat(handle)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ConfigError(f"snapshots cannot be kept in {self.path}: others can use it too")
            yield handle
        finally:
            os.close(handle)


@contextmanager
def room_required(name: str) -> Iterator[None]:
    """Turn the errors of a file system without room into CapacityExceeded, which names it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        reason = f"the file system of {name} has no room: {error.strerror}"
        raise CapacityExceeded(reason) from error


def whole_blocks(size_bytes: int) -> int:
    """The bytes that a file of `size_bytes` takes."""
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def open_file(path: Path) -> io.FileIO:
    """A regular file, to be read. Raises OSError."""
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def write_file(path: Path, data: bytes) -> None:
    """A new file, on the disk when this returns. Raises OSError."""
    with io.FileIO(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        left = memoryview(data)
        while left:
            left = left[os.write(file.fileno(), left) :]
        os.fsync(file.fileno())


def is_locked(path: Path) -> bool:
    """Whether a living process has a lock on the file. In doubt it has: nothing is removed
    because a process is out of file descriptors."""
    try:
        with open_file(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def checksum(file: io.FileIO) -> int:
    """CRC-32 of the file.

    It finds what was cut off or damaged by accident, and no checksum beside the data finds
    more: who may write here could write that too. It is the fastest of the standard library
    (64 MiB: 31 ms; SHA-256 75 ms, BLAKE2b 188 ms), and lets other threads run meanwhile.
    """
    buffer = memoryview(bytearray(_READ_BYTES))
    found = 0
    while count := file.readinto(buffer):
        found = zlib.crc32(buffer[:count], found)
    return found
