"""Steps in a worker process: state, counter and answer move together, or none of them."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.synthetic_step import actions, checksum_after, checksum_of
from protocol.connectors import InlineDescriptor
from protocol.exit_status import ExitStatus
from protocol.messages import (
    RESET,
    Answer,
    Close,
    Output,
    RaiseFloor,
    Run,
    Signal,
    Stop,
    TurnEnded,
    TurnStatus,
)
from protocol.payloads import Payload
from tests.workers.process import Gateway, WorkerProcess

ENGINE = "loadtest.synthetic_step:SyntheticStep"
INPUTS = [[actions([number, 0.5])] for number in range(8)]
"""What each step gets, step 1 first."""


class Loop:
    """A gateway that steps one session and follows its checksum."""

    def __init__(self, gateway: Gateway, session: str = "s") -> None:
        self.gateway = gateway
        self.session = session
        self.turn = 0

    def begin(self, step: int, inputs: list[Payload] | None = None, **parameters: Any) -> int:
        """Start a step with its usual input; its turn."""
        self.turn += 1
        payloads = INPUTS[step - 1] if inputs is None else inputs
        descriptors = [InlineDescriptor(payload) for payload in payloads]
        fence = self.gateway.fence(self.session)
        self.gateway.send(
            Run(fence, self.turn, "default", parameters, list(descriptors), step=step)
        )
        return self.turn

    async def output(self, turn: int) -> Payload:
        """The turn's next piece of output."""
        report = await self.gateway.wanted(
            lambda r: isinstance(r, Output) and (r.session, r.turn) == (self.session, turn)
        )
        assert isinstance(report, Output)
        assert isinstance(report.payload, InlineDescriptor)
        return report.payload.payload

    async def ended(self, turn: int) -> TurnEnded:
        """The turn's last word."""
        report = await self.gateway.wanted(
            lambda r: isinstance(r, TurnEnded) and (r.session, r.turn) == (self.session, turn)
        )
        assert isinstance(report, TurnEnded)
        return report

    async def step(self, step: int, **parameters: Any) -> TurnEnded:
        """Carry a step out."""
        return await self.ended(self.begin(step, **parameters))

    async def state(self) -> tuple[int, str]:
        """How many steps the engine's state has come, and its checksum."""
        result = (await self.gateway.signal("state", self.session)).result
        return result["steps"], result["checksum"]

    async def reset(self, **arguments: Any) -> Answer:
        """Begin anew."""
        self.turn += 1
        command = f"reset-{self.turn}"
        fence = self.gateway.fence(self.session)
        self.gateway.send(Signal(fence, command, RESET, arguments))
        return await self.gateway.answer(command)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    options = {"state_bytes": 1_000_000, "pieces": 2, "work_bytes": 1000, "step_ms": 1}
    with (
        tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory,
        WorkerProcess(Path(directory), options, ENGINE) as worker,
    ):
        gateway = await Gateway(worker.endpoint).linked()
        await gateway.open()
        yield gateway
        for session in ("s", "t"):
            gateway.send(Close(gateway.fence(session), f"close-{session}", "client"))
            await gateway.answer(f"close-{session}")
        worker.process.terminate()
        status, log = await worker.ended()
        # The engine raises in its shutdown if a session is left.
        assert status == ExitStatus.OK, log
        gateway.link.close()


@pytest.fixture
def loop(gateway: Gateway) -> Loop:
    return Loop(gateway)


async def test_steps_move_state_counter_and_answer_together(loop: Loop) -> None:
    for number in (1, 2, 3):
        turn = loop.begin(number)
        pieces = [await loop.output(turn) for _ in range(2)]
        assert {checksum_of(piece) for piece in pieces} == {checksum_after(INPUTS[:number])}
        ended = await loop.ended(turn)
        assert (ended.status, ended.committed_step) == (TurnStatus.COMPLETED, number)
    assert await loop.state() == (3, checksum_after(INPUTS[:3]))


@pytest.mark.parametrize("how", ["fail", "fail_after_output"])
async def test_a_failed_step_leaves_state_and_counter_and_can_be_done_again(
    loop: Loop, how: str
) -> None:
    await loop.step(1)
    failed = await loop.step(2, **{how: True})
    assert (failed.status, failed.committed_step) == (TurnStatus.FAILED, 1)
    assert failed.error is not None
    assert failed.error.code == "engine_failed"
    assert await loop.state() == (1, checksum_after(INPUTS[:1]))
    assert (await loop.step(2)).committed_step == 2
    assert await loop.state() == (2, checksum_after(INPUTS[:2]))


