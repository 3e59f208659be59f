"""The snapshot store of a host: the state of sessions that are parked.

A snapshot is a file that an engine has written, with meta data beside it, in one of a few
directories that have a budget each. It survives the process that made it, and goes with its
session or when it expires. All processes of a deployment use the same directories at once.
Methods block, and may be called from any thread.
"""

from __future__ import annotations

import fcntl
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from protocol.device_bytes import binary_size
from protocol.errors import (
    CapacityExceeded,
    ConfigError,
    EngineFailed,
    Fenced,
    SessionStateLost,
)
from protocol.messages import SnapshotOrder
from workers.snapshot_files import (
    Directory,
    Files,
    Label,
    checksum,
    is_locked,
    open_file,
    room_required,
    whole_blocks,
    write_file,
)
from workers.snapshot_meta import (
    MAX_META_BYTES,
    SnapshotKey,
    SnapshotMeta,
    decode_meta,
    deployment_digest,
    key_digest,
)

_LATEST_S = 1e15
"""Whatever expires later than that expires then."""


class SnapshotPlace(msgspec.Struct, frozen=True):
    """A directory for snapshots, and how many bytes all files in it may take together.

    `name` is what those who gave it call it.
    """

    path: str
    budget_bytes: int
    name: str = "the snapshot store"


class PlaceUse(msgspec.Struct, frozen=True):
    """What there is in a place; `bytes` includes what is reserved for the `drafts`."""

    path: str
    snapshots: int
    drafts: int
    bytes: int
    budget_bytes: int


class Stored(NamedTuple):
    """A snapshot of a session; `owner` is the gateway that had it when it was made."""

    session: str
    owner: str
    order: SnapshotOrder


@dataclass(eq=False)
class Draft:
    """A snapshot that is being made: the engine writes it to a new file at `path`.

    Until its commit it is this process's: when that dies, it is swept.
    """

    session: str
    stage: str
    path: Path
    id: str
    directory: Directory
    lock: io.FileIO

    @property
    def closed(self) -> bool:
        """Whether it was committed or abandoned."""
        return self.lock.closed


