"""What a session holds of its workers' output, over real arenas."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from gateway.placement import Replica
from gateway.transfers import Transfers
from gateway.wires import SessionWires
from protocol.edges import gateway_arena, worker_arena
from protocol.link_zmq import WorkerLink
from protocol.messages import Acknowledge, Close, Command, Fence, Open, Output, RaiseFloor, Run
from protocol.payloads import audio_payload
from protocol.shm_connector import ShmConnector
from sessions.actions import StageProduced
from sessions.lanes import DEFAULT_LANE, INPUT_LANE
from tests.sessions.harness import PCM_MS, voice_pipeline

SESSION = "sess_1"
FENCE = Fence(SESSION, 1, "gateway-1")
PIECE = audio_payload(PCM_MS * 200, 24_000)
WAIT_S = 10


@dataclass
class Voice:
    """A session bound to one worker, whose arena it reads, and the commands it was sent."""

    wires: SessionWires
    arena: ShmConnector
    commands: list[Command]

    def say(self, turn: int, pieces: int, lane: str = DEFAULT_LANE) -> asyncio.Task[None]:
        """The worker makes `pieces` of a turn; a task that ends when all are given back."""
        self.wires.send("speak", Run(FENCE, turn, lane, {}, []))
        flow = self.arena.open(SESSION, turn, {"speak->client": "gateway-1"}, 1 << 18)
        for sequence in range(1, pieces + 1):
            output = Output(SESSION, turn, sequence, self.arena.put(PIECE, flow))
            event = self.wires.received("speak", output)
            assert isinstance(event, StageProduced)
            assert event.payload is not None
            assert bytes(event.payload.data) == PIECE.data
        return asyncio.ensure_future(self.arena.drained(flow))


@pytest.fixture
async def voice(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Voice]:
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory:
        async with bound(f"ipc://{directory}/speak", monkeypatch) as voice:
            yield voice


@asynccontextmanager
async def bound(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Voice]:
    worker_path, gateway_path = worker_arena(endpoint), gateway_arena(endpoint, "gateway-1")
    assert worker_path is not None
    assert gateway_path is not None
    commands: list[Command] = []
    monkeypatch.setattr(WorkerLink, "send", lambda link, command: commands.append(command))
    arena = ShmConnector(worker_path, "worker-1")
    transfers = Transfers("gateway-1", [endpoint], lambda session, stage: None)
    name, _ = await asyncio.gather(transfers.attach(endpoint), arena.attach(gateway_path))
    link = WorkerLink(
        endpoint,
        "gateway-1",
        on_report=lambda report: None,
        on_up=lambda worker, info: None,
        on_down=lambda reason: None,
    )
    wires = SessionWires(FENCE, voice_pipeline(), transfers)
    wires.bind("speak", Replica("speak-0", "speak", link, consumer=name))
    wires.send("speak", Open(FENCE, "speak-1", {}))
    yield Voice(wires, arena, commands)
    link.close()
    transfers.close()
    arena.close()


async def given_back(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(WAIT_S):
        await task


async def test_what_was_acknowledged_is_given_back(voice: Voice) -> None:
    back = voice.say(1, pieces=3)
    voice.wires.send("speak", Acknowledge(FENCE, 1, 3))
    await given_back(back)


async def test_a_turn_below_the_floor_holds_nothing(voice: Voice) -> None:
    below, above = voice.say(1, pieces=3), voice.say(2, pieces=1)
    voice.wires.send("speak", RaiseFloor(FENCE, DEFAULT_LANE, 2))
    await given_back(below)
    assert not above.done()
    above.cancel()


async def test_a_turn_that_is_over_holds_nothing_although_its_worker_was_given_up(
    voice: Voice,
) -> None:
    # The session acknowledges nothing to a worker that it has lost.
    back = voice.say(1, pieces=3)
    voice.wires.give_up("speak")
    voice.wires.turn_over(1)
    await given_back(back)


async def test_what_was_being_heard_ends_with_its_worker(voice: Voice) -> None:
    back = voice.say(1, pieces=1, lane=INPUT_LANE)
    voice.wires.give_up("speak")
    await given_back(back)


async def test_a_session_that_is_released_holds_nothing(voice: Voice) -> None:
    back = voice.say(1, pieces=3)
    voice.wires.release()
    await given_back(back)


async def test_a_worker_that_was_given_up_is_told_so_once(voice: Voice) -> None:
    voice.wires.give_up("speak")
    voice.wires.release()
    assert [type(command) for command in voice.commands] == [Open, Close]


async def test_a_worker_that_was_told_of_the_end_is_not_told_again(voice: Voice) -> None:
    voice.wires.send("speak", Close(FENCE, "speak-2", "client"))
    voice.wires.release()
    assert [type(command) for command in voice.commands] == [Open, Close]
