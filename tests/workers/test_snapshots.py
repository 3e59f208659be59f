"""Parked states: found whole or not at all, never beyond the budget, and gone when they should."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.errors import (
    CapacityExceeded,
    ConfigError,
    EngineFailed,
    Fenced,
    SessionStateLost,
)
from protocol.messages import SnapshotOrder
from tests.workers import snapshot_process
from tests.workers.snapshot_process import (
    DEPLOYMENT,
    ENGINE,
    FIRST,
    NEVER_S,
    WEIGHTS,
    content,
    next_order,
)
from workers import snapshots
from workers.snapshots import Draft, PlaceUse, SnapshotPlace, SnapshotStore, Taken

ROOT = Path(__file__).parents[2]
BLOCK = 4096
EXPIRES_S = 1000.0


def any_order() -> dict[str, SnapshotOrder]:
    return {"wanted": FIRST, "taken": next_order()}


class Clock:
    """Wall-clock time that tests set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Host:
    """Two places, and a store that uses them."""

    def __init__(self, directory: Path, memory_blocks: int = 4, disk_blocks: int = 8) -> None:
        self.memory = directory / "memory"
        self.disk = directory / "disk"
        self.budgets = {self.memory: memory_blocks * BLOCK, self.disk: disk_blocks * BLOCK}
        self.clock = Clock()
        self.store = self.another_store()

    @property
    def places(self) -> list[SnapshotPlace]:
        return [
            SnapshotPlace(str(path), budget, path.name) for path, budget in self.budgets.items()
        ]

    def another_store(self, deployment: str = DEPLOYMENT) -> SnapshotStore:
        return SnapshotStore(self.places, deployment, clock=self.clock)

    def park(
        self,
        data: bytes = b"state",
        session: str = "session",
        *,
        stage: str = "stage",
        step: int | None = None,
        expires_at_s: float = EXPIRES_S,
    ) -> int:
        draft = self.store.begin(session, stage, len(data))
        return self.commit(draft, data, step=step, expires_at_s=expires_at_s)

    def commit(
        self,
        draft: Draft,
        data: bytes,
        *,
        step: int | None = None,
        expires_at_s: float = EXPIRES_S,
        order: SnapshotOrder | None = None,
    ) -> int:
        draft.path.write_bytes(data)
        return self.store.commit(
            draft,
            order=next_order() if order is None else order,
            owner="gateway",
            weights=WEIGHTS,
            engine=ENGINE,
            step=step,
            expires_at_s=expires_at_s,
        )

    def take(self, session: str = "session", stage: str = "stage") -> Taken:
        return snapshot_process.take(self.store, session, stage)

    def taken(self, session: str = "session") -> bytes:
        with self.take(session) as taken:
            return taken.path.read_bytes()

    def lost(self, session: str = "session", stage: str = "stage") -> str:
        with pytest.raises(SessionStateLost) as caught:
            self.take(session, stage)
        return str(caught.value)

    def files(self) -> list[Path]:
        return [*self.memory.iterdir(), *self.disk.iterdir()]

    def only(self, pattern: str) -> Path:
        (path,) = [path for path in self.files() if path.match(pattern)]
        return path

    def bytes_there(self, place: Path) -> int:
        """What the files of a place take, but for reservations, which are holes."""
        files = [path for path in place.iterdir() if path.suffix != ".reservation"]
        return sum(-(-path.stat().st_size // BLOCK) * BLOCK for path in files)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_what_is_taken_is_what_was_committed(host: Host) -> None:
    assert host.park(b"state", step=7) == 5
    with host.take() as taken:
        assert taken.path.read_bytes() == b"state"
        assert taken.step == 7
    with host.take() as again:
        assert again.path.read_bytes() == b"state"


def test_sessions_and_stages_have_snapshots_of_their_own(host: Host) -> None:
    host.park(b"one", stage="think")
    host.park(b"two", stage="speak", step=2)
    assert host.lost("other", "think") == host.lost("session", "listen")
    with host.take(stage="think") as think, host.take(stage="speak") as speak:
        assert (think.path.read_bytes(), think.step) == (b"one", None)
        assert (speak.path.read_bytes(), speak.step) == (b"two", 2)


def test_what_is_removed_leaves_nothing(host: Host) -> None:
    host.park()
    host.store.remove("session", "stage", next_order())
    host.store.remove("session", "stage", next_order())
    assert host.files() == []
    assert "expired or was removed" in host.lost()


def test_a_later_snapshot_replaces_the_earlier_one_in_whatever_place(host: Host) -> None:
    host.park(b"one", step=1)
    host.park(bytes(3 * BLOCK), step=2)
    assert list(host.memory.iterdir()) == []
    assert host.taken() == bytes(3 * BLOCK)
    host.park(b"three", step=3)
    assert list(host.disk.iterdir()) == []
    assert host.taken() == b"three"


def test_of_two_drafts_the_one_that_is_committed_later_counts(host: Host) -> None:
    first = host.store.begin("session", "stage", 10)
    second = host.store.begin("session", "stage", 10)
    host.commit(second, b"second")
    host.commit(first, b"first")
    assert host.taken() == b"first"
    assert len(host.files()) == 2


def test_another_store_finds_it(host: Host) -> None:
    host.park(step=3)
    host.store = host.another_store()
    with host.take() as taken:
        assert (taken.path.read_bytes(), taken.step) == (b"state", 3)


# Room


def test_the_first_place_with_room_is_used_and_a_full_store_says_what_is_free(host: Host) -> None:
    first = host.store.begin("a", "stage", 3 * BLOCK)
    second = host.store.begin("b", "stage", 5 * BLOCK)
    assert (first.path.parent, second.path.parent) == (host.memory, host.disk)
    assert not first.path.exists()
    with pytest.raises(
        CapacityExceeded, match="state in memory and disk: 12 KiB are needed, and 8 KiB are"
    ):
        host.store.begin("c", "stage", 2 * BLOCK)
    assert host.store.usage() == [
        PlaceUse(str(host.memory), 0, 1, 4 * BLOCK, 4 * BLOCK),
        PlaceUse(str(host.disk), 0, 1, 6 * BLOCK, 8 * BLOCK),
    ]
    host.commit(second, bytes(BLOCK))
    host.store.abandon(first)
    assert [use.bytes for use in host.store.usage()] == [0, 2 * BLOCK]
    assert [use.snapshots for use in host.store.usage()] == [0, 1]


def test_drafts_of_many_threads_and_stores_share_the_budget(host: Host) -> None:
    stores = [host.store, host.another_store()]

    def begin(index: int) -> Draft | None:
        try:
            return stores[index % 2].begin(f"session-{index}", "stage", BLOCK)
        except CapacityExceeded:
            return None

    with ThreadPoolExecutor(8) as pool:
        drafts = [*pool.map(begin, range(24))]
    assert sum(draft is not None for draft in drafts) == 2 + 4
    for draft in drafts:
        if draft is not None:
            host.store.abandon(draft)
    assert host.files() == []


def test_a_draft_may_become_longer_while_there_is_room(host: Host) -> None:
    draft = host.store.begin("session", "stage", 0)
    assert host.commit(draft, bytes(3 * BLOCK)) == 3 * BLOCK
    assert host.taken() == bytes(3 * BLOCK)


def test_a_draft_that_becomes_too_long_is_refused_and_the_earlier_snapshot_stays(
    host: Host,
) -> None:
    host.park(b"one")
    draft = host.store.begin("session", "stage", 10)
    with pytest.raises(CapacityExceeded, match="12 KiB are needed, and 8 KiB are free"):
        host.commit(draft, bytes(BLOCK + 1))
    assert draft.closed
    assert host.taken() == b"one"
    assert len(host.files()) == 2


def test_a_draft_within_its_reservation_is_not_refused_for_another_that_became_too_long(
    host: Host,
) -> None:
    good = host.store.begin("a", "stage", BLOCK)
    bad = host.store.begin("b", "stage", BLOCK)
    bad.path.write_bytes(bytes(10 * BLOCK))
    host.commit(good, bytes(BLOCK))
    assert host.taken("a") == bytes(BLOCK)


def test_files_of_others_count_and_stay(host: Host) -> None:
    stranger = host.memory / "notes.txt"
    stranger.write_bytes(bytes(2 * BLOCK))
    drafts = [host.store.begin("session", "stage", BLOCK) for _ in range(2)]
    assert [draft.path.parent for draft in drafts] == [host.memory, host.disk]
    host.store.sweep(EXPIRES_S)
    assert stranger.exists()


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def break_call(name: str) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, name, refuse)

    return break_call


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_file_system_that_fills_up_leaves_the_earlier_snapshot(
    host: Host, no_room: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    host.park(b"one")
    draft = host.store.begin("session", "stage", 10)
    draft.path.write_bytes(b"two")
    no_room(call)
    with pytest.raises(CapacityExceeded, match="file system of memory has no room"):
        host.store.commit(
            draft,
            order=next_order(),
            owner="gateway",
            weights=WEIGHTS,
            engine=ENGINE,
            step=1,
            expires_at_s=EXPIRES_S,
        )
    monkeypatch.undo()
    assert len(host.files()) == 2
    assert host.taken() == b"one"


def test_a_file_system_that_takes_no_reservation_is_full(
    host: Host, no_room: Callable[[str], None]
) -> None:
    no_room("ftruncate")
    with pytest.raises(CapacityExceeded, match="no room"):
        host.store.begin("session", "stage", 10)
    assert host.files() == []


def test_a_limit_on_the_length_of_files_is_no_room(host: Host) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, limits[1]))
    try:
        with pytest.raises(CapacityExceeded, match="no room"):
            host.store.begin("session", "stage", BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert host.files() == []


def test_what_the_file_system_has_left_and_others_have_reserved_counts(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statvfs(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=5 if path == host.disk else 0, f_frsize=BLOCK)

    monkeypatch.setattr(os, "statvfs", statvfs)
    draft = host.store.begin("a", "stage", 2 * BLOCK)
    assert draft.path.parent == host.disk
    with pytest.raises(CapacityExceeded, match="12 KiB are needed, and 8 KiB are free"):
        host.store.begin("b", "stage", 2 * BLOCK)


# The end of a snapshot, and of a draft


def test_what_has_expired_is_not_taken_and_is_swept(host: Host) -> None:
    host.park(expires_at_s=10)
    host.park(session="later", expires_at_s=20)
    host.clock.now_s = 10
    assert "expired or was removed" in host.lost()
    assert host.store.sweep(9.9) == 0
    assert host.store.sweep(10) == 1
    assert host.store.sweep(10) == 0
    assert host.taken("later") == b"state"


@pytest.mark.parametrize("expires_at_s", [float("inf"), 1e300, -1.0])
def test_any_time_of_expiry_can_be_told(host: Host, expires_at_s: float) -> None:
    host.park(expires_at_s=expires_at_s)
    assert host.store.sweep(1e12) == (1 if expires_at_s < 0 else 0)


def test_what_has_expired_makes_room(host: Host) -> None:
    for session in "abc":
        host.park(session=session, expires_at_s=10)
    host.clock.now_s = 10
    assert host.store.begin("d", "stage", 3 * BLOCK).path.parent == host.memory


def test_what_is_being_read_does_not_expire(host: Host) -> None:
    host.park(expires_at_s=10)
    taken = host.take()
    assert host.another_store().sweep(10) == 0
    assert taken.path.read_bytes() == b"state"
    taken.close()
    taken.close()
    assert host.another_store().sweep(10) == 1
    assert host.files() == []


def test_the_removal_of_a_session_takes_what_is_being_read(host: Host) -> None:
    host.park()
    with host.take():
        host.another_store().remove("session", "stage", next_order())
    assert host.files() == []


def test_what_another_deployment_has_left_is_swept(host: Host) -> None:
    host.park()
    assert host.another_store("another").sweep(0) == 1
    assert host.files() == []


def test_a_draft_stays_while_its_process_lives(host: Host) -> None:
    draft = host.store.begin("session", "stage", 10)
    assert host.another_store().sweep(EXPIRES_S * 2) == 0
    assert host.another_store("another").sweep(EXPIRES_S * 2) == 0
    host.commit(draft, b"state")
    assert host.taken() == b"state"


def test_nothing_is_swept_by_a_process_without_file_descriptors(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = host.store.begin("session", "stage", 10)
    host.park(session="other", expires_at_s=10)

    def refuse(_: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("workers.snapshot_files.open_file", refuse)
    assert host.store.sweep(10) == 0
    monkeypatch.undo()
    assert host.store.sweep(10) == 1
    host.commit(draft, b"state")


def test_a_draft_that_nobody_remembers_is_swept(host: Host) -> None:
    draft = host.store.begin("session", "stage", 10)
    draft.path.write_bytes(b"half")
    del draft
    assert host.store.sweep(0) == 1
    assert host.files() == []


def test_an_abandoned_draft_leaves_nothing(host: Host) -> None:
    draft = host.store.begin("session", "stage", 10)
    draft.path.write_bytes(b"half")
    draft.path.with_suffix(".state.part").mkdir()
    (draft.path.with_suffix(".state.part") / "file").write_bytes(b"more")
    host.store.abandon(draft)
    assert host.files() == []
    # The engine may not have noticed yet.
    draft.path.write_bytes(b"late")
    host.store.abandon(draft)
    assert host.files() == []


def test_what_an_engine_writes_after_all_was_abandoned_is_swept(host: Host) -> None:
    draft = host.store.begin("session", "stage", 10)
    host.store.abandon(draft)
    draft.path.write_bytes(b"late")
    assert host.store.sweep(0) == 1
    assert host.files() == []


def test_what_an_engine_leaves_beside_its_file_goes_with_the_commit(host: Host) -> None:
    draft = host.store.begin("session", "stage", 10)
    draft.path.with_suffix(".part").write_bytes(b"scratch")
    host.commit(draft, b"state")
    assert len(host.files()) == 2


def test_a_committed_draft_is_committed_once_and_not_abandoned(host: Host) -> None:
    draft = host.store.begin("session", "stage", 10)
    host.commit(draft, b"state")
    host.store.abandon(draft)
    with pytest.raises(ValueError, match="committed or abandoned"):
        host.store.commit(
            draft,
            order=next_order(),
            owner="gateway",
            weights=WEIGHTS,
            engine=ENGINE,
            step=2,
            expires_at_s=EXPIRES_S,
        )
    assert host.taken() == b"state"


@pytest.mark.parametrize("moment", ["checksum", "write_file"])
def test_a_draft_that_is_abandoned_during_its_commit_leaves_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    host.park(b"one")
    draft = host.store.begin("session", "stage", 10)
    real = getattr(snapshots, moment)

    def abandoned(*arguments: object) -> object:
        host.store.abandon(draft)
        return real(*arguments)

    monkeypatch.setattr(snapshots, moment, abandoned)
    with pytest.raises(ValueError, match="abandoned"):
        host.commit(draft, b"two")
    assert len(host.files()) == 2
    assert host.taken() == b"one"


def write_nothing(_: Path) -> None: ...


def write_a_directory(path: Path) -> None:
    path.mkdir()
    (path / "weights").write_bytes(b"data")


def write_a_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def write_a_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "engine_writes", [write_nothing, write_a_directory, write_a_link, write_a_pipe]
)
def test_an_engine_that_writes_no_file_has_failed(
    host: Host, engine_writes: Callable[[Path], None]
) -> None:
    draft = host.store.begin("session", "stage", 10)
    engine_writes(draft.path)
    with pytest.raises(EngineFailed, match="wrote no snapshot"):
        host.store.commit(
            draft,
            order=next_order(),
            owner="gateway",
            weights=WEIGHTS,
            engine=ENGINE,
            step=1,
            expires_at_s=EXPIRES_S,
        )
    assert host.files() == []


# What cannot be restored


def test_a_snapshot_of_another_engine_or_other_weights_is_told(host: Host) -> None:
    host.park()
    with pytest.raises(SessionStateLost, match="made by the engine engine, not by another"):
        host.store.take("session", "stage", engine="another", weights=WEIGHTS, **any_order())
    with pytest.raises(SessionStateLost, match="made with other weights"):
        host.store.take("session", "stage", engine=ENGINE, weights="others", **any_order())
    assert host.taken() == b"state"


def test_a_snapshot_of_another_deployment_is_told(host: Host) -> None:
    host.park()
    host.store = host.another_store("another")
    assert "belongs to another deployment" in host.lost()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    os.truncate(path, 1 << 40)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGE = pytest.mark.parametrize("damage", [cut, flip, lengthen, empty])


@DAMAGE
def test_a_damaged_state_is_never_taken(host: Host, damage: Callable[[Path], None]) -> None:
    host.park(b"state" * 100)
    damage(host.only("*.state"))
    assert host.lost() == "the session's snapshot is damaged: its checksum is wrong"


@DAMAGE
def test_damaged_meta_data_are_never_trusted(host: Host, damage: Callable[[Path], None]) -> None:
    host.park(step=1)
    damage(host.only("*.parked"))
    assert host.lost() == "the session's snapshot is damaged: its meta data cannot be read"
    # They expire all the same.
    assert host.store.sweep(EXPIRES_S) == 1


def test_no_byte_of_the_meta_data_can_change_unnoticed(host: Host) -> None:
    host.park(step=123)
    path = host.only("*.parked")
    data = path.read_bytes()
    for index in range(len(data)):
        path.write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
        assert host.lost() == "the session's snapshot is damaged: its meta data cannot be read"


def test_a_state_that_is_missing_is_told(host: Host) -> None:
    host.park()
    host.only("*.state").unlink()
    assert host.lost() == "the session's snapshot cannot be read: No such file or directory"


def test_meta_data_of_another_session_are_not_trusted(host: Host) -> None:
    host.park(b"one", "one")
    theirs = host.only("*.parked").read_bytes()
    host.store.remove("one", "stage", next_order())
    host.park(b"two", "two")
    host.only("*.parked").write_bytes(theirs)
    assert host.lost("two") == "the session's snapshot is damaged: it names another session"


# Names and directories


@pytest.mark.parametrize(
    "name", ["../../escape", "/etc/passwd", "a/b", ".", "", "nul\0", "ü" * 500, "*", "session\n"]
)
def test_names_never_reach_the_file_system(host: Host, name: str) -> None:
    host.park(b"theirs", name, stage=name)
    assert [path.parent for path in host.files()] == [host.memory] * 2
    assert all(path.name.isascii() for path in host.files())
    with host.take(name, name) as taken:
        assert taken.path.read_bytes() == b"theirs"
    host.store.remove(name, name, next_order())
    assert host.files() == []


def test_a_session_and_a_stage_are_not_mixed_up(host: Host) -> None:
    host.park(session='a","b', stage="c")
    host.lost("a", 'b","c')


def test_meta_data_that_are_too_long_are_refused(host: Host) -> None:
    with pytest.raises(ValueError, match="of 4096 bytes"):
        host.park(session="x" * 5000)
    assert host.files() == []


def test_directories_are_private(host: Host) -> None:
    assert [path.stat().st_mode & 0o777 for path in (host.memory, host.disk)] == [0o700] * 2


def test_a_directory_that_others_can_use_is_refused(host: Host) -> None:
    host.memory.chmod(0o750)
    with pytest.raises(ConfigError, match="others can use it"):
        host.another_store()
    with pytest.raises(ConfigError, match="others can use it"):
        host.store.begin("session", "stage", 1)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "target").mkdir(0o700)
    (tmp_path / "link").symlink_to("target")
    for name in ("file", "link", "file/below"):
        with pytest.raises(ConfigError, match="snapshots cannot be kept"):
            SnapshotStore([SnapshotPlace(str(tmp_path / name), BLOCK)], DEPLOYMENT)


def test_one_directory_is_one_place(tmp_path: Path) -> None:
    places = [SnapshotPlace(str(tmp_path / name), BLOCK) for name in ("a", "b/../a")]
    with pytest.raises(ConfigError, match="the same directory"):
        SnapshotStore(places, DEPLOYMENT)


def test_a_directory_that_was_cleaned_away_is_made_again(host: Host) -> None:
    host.park()
    for path in host.files():
        path.unlink()
    host.memory.rmdir()
    assert "expired or was removed" in host.lost()
    host.park(b"again")
    assert host.taken() == b"again"


# Which is the newer one


def test_a_newer_snapshot_is_not_replaced_by_an_older_one(host: Host) -> None:
    late = host.store.begin("session", "stage", 5)
    newer = host.store.begin("session", "stage", 5)
    host.commit(newer, b"newer", order=SnapshotOrder(1, 2, 1))
    with pytest.raises(Fenced, match="a newer snapshot"):
        host.commit(late, b"later", order=SnapshotOrder(1, 1, 9))
    assert late.closed
    assert host.taken() == b"newer"
    assert sorted(path.suffix for path in host.files()) == [".parked", ".state"]


def test_who_takes_a_snapshot_shuts_out_who_had_the_session_before(host: Host) -> None:
    first = host.store.begin("session", "stage", 5)
    host.commit(first, b"first", order=SnapshotOrder(1, 1, 1), step=4)
    late = host.store.begin("session", "stage", 5)
    wanted, taken = SnapshotOrder(1, 1, 1), SnapshotOrder(1, 2)
    host.store.take(
        "session", "stage", wanted=wanted, taken=taken, engine=ENGINE, weights=WEIGHTS
    ).close()
    with pytest.raises(Fenced):
        host.commit(late, b"later", order=SnapshotOrder(1, 1, 2))
    # Whoever comes next knows it by either name.
    for known in (wanted, taken):
        with host.store.take(
            "session",
            "stage",
            wanted=known,
            taken=SnapshotOrder(1, 3),
            engine=ENGINE,
            weights=WEIGHTS,
        ) as again:
            assert (again.step, again.path.read_bytes()) == (4, b"first")


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [(SnapshotOrder(1, 2, 3), SnapshotOrder(1, 3)), (SnapshotOrder(1, 1), SnapshotOrder(1, 2))],
    ids=["an older one", "one of a later opening"],
)
def test_a_snapshot_that_is_not_the_wanted_one_is_not_restored(
    host: Host, wanted: SnapshotOrder, taken: SnapshotOrder
) -> None:
    draft = host.store.begin("session", "stage", 5)
    host.commit(draft, b"state", order=SnapshotOrder(1, 2, 2))
    with pytest.raises(SessionStateLost, match="not the one"):
        host.store.take(
            "session", "stage", wanted=wanted, taken=taken, engine=ENGINE, weights=WEIGHTS
        )
    assert host.taken() == b"state"


def test_a_removal_leaves_what_is_newer(host: Host) -> None:
    draft = host.store.begin("session", "stage", 5)
    host.commit(draft, b"state", order=SnapshotOrder(1, 2, 1))
    host.store.remove("session", "stage", SnapshotOrder(1, 1, 99))
    assert len(host.files()) == 2
    host.store.remove("session", "stage", SnapshotOrder(1, 2, 1))
    assert host.files() == []


# Threads and processes


def test_threads_that_park_and_take_the_same_session_see_whole_states(host: Host) -> None:
    host.budgets = dict.fromkeys(host.budgets, 100 * BLOCK)
    host.store = host.another_store()
    host.park(content(0, 5000), step=0)
    start = threading.Barrier(4)
    whole: list[int] = []

    def work(first: int) -> None:
        start.wait()
        for step in range(first, first + 20):
            # Another thread may have stored, taken or replaced a newer one since.
            with suppress(Fenced, SessionStateLost, FileNotFoundError):
                host.park(content(step, 5000), step=step)
                with host.take() as taken:
                    assert taken.step is not None
                    assert taken.path.read_bytes() == content(taken.step, 5000)
                    whole.append(taken.step)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (100, 200, 300, 400)))
    assert whole
    assert len(host.files()) == 2