@dataclass(eq=False)
class Taken:
    """A snapshot that may be read at `path` and that does not expire before `close`.

    The removal of its session's, or a newer one, takes it away nevertheless.
    """

    path: Path
    step: int | None
    lock: io.FileIO

    def close(self) -> None:
        """It is read no longer. Idempotent."""
        self.lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SnapshotStore:
    """The snapshots of `deployment` in `places`, which come in order of preference.

    `clock` tells wall-clock time in seconds. Raises ConfigError for a place that cannot be
    made, that others have access to, or that is named twice.
    """

    def __init__(
        self,
        places: Sequence[SnapshotPlace],
        deployment: str,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directories = [
            Directory(place.path, place.budget_bytes, place.name) for place in places
        ]
        if len({directory.identity for directory in self._directories}) < len(places):
            raise ConfigError("two places for snapshots are the same directory")
        self._deployment = deployment
        self._clock = clock

    def begin(self, session: str, stage: str, size_bytes: int) -> Draft:
        """Reserve `size_bytes` for a new snapshot in the first place that has room.

        What has expired makes room before. Raises CapacityExceeded when no place has any.
        """
        needed = whole_blocks(size_bytes) + MAX_META_BYTES
        most = 0
        refused: CapacityExceeded | None = None
        with self._locked():
            self._sweep(self._clock())
            for directory in self._directories:
                room = directory.room_bytes()
                most = max(most, room)
                if room < needed:
                    continue
                try:
                    owner, lock = directory.reserve(needed)
                except CapacityExceeded as error:
                    refused = error
                else:
                    path = Files(directory.path, owner).state
                    return Draft(session, stage, path, owner, directory, lock)
        names = dict.fromkeys(directory.name for directory in self._directories)
        raise refused or _full(" and ".join(names), needed, most)

    def commit(
        self,
        draft: Draft,
        *,
        order: SnapshotOrder,
        owner: str,
        weights: str,
        engine: str,
        step: int | None,
        expires_at_s: float,
    ) -> int:
        """Make the draft the snapshot of its session and stage, instead of any earlier one.

        Returns the bytes of what the engine has written; `owner` is the gateway that has the
        session, `expires_at_s` wall-clock time.
        Raises Fenced when a newer one than `order` is there: whoever made that has the
        session now. Raises CapacityExceeded when it is more than was reserved and there is no
        room for it, or when the file system has none; EngineFailed when there is no file;
        ValueError when the draft is closed, also while this runs. Then nothing is left of the
        draft, and an earlier snapshot is as it was.
        """
        key = SnapshotKey(self._deployment, draft.session, draft.stage, engine)
        try:
            with room_required(draft.directory.name):
                size, crc32 = _finish_state(draft)
                meta = SnapshotMeta(key, owner, weights, step, size, crc32)
                write_file(Files(draft.directory.path, draft.id).meta, meta.encode())
                self._park(draft, order, int(min(max(expires_at_s, 0), _LATEST_S) * 1000))
                return size
        except BaseException:
            self.abandon(draft)
            raise

    def abandon(self, draft: Draft) -> None:
        """Leave nothing of a draft; what is committed stays. Idempotent."""
        with self._locked():
            files = draft.directory.listing().files.get(draft.id)
            if files is not None and not (draft.closed and files.label is not None):
                files.drop()
            draft.lock.close()

    def take(
        self,
        session: str,
        stage: str,
        *,
        wanted: SnapshotOrder,
        taken: SnapshotOrder,
        engine: str,
        weights: str,
    ) -> Taken:
        """The snapshot of a session and stage, for an engine with these `weights`.

        It is the `wanted` one or a newer one, and from now on it is the one `taken`: nothing
        that is older than that takes its place any more. It stays in the store: call `remove`
        once it is restored, and close what this returns in any case. Raises SessionStateLost,
        which says why, when there is none that fits and is whole.
        """
        key = SnapshotKey(self._deployment, session, stage, engine)
        with ExitStack() as undo:
            try:
                with self._locked():
                    files, label = self._newest(session, stage)
                    if not wanted <= label.order <= taken:
                        raise SessionStateLost(
                            "the session's snapshot is not the one that is to be restored"
                        )
                    files.relabel(msgspec.structs.replace(label, order=taken))
                    meta_file = undo.enter_context(open_file(files.meta))
                    state = undo.enter_context(open_file(files.state))
                    fcntl.flock(state, fcntl.LOCK_SH | fcntl.LOCK_NB)
                with meta_file:
                    # One byte more than there may be: then the checksum is another.
                    meta = decode_meta(meta_file.read(MAX_META_BYTES + 1))
                meta.check(key, weights)
                size = os.fstat(state.fileno()).st_size
                if size != meta.size_bytes or checksum(state) != meta.crc32:
                    raise SessionStateLost(
                        "the session's snapshot is damaged: its checksum is wrong"
                    )
            except OSError as error:
                reason = f"the session's snapshot cannot be read: {error.strerror}"
                raise SessionStateLost(reason) from error
            undo.pop_all()
        return Taken(files.state, meta.step, state)

    def remove(self, session: str, stage: str, through: SnapshotOrder) -> None:
        """There is no snapshot of this session and stage any more that is not newer than
        `through`. Idempotent."""
        with self._locked():
            dropped = [
                files for files, label in self._snapshots(session, stage) if label.order <= through
            ]
            for files in dropped:
                files.drop()
        self._sync(dropped)

    def sweep(self, now_s: float) -> int:
        """Drop what has expired at `now_s` (wall-clock), what belongs to another deployment,
        and drafts of dead processes; returns how many there were."""
        with self._locked():
            return self._sweep(now_s)

    def stored(self, stage: str) -> list[Stored]:
        """What there is of a stage, whichever worker has stored it. What cannot be read is left
        out: it expires."""
        with self._locked():
            found = _parked(self._all())
        deployment = deployment_digest(self._deployment)
        stored = []
        for files, label in found:
            with suppress(OSError, SessionStateLost), open_file(files.meta) as file:
                meta = decode_meta(file.read(MAX_META_BYTES + 1))
                named = key_digest(meta.key.session, stage) == label.key
                if named and label.deployment == deployment:
                    stored.append(Stored(meta.key.session, meta.owner, label.order))
        return stored

    def usage(self) -> list[PlaceUse]:
        """What there is, by place."""
        with self._locked():
            return [_use(directory) for directory in self._directories]

    # Inside

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with ExitStack() as locks:
            # The same order in every process, whatever each of them prefers.
            for directory in sorted(self._directories, key=lambda directory: directory.path):
                locks.enter_context(directory.locked())
            yield

    def _park(self, draft: Draft, order: SnapshotOrder, expires_ms: int) -> None:
        with self._locked():
            _check_open(draft)
            listing = draft.directory.listing()
            files = listing.files[draft.id]
            over = listing.bytes - draft.directory.budget_bytes
            if over > 0 and files.written_bytes > files.reserved_bytes:
                free = files.written_bytes - over
                raise _full(draft.directory.name, files.written_bytes, free)
            earlier = self._snapshots(draft.session, draft.stage)
            if any(label.order > order for _, label in earlier):
                raise Fenced("a newer snapshot of the session is in the store")
            key = key_digest(draft.session, draft.stage)
            deployment = deployment_digest(self._deployment)
            files.park(Label(deployment, key, order, expires_ms))
            draft.lock.close()
            # Who dies here leaves both, and the newer one counts.
            for other, _ in earlier:
                other.drop()
        self._sync([files, *(other for other, _ in earlier)])

    def _snapshots(self, session: str, stage: str) -> list[tuple[Files, Label]]:
        """All of a session and stage, the newest last: so they are to be dropped, for none
        may be found once a newer one is gone."""
        key = key_digest(session, stage)
        return [(files, label) for files, label in _parked(self._all()) if label.key == key]

    def _newest(self, session: str, stage: str) -> tuple[Files, Label]:
        found = self._snapshots(session, stage)
        if not found or found[-1][1].expires_ms <= self._clock() * 1000:
            raise SessionStateLost(
                "there is no snapshot of the session: it has expired or was removed"
            )
        files, label = found[-1]
        if label.deployment != deployment_digest(self._deployment):
            raise SessionStateLost("the session's snapshot belongs to another deployment")
        return files, label

    def _all(self) -> list[Files]:
        listings = [directory.listing() for directory in self._directories]
        return [files for listing in listings for files in listing.files.values()]

    def _sweep(self, now_s: float) -> int:
        found = self._all()
        dropped = [
            files for files in found if files.label is None and not is_locked(files.reservation)
        ]
        parked = _parked(found)
        newest = {label.key: label.order for _, label in parked}
        deployment = deployment_digest(self._deployment)
        for files, label in parked:
            ended = label.expires_ms <= now_s * 1000 or label.deployment != deployment
            if label.order < newest[label.key] or (ended and not is_locked(files.state)):
                dropped.append(files)
            else:
                files.tidy()
        for files in dropped:
            files.drop()
        return len(dropped)

    def _sync(self, changed: Iterable[Files]) -> None:
        """Have it on the disk that they were made or dropped: a machine that fails must not
        come back with what is old."""
        paths = {files.directory for files in changed}
        for directory in self._directories:
            if directory.path in paths:
                directory.sync()


def _use(directory: Directory) -> PlaceUse:
    listing = directory.listing()
    snapshots = sum(files.label is not None for files in listing.files.values())
    drafts = len(listing.files) - snapshots
    path = str(directory.path)
    return PlaceUse(path, snapshots, drafts, listing.bytes, directory.budget_bytes)


def _parked(found: Iterable[Files]) -> list[tuple[Files, Label]]:
    """The snapshots among them, in their order."""
    labelled = [(files, files.label) for files in found if files.label is not None]
    return sorted(labelled, key=lambda snapshot: snapshot[1].order)


def _check_open(draft: Draft) -> None:
    if draft.closed:
        raise ValueError("the draft was committed or abandoned")


def _finish_state(draft: Draft) -> tuple[int, int]:
    """Have what the engine has written on the disk; its size in bytes and its checksum."""
    _check_open(draft)
    try:
        state = open_file(draft.path)
    except OSError as error:
        _check_open(draft)
        raise EngineFailed(f"the engine wrote no snapshot: {error.strerror}") from error
    with state:
        os.fsync(state.fileno())
        return os.fstat(state.fileno()).st_size, checksum(state)


def _full(name: str, needed_bytes: int, free_bytes: int) -> CapacityExceeded:
    return CapacityExceeded(
        f"no room for the state in {name}: {binary_size(needed_bytes)} are needed, "
        f"and {binary_size(max(free_bytes, 0))} are free"
    )
