"""The synthetic steps' state is parked and restored exactly, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loadtest.synthetic_step import StepOptions, SyntheticStep, actions, checksum_after
from protocol.device_bytes import HOST
from protocol.errors import CapacityExceeded, InvalidRequest, SessionStateLost
from protocol.payloads import Payload
from workers.engine import EngineSession, ParkableSession, Turn

INPUTS = [[actions([number, 0.5])] for number in range(6)]
"""What each step gets, step 1 first."""


def engine_of(state_bytes: int = 1_000_003, sessions: int = 2) -> SyntheticStep:
    return SyntheticStep.create(StepOptions(state_bytes=state_bytes, sessions=sessions))


def opened(engine: SyntheticStep) -> ParkableSession:
    session = engine.open("s", {"seed": 7}, lambda event, arguments: None)
    assert isinstance(session, ParkableSession)
    return session


async def restored(engine: SyntheticStep, path: Path) -> EngineSession:
    return await engine.restore("s", {"seed": 7}, lambda event, arguments: None, path)


async def step(session: EngineSession, number: int) -> None:
    async def inputs() -> AsyncIterator[Payload]:
        for payload in INPUTS[number - 1]:
            yield payload

    turn = Turn(number, "default", {}, inputs(), lambda piece: None, step=number)
    commit = (await session.run(turn)).commit
    assert commit is not None
    commit()


def expected(steps: int) -> dict[str, object]:
    return {"steps": steps, "checksum": checksum_after(INPUTS[:steps], seed=7)}


@pytest.mark.parametrize("state_bytes", [0, 1, 64, 1_000_003])
@pytest.mark.parametrize("steps", [0, 3])
async def test_steps_go_on_from_the_parked_state(
    tmp_path: Path, state_bytes: int, steps: int
) -> None:
    engine = engine_of(state_bytes)
    session = opened(engine)
    for number in range(1, steps + 1):
        await step(session, number)
    path = tmp_path / "parked"
    await session.snapshot(path)
    session.close()
    # In another process of the same options.
    other = engine_of(state_bytes)
    assert other.weights() == engine.weights() != ""
    session_again = await restored(other, path)
    path.unlink()
    assert session_again.measure() == {HOST: state_bytes}
    assert session_again.signal("state", {}) == expected(steps)
    for number in range(steps + 1, steps + 4):
        await step(session_again, number)
    assert session_again.signal("state", {}) == expected(steps + 3)
    # A reset still knows where it began.
    session_again.signal("reset", {})
    assert session_again.signal("state", {}) == expected(0)
    session_again.close()
    await engine.shutdown()
    await other.shutdown()


def test_a_snapshot_fits_states_of_its_size_only() -> None:
    assert engine_of(64).weights() != engine_of(65).weights()


async def test_a_file_that_is_not_whole_is_a_lost_state_and_takes_no_place(tmp_path: Path) -> None:
    engine = engine_of(64)
    session = opened(engine)
    await step(session, 1)
    path = tmp_path / "parked"
    await session.snapshot(path)
    whole = path.read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for content in [*damaged, whole[:-1], whole + b"x", b""]:
        path.write_bytes(content)
        with pytest.raises(SessionStateLost):
            await restored(engine, path)
    with pytest.raises(SessionStateLost):
        await restored(engine, tmp_path / "none")
    session.close()
    assert engine.open_sessions == 0


async def test_a_restore_is_refused_as_an_open_is(tmp_path: Path) -> None:
    engine = engine_of(64, sessions=1)
    session = opened(engine)
    path = tmp_path / "parked"
    await session.snapshot(path)
    with pytest.raises(CapacityExceeded):
        await restored(engine, path)
    session.close()
    with pytest.raises(InvalidRequest) as refused:
        await engine.restore("s", {"sed": 7}, lambda event, arguments: None, path)
    assert refused.value.field == "sed"
    assert engine.open_sessions == 0


async def test_a_snapshot_that_fails_touches_neither_state_nor_other_files(tmp_path: Path) -> None:
    engine = engine_of()
    session = opened(engine)
    await step(session, 1)
    path = tmp_path / "parked"
    path.write_text("somebody else's")
    with pytest.raises(FileExistsError):
        await session.snapshot(path)
    assert path.read_text() == "somebody else's"
    await step(session, 2)
    assert session.signal("state", {}) == expected(2)
    session.close()


async def test_both_may_be_cancelled_at_any_point(tmp_path: Path) -> None:
    engine = engine_of()
    session = opened(engine)
    await step(session, 1)
    path = tmp_path / "parked"
    for passes in range(4):
        task = asyncio.ensure_future(session.snapshot(path))
        for _ in range(passes):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert path.exists() != task.cancelled()
        path.unlink(missing_ok=True)
    await session.snapshot(path)
    for passes in range(4):
        restoring = asyncio.ensure_future(restored(engine, path))
        for _ in range(passes):
            await asyncio.sleep(0)
        restoring.cancel()
        await asyncio.wait([restoring])
        if not restoring.cancelled():
            restoring.result().close()
        assert engine.open_sessions == 1
    await step(session, 2)
    assert session.signal("state", {}) == expected(2)
    session.close()