@pytest.fixture
def start(host: Host) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    with ExitStack() as ends:

        def process(mode: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "tests.workers.snapshot_process", mode]
            command += [f"{place.path}={place.budget_bytes}" for place in host.places]
            started = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            ends.enter_context(started)
            ends.callback(started.kill)
            return started

        yield process


def pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


OLD = content(1, 5000)
NEW = content(2, snapshot_process.REPLACED_BYTES)


@pytest.mark.parametrize("memory_blocks", [4, 16], ids=["another place", "the same place"])
def test_a_process_that_dies_at_any_call_of_a_commit_leaves_the_old_or_the_new_state(
    host: Host, start: Callable[[str], subprocess.Popen[str]], memory_blocks: int
) -> None:
    host.budgets[host.memory] = memory_blocks * BLOCK
    host.store = host.another_store()
    orders, outcomes = pipes(start("crash"))
    found: list[int] = []
    for call in itertools.count(1):
        host.park(OLD, step=1, expires_at_s=NEVER_S)
        print("replace", call, file=orders, flush=True)
        outcome = outcomes.readline().strip()
        with host.take() as taken:
            assert taken.step is not None
            assert taken.path.read_bytes() == {1: OLD, 2: NEW}[taken.step]
            found.append(taken.step)
        host.store.sweep(0)
        with host.take() as taken:
            assert taken.step == found[-1]
        assert sorted(path.suffix for path in host.files()) == [".parked", ".state"]
        host.store.remove("session", "stage", next_order())
        assert host.files() == []
        if outcome == "ended":
            break
        assert outcome == f"signal {signal.SIGKILL:d}"
    assert found == sorted(found)
    assert found.count(1) > 20
    assert found.count(2) > 5


