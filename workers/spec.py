"""What a worker process is told by its supervisor."""

from __future__ import annotations

from typing import Any

import msgspec

from workers.snapshots import SnapshotPlace


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker: its name (stage and replica), its engine with options, where it listens.

    `sessions` is how many its config allows at once. `budget` is what it may reserve of each
    device, in bytes, of which sessions leave the share `head_room`, and those of one tenant
    have `tenant_share` of what sessions can have. `cores` is what it may use of the processor,
    -1 what others leave of it; None: no session is refused for that. With `shares_memory` its
    "cpu" is a share of the machine that nobody has named, and grows with a model that needs
    more. `snapshots` is where sessions are parked, the first place that has room; nowhere:
    they are not.
    """

    name: str
    stage: str
    engine: str
    endpoint: str
    deployment: str
    options: dict[str, Any] = {}
    sessions: int = 8
    budget: dict[str, int] = {}
    head_room: float = 0.0
    tenant_share: float = 1.0
    cores: float | None = None
    shares_memory: bool = False
    snapshots: list[SnapshotPlace] = []


class WorkerStarted(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one line that a worker writes to its supervisor: it is ready, or why it never will be."""

    ready: bool
    error: str | None = None