@pytest.mark.parametrize("how", ["stall", "finish_when_cancelled"])
@pytest.mark.parametrize("by", ["stop", "floor"])
async def test_a_cancelled_step_is_not_committed_even_when_its_engine_ends_it(
    loop: Loop, how: str, by: str
) -> None:
    await loop.step(1)
    parameters: dict[str, Any] = {how: True}
    turn = loop.begin(2, **parameters)
    await loop.output(turn)
    fence = loop.gateway.fence()
    loop.gateway.send(Stop(fence, turn) if by == "stop" else RaiseFloor(fence, "default", 3))
    ended = await loop.ended(turn)
    assert (ended.status, ended.committed_step) == (TurnStatus.CANCELLED, 1)
    assert await loop.state() == (1, checksum_after(INPUTS[:1]))
    assert (await loop.step(2)).committed_step == 2
    assert await loop.state() == (2, checksum_after(INPUTS[:2]))


async def test_a_step_asked_for_again_is_answered_as_before_and_not_done_again(
    loop: Loop,
) -> None:
    await loop.step(1)
    await loop.step(2)
    # It is not read what the repetition brings: the first answer stands.
    turn = loop.begin(2, [actions([9, 9])])
    pieces = [await loop.output(turn) for _ in range(2)]
    assert {checksum_of(piece) for piece in pieces} == {checksum_after(INPUTS[:2])}
    ended = await loop.ended(turn)
    assert (ended.status, ended.committed_step) == (TurnStatus.COMPLETED, 2)
    assert await loop.state() == (2, checksum_after(INPUTS[:2]))


async def test_a_step_out_of_order_is_refused_with_the_committed_step(loop: Loop) -> None:
    await loop.step(1)
    ended = await loop.step(3)
    assert ended.error is not None
    assert (ended.error.code, ended.committed_step) == ("step_out_of_order", 1)


async def test_a_commit_that_fails_is_stated_and_only_a_reset_goes_on(loop: Loop) -> None:
    await loop.step(1)
    failed = await loop.step(2, fail_in_commit=True)
    assert failed.error is not None
    assert (failed.error.code, failed.committed_step) == ("session_state_lost", 1)
    again = await loop.step(2)
    assert again.error is not None
    assert again.error.code == "session_state_lost"
    answer = await loop.reset(seed=4)
    assert answer.result == {"committed_step": 0}
    assert (await loop.step(1)).committed_step == 1
    assert await loop.state() == (1, checksum_after(INPUTS[:1], seed=4))


async def test_a_reset_begins_from_what_it_says_and_a_refused_one_changes_nothing(
    loop: Loop,
) -> None:
    await loop.step(1)
    refused = await loop.reset(sed=1)
    assert refused.error is not None
    assert (refused.error.code, refused.error.field) == ("invalid_value", "sed")
    assert await loop.state() == (1, checksum_after(INPUTS[:1]))
    assert (await loop.reset(seed=1)).error is None
    assert await loop.state() == (0, checksum_after([], seed=1))
    assert (await loop.step(1)).committed_step == 1


async def test_a_reset_that_says_nothing_begins_as_the_session_was_opened(gateway: Gateway) -> None:
    await gateway.open("seeded", seed=7)
    loop = Loop(gateway, "seeded")
    await loop.step(1)
    assert (await loop.reset()).error is None
    assert await loop.state() == (0, checksum_after([], seed=7))


async def test_one_sessions_failures_leave_another_sessions_steps_alone(
    gateway: Gateway, loop: Loop
) -> None:
    await gateway.open("t", seed=7)
    other = Loop(gateway, "t")

    async def fail_and_stall() -> None:
        await loop.step(1, fail=True)
        turn = loop.begin(1, stall=True)
        await loop.output(turn)
        gateway.send(Stop(gateway.fence(), turn))
        await loop.ended(turn)
        await loop.step(1, fail_in_commit=True)

    async def go_on() -> None:
        for number in range(1, 9):
            assert (await other.step(number)).committed_step == number

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail_and_stall())
        tasks.create_task(go_on())
    assert await other.state() == (8, checksum_after(INPUTS, seed=7))


async def test_steps_sent_ahead_are_done_in_order(loop: Loop) -> None:
    turns = [loop.begin(number) for number in range(1, 6)]
    ends = [await loop.ended(turn) for turn in turns]
    assert [ended.committed_step for ended in ends] == [1, 2, 3, 4, 5]
    assert await loop.state() == (5, checksum_after(INPUTS[:5]))


async def test_what_goes_wrong_in_a_commit_is_for_the_log_only() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory,
        WorkerProcess(Path(directory), {}, ENGINE) as worker,
    ):
        gateway = await Gateway(worker.endpoint).linked()
        await gateway.open()
        ended = await Loop(gateway).step(1, fail_in_commit=True)
        assert ended.error is not None
        assert "on purpose" not in ended.error.message
        worker.process.terminate()
        _, log = await worker.ended()
        (line,) = [
            entry
            for entry in map(json.loads, log.splitlines())
            if entry["event"] == "engine_failed"
        ]
        assert {"session": "s", "turn": 1}.items() <= line.items()
        assert "on purpose" in line["exception"]
        gateway.link.close()
