"""Worlds that tests play in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from protocol.arrays import array_payload
from protocol.payloads import Payload, PayloadType
from workers.engine import Turn, TurnResult
from workers.engines.world import WorldEngine, WorldOptions
from workers.engines.world.session import WorldSession

SIZE = 16
ACTIONS = 5
"""Numbers of an action of a random world: four keys and an axis."""


@asynccontextmanager
async def loaded(**options: Any) -> AsyncIterator[WorldEngine]:
    """An engine with a random world."""
    engine = WorldEngine.create(
        WorldOptions(**{"random": 1, "block_frames": 2, "window_ms": 0, **options})
    )
    await engine.load()
    try:
        yield engine
    finally:
        await engine.shutdown()


def opened(engine: WorldEngine, **settings: Any) -> WorldSession:
    """A session of these settings."""
    session = engine.open("s", settings, lambda event, arguments: None)
    assert isinstance(session, WorldSession)
    return session


def forked(session: WorldSession, settings: dict[str, Any]) -> WorldSession:
    """A fork of it."""
    return session.fork("fork", settings, lambda event, arguments: None)


def keys(frames: int, seed: int = 0) -> list[list[float]]:
    """Actions for so many frames."""
    random = np.random.default_rng(seed)
    rows = random.integers(2, size=(frames, ACTIONS)).astype(float)
    rows[:, -1] = random.uniform(-1, 1, size=frames)
    return [[float(np.float32(number)) for number in row] for row in rows]


def actions(rows: Sequence[Any], **attributes: Any) -> Payload:
    """Rows as a payload."""
    return array_payload(PayloadType.ACTIONS, np.array(rows, np.float32), **attributes)


async def step(
    session: WorldSession,
    rows: Sequence[Any] = (),
    pieces: list[Payload] | None = None,
    **parameters: Any,
) -> TurnResult:
    """A step that nobody has committed yet; its output is added to `pieces`."""

    async def inputs() -> AsyncIterator[Payload]:
        if rows:
            yield actions(rows)

    parameters.setdefault("frames", max(1, len(rows)))
    emit = ([] if pieces is None else pieces).append
    number = session.step + 1
    return await session.run(Turn(number, "default", parameters, inputs(), emit, step=number))


async def play(session: WorldSession, rows: Sequence[Any], chunk: int = 1) -> list[bytes]:
    """The frames that rows of actions lead to, in committed steps of `chunk` frames."""
    pieces: list[Payload] = []
    for first in range(0, len(rows), chunk):
        result = await step(session, rows[first : first + chunk], pieces)
        assert result.commit is not None
        result.commit()
    return [bytes(piece.data) for piece in pieces]
