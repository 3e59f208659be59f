"""A process that uses a snapshot store, for tests that kill it.

`python -m tests.workers.snapshot_process MODE PLACES...`, each place PATH=BUDGET_BYTES.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.errors import CapacityExceeded, Fenced, SessionStateLost
from protocol.messages import SnapshotOrder
from workers.snapshots import SnapshotPlace, SnapshotStore, Taken

DEPLOYMENT = "deployment"
ENGINE = "engine"
WEIGHTS = "weights"
NEVER_S = 1e12
REPLACED_BYTES = 6000
"""What `replace` writes."""

_FILE_CALLS = (
    *("open", "close", "mkdir", "scandir", "fstat", "statvfs", "write", "fsync", "ftruncate"),
    *("rename", "unlink"),
)
_REPORT_AFTER = 60


def write(path: Path, data: bytes) -> None:
    """As an engine does, in two parts."""
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    middle = len(data) // 2
    os.write(handle, data[:middle])
    os.write(handle, data[middle:])
    os.close(handle)


FIRST = SnapshotOrder(0, 0)


def next_order() -> SnapshotOrder:
    """One that is newer than all that any process of this machine has had."""
    return SnapshotOrder(1, time.monotonic_ns())


def commit(store: SnapshotStore, session: str, data: bytes, step: int | None) -> None:
    """A snapshot of `data`."""
    draft = store.begin(session, "stage", len(data))
    try:
        write(draft.path, data)
        store.commit(
            draft,
            owner="gateway",
            order=next_order(),
            weights=WEIGHTS,
            engine=ENGINE,
            step=step,
            expires_at_s=NEVER_S,
        )
    finally:
        store.abandon(draft)


def take(store: SnapshotStore, session: str, stage: str = "stage") -> Taken:
    """The snapshot of a session, whichever it is."""
    return store.take(
        session, stage, wanted=FIRST, taken=next_order(), engine=ENGINE, weights=WEIGHTS
    )


def content(step: int, size_bytes: int) -> bytes:
    """What tells a state of one step from that of another, and a half from the whole."""
    return random.Random(step).randbytes(size_bytes)


def replace(store: SnapshotStore) -> None:
    """Park the session with its second state."""
    commit(store, "session", content(2, REPLACED_BYTES), 2)


def remove(store: SnapshotStore) -> None:
    """Forget the session."""
    store.remove("session", "stage", next_order())


def _die_at(call: int) -> None:
    """Have this process killed instead of making its `call`-th call to the file system."""
    left = call

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return replacement

    for name in _FILE_CALLS:
        setattr(os, name, counted(getattr(os, name)))
    fcntl.flock = counted(fcntl.flock)


def _crash(store: SnapshotStore) -> None:
    """For each line "OPERATION CALL": do it in a process that dies at that call."""
    for line in sys.stdin:
        operation, call = line.split()
        child = os.fork()
        if child == 0:
            _die_at(int(call))
            {"replace": replace, "remove": remove}[operation](store)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("ended" if status == 0 else f"signal {os.WTERMSIG(status)}", flush=True)


def _share(store: SnapshotStore) -> None:
    """Park, take and forget sessions that others use too, until killed or standard input ends.

    Says "busy" when it has done so for a while, and what was wrong if anything was.
    """
    chance = random.Random(os.getpid())
    done = 0
    # Standard input can be read from when it has ended.
    while not select.select([sys.stdin], [], [], 0)[0]:
        session = f"session-{chance.randrange(3)}"
        with suppress(CapacityExceeded, Fenced):
            step = chance.randrange(1, 1 << 30)
            commit(store, session, content(step, chance.randrange(30_000)), step)
        with suppress(SessionStateLost, FileNotFoundError):
            if chance.random() < 0.7:
                with take(store, session) as taken:
                    assert taken.step is not None
                    data = taken.path.read_bytes()
                    assert data == content(taken.step, len(data)), "not what was committed"
        if chance.random() < 0.2:
            store.remove(session, "stage", next_order())
        for place in store.usage():
            assert place.bytes <= place.budget_bytes, "more than the budget"
        done += 1
        if done == _REPORT_AFTER:
            print("busy", flush=True)


def main() -> None:
    mode, *words = sys.argv[1:]
    places = []
    for word in words:
        path, _, budget = word.rpartition("=")
        places.append(SnapshotPlace(path, int(budget)))
    {"crash": _crash, "share": _share}[mode](SnapshotStore(places, DEPLOYMENT))


if __name__ == "__main__":
    main()