def test_a_process_that_dies_at_any_call_of_a_removal_leaves_the_state_or_nothing(
    host: Host, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    orders, outcomes = pipes(start("crash"))
    there = []
    for call in itertools.count(1):
        host.park(OLD, step=1, expires_at_s=NEVER_S)
        print("remove", call, file=orders, flush=True)
        outcome = outcomes.readline().strip()
        host.store.sweep(0)
        there.append(len(host.files()) == 2)
        if there[-1]:
            assert host.taken() == OLD
        else:
            assert host.files() == []
        host.store.remove("session", "stage", next_order())
        if outcome == "ended":
            break
        assert outcome == f"signal {signal.SIGKILL:d}"
    assert there == sorted(there, reverse=True)
    assert set(there) == {True, False}


def test_processes_that_share_the_store_and_are_killed_leave_no_more_than_what_is_parked(
    host: Host, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    host.budgets = {host.memory: 12 * BLOCK, host.disk: 24 * BLOCK}
    host.store = host.another_store()
    processes = [start("share") for _ in range(4)]
    for process in processes:
        assert pipes(process)[1].readline() == "busy\n"
    killed, going = processes[:2], processes[2:]
    for process in killed:
        process.kill()
    for process in going:
        pipes(process)[0].close()
    assert [process.wait() for process in going] == [0, 0]
    assert [process.wait() for process in killed] == [-signal.SIGKILL] * 2

    host.store.sweep(0)
    places = host.store.usage()
    assert sum(place.drafts for place in places) == 0
    assert len(host.files()) == 2 * sum(place.snapshots for place in places)
    for index in range(3):
        host.store.remove(f"session-{index}", "stage", next_order())
    assert host.files() == []


# Any order of calls

SESSIONS = st.sampled_from("abc")
SIZES = st.integers(0, 3 * BLOCK)


class Calls(RuleBasedStateMachine):
    """Two stores on the same places, against a model: what was committed last, until when."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.host = Host(Path(self.directory.name))
        self.stores = [self.host.store, self.host.another_store()]
        self.drafts: list[tuple[str, int, Draft]] = []
        self.committed: dict[str, tuple[int, bytes, float]] = {}
        self.steps = itertools.count(1)

    def teardown(self) -> None:
        for _, _, draft in self.drafts:
            self.host.store.abandon(draft)
        self.directory.cleanup()

    @rule(session=SESSIONS, size=SIZES, store=st.sampled_from((0, 1)))
    def begin(self, session: str, size: int, store: int) -> None:
        room = max(use.budget_bytes - use.bytes for use in self.host.store.usage())
        try:
            draft = self.stores[store].begin(session, "stage", size)
        except CapacityExceeded:
            assert room < size + 2 * BLOCK
        else:
            self.drafts.append((session, size, draft))

    @precondition(lambda self: self.drafts)
    @rule(data=st.data(), more=st.integers(-BLOCK, 2 * BLOCK), lasts_s=st.integers(0, 20))
    def commit(self, data: st.DataObject, more: int, lasts_s: int) -> None:
        session, reserved, draft = self.drafts.pop(
            data.draw(st.integers(0, len(self.drafts) - 1), label="draft")
        )
        step = next(self.steps)
        state = content(step, max(reserved + more, 0))
        expires_at_s = self.host.clock.now_s + lasts_s
        try:
            written = self.host.commit(draft, state, step=step, expires_at_s=expires_at_s)
        except CapacityExceeded:
            assert more > 0
        else:
            assert written == len(state)
            self.committed[session] = (step, state, expires_at_s)
        assert draft.closed

    @precondition(lambda self: self.drafts)
    @rule(data=st.data(), written=st.booleans())
    def abandon(self, data: st.DataObject, written: bool) -> None:
        _, reserved, draft = self.drafts.pop(
            data.draw(st.integers(0, len(self.drafts) - 1), label="draft")
        )
        if written:
            draft.path.write_bytes(bytes(reserved))
        self.host.store.abandon(draft)

    @rule(session=SESSIONS, store=st.sampled_from((0, 1)))
    def take(self, session: str, store: int) -> None:
        step, state, expires_at_s = self.committed.get(session, (0, b"", 0.0))
        try:
            taken = snapshot_process.take(self.stores[store], session)
        except SessionStateLost:
            assert expires_at_s <= self.host.clock.now_s
        else:
            with taken:
                assert (taken.step, taken.path.read_bytes()) == (step, state)
                assert expires_at_s > self.host.clock.now_s

    @rule(session=SESSIONS, store=st.sampled_from((0, 1)))
    def remove(self, session: str, store: int) -> None:
        self.stores[store].remove(session, "stage", next_order())
        self.committed.pop(session, None)

    @rule(passed_s=st.integers(1, 10))
    def time_passes(self, passed_s: int) -> None:
        self.host.clock.now_s += passed_s

    @rule(store=st.sampled_from((0, 1)))
    def sweep(self, store: int) -> None:
        self.stores[store].sweep(self.host.clock.now_s)
        there = [*self.committed.values()]
        unexpired = sum(expires_at_s > self.host.clock.now_s for _, _, expires_at_s in there)
        assert sum(use.snapshots for use in self.host.store.usage()) == unexpired

    @invariant()
    def in_budget(self) -> None:
        for use in self.host.store.usage():
            there = self.host.bytes_there(Path(use.path))
            assert there <= use.bytes <= use.budget_bytes

    @invariant()
    def there_are_no_other_drafts(self) -> None:
        uses = self.host.store.usage()
        assert sum(use.drafts for use in uses) == len(self.drafts)


Calls.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCalls = Calls.TestCase


def test_a_later_worker_learns_what_is_stored_of_its_stage(host: Host) -> None:
    orders = [SnapshotOrder(1, 1, 1), SnapshotOrder(1, 2, 1)]
    for order in orders:
        host.commit(host.store.begin("one", "stage", 5), b"state", order=order)
    host.park(session="two")
    host.park(session="three", stage="another")
    host.store.begin("four", "stage", 5)
    stored = host.store.stored("stage")
    assert [(each.session, each.owner) for each in stored] == [
        ("one", "gateway"),
        ("two", "gateway"),
    ]
    assert stored[0].order == orders[1]


def test_what_cannot_be_read_is_left_out_of_what_is_stored(host: Host) -> None:
    host.park(session="one")
    host.park(session="two")
    (path, *_) = [path for path in host.memory.iterdir() if path.name.endswith(".parked")]
    path.write_bytes(b"{}")
    assert len(host.store.stored("stage")) == 1
