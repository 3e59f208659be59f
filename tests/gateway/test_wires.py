"""What a session holds of its workers' output, over real arenas."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gateway.placement import Replica
from gateway.transfers import Transfers
from gateway.wires import SessionWires
from protocol.connectors import Descriptor, InlineDescriptor, ShmDescriptor
from protocol.edges import ConnectorKind, gateway_arena, worker_arena
from protocol.errors import CapacityExceeded
from protocol.messages import (
    Acknowledge,
    Attach,
    Close,
    Command,
    Fence,
    Open,
    Output,
    RaiseFloor,
    Run,
    TurnEnded,
    TurnStatus,
)
from protocol.payloads import Payload, PayloadType, audio_payload
from protocol.shm_connector import ShmConnector, ShmFlow
from protocol.worker_link import WorkerLink
from sessions.actions import Event, Reported, StageLost, StageProduced
from sessions.lanes import DEFAULT_LANE, INPUT_LANE
from sessions.pipeline import Delivery, Kind
from tests.sessions.harness import PCM_MS, voice_pipeline
from tests.sessions.test_orchestrator import chain

SESSION = "sess_1"
FENCE = Fence(SESSION, 1, "gateway-1")
PIECE = audio_payload(PCM_MS * 200, 24_000)
IMAGE = Payload(PayloadType.OBSERVATION, bytes(range(256)) * 1024, "|u1", (256 * 1024,))
STATE = Payload(PayloadType.OBSERVATION, bytes(32), "<f4", (8,))
WAIT_S = 10


class Arena(ShmConnector):
    """A gateway's, with all flows that were opened in it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.flows: list[ShmFlow] = []

    def open(
        self, session: str, turn: int, consumers: Mapping[str, str], window_bytes: int
    ) -> ShmFlow:
        """As ever."""
        self.flows.append(super().open(session, turn, consumers, window_bytes))
        return self.flows[-1]


@dataclass
class Voice:
    """A session bound to one worker, whose arena it reads, and the commands it was sent."""

    wires: SessionWires
    arena: ShmConnector
    commands: list[Command]
    transfers: Transfers
    replica: Replica
    gateway_arena: Arena

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
    made: list[Arena] = []

    def make(*arguments: Any, **options: Any) -> Arena:
        made.append(Arena(*arguments, **options))
        return made[-1]

    monkeypatch.setattr("gateway.transfers.ShmConnector", make)
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
    replica = Replica("speak-0", "speak", link, consumer=name)
    wires.bind("speak", replica)
    wires.send("speak", Open(FENCE, "speak-1", {}))
    yield Voice(wires, arena, commands, transfers, replica, made[0])
    link.close()
    transfers.close()
    arena.close()


async def given_back(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(WAIT_S):
        await task


@pytest.fixture
async def stepping(voice: Voice) -> Voice:
    """The same, where clients' payloads go by arena with the command that they come with."""
    pipeline = replace(
        voice_pipeline(),
        kind=Kind.ROBOT,
        edges=(),
        connectors={"client->speak": ConnectorKind.SHM},
    )
    wires = SessionWires(FENCE, pipeline, voice.transfers)
    wires.bind("speak", voice.replica)
    wires.send("speak", Open(FENCE, "speak-1", {}))
    voice.commands.clear()
    return replace(voice, wires=wires)


def observed(voice: Voice, turn: int) -> list[Descriptor]:
    """Start a turn with something large and something small: how both travel."""
    inputs: list[Descriptor] = [InlineDescriptor(IMAGE), InlineDescriptor(STATE)]
    voice.wires.send("speak", Run(FENCE, turn, DEFAULT_LANE, {}, inputs))
    run = voice.commands[-1]
    assert isinstance(run, Run)
    return run.inputs


async def test_what_a_turn_begins_with_lies_in_the_arena_if_it_is_large(stepping: Voice) -> None:
    image, state = observed(stepping, 1)
    assert isinstance(image, ShmDescriptor)
    assert state == InlineDescriptor(STATE)
    assert bytes(stepping.arena.get(image).data) == IMAGE.data
    crossed = stepping.transfers.traffic()
    assert crossed["client->speak", "shm"].bytes == len(IMAGE.data)
    assert crossed["client->speak", "inline"].bytes == len(STATE.data)
    stepping.arena.release(image)
    await gateway_holds_nothing(stepping)


async def test_what_a_turn_began_with_goes_with_its_worker(stepping: Voice) -> None:
    observed(stepping, 1)
    stepping.wires.give_up("speak")
    await gateway_holds_nothing(stepping)


async def test_what_a_turn_began_with_goes_when_nobody_wants_it(stepping: Voice) -> None:
    observed(stepping, 1)
    stepping.wires.send("speak", RaiseFloor(FENCE, DEFAULT_LANE, 2))
    await gateway_holds_nothing(stepping)


async def test_where_the_arena_has_no_room_it_goes_inside_the_message(stepping: Voice) -> None:
    held: list[ShmDescriptor] = []
    while isinstance((image := observed(stepping, len(held) + 1)[0]), ShmDescriptor):
        held.append(image)
    assert held
    assert image == InlineDescriptor(IMAGE)


async def gateway_holds_nothing(voice: Voice) -> None:
    """Wait until the worker has given back all that this gateway has put."""
    async with asyncio.timeout(WAIT_S):
        assert voice.gateway_arena.flows
        for flow in voice.gateway_arena.flows:
            await voice.gateway_arena.drained(flow)


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


@dataclass
class Chain:
    """A session bound to talk, whose output decode reads. `refusing` takes no command."""

    wires: SessionWires
    replicas: dict[str, Replica]
    sent: list[tuple[str, Command]]
    refusing: str | None = None

    def run(self) -> list[Event]:
        """Begin a turn on talk."""
        readers = {"talk->decode": "decode"}
        return self.wires.send("talk", Run(FENCE, 1, DEFAULT_LANE, {}, [], readers=readers))

    def bound(self) -> list[str]:
        """The stages that have a worker."""
        return [stage for stage, at in self.replicas.items() if self.wires.bound_to(at)]


@pytest.fixture
async def codes_chain(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Chain]:
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory:
        endpoints = {stage: f"ipc://{directory}/{stage}" for stage in ("talk", "decode")}
        transfers = Transfers("gateway-1", list(endpoints.values()), lambda session, stage: None)
        wires = SessionWires(FENCE, chain(Delivery.CHUNK, ConnectorKind.SHM), transfers)
        bench = Chain(wires, {}, [])
        links: list[WorkerLink] = []

        def send(link: WorkerLink, command: Command) -> None:
            stage = link.endpoint.rpartition("/")[2]
            if stage == bench.refusing:
                raise CapacityExceeded("the queue to it is full")
            bench.sent.append((stage, command))

        monkeypatch.setattr(WorkerLink, "send", send)
        monkeypatch.setattr(WorkerLink, "start_afresh", lambda link: None)
        for stage, endpoint in endpoints.items():
            link = WorkerLink(
                endpoint,
                "gateway-1",
                on_report=lambda report: None,
                on_up=lambda worker, info: None,
                on_down=lambda reason: None,
            )
            links.append(link)
            bench.replicas[stage] = Replica(f"{stage}-0", stage, link, consumer=f"{stage}-1")
            wires.bind(stage, bench.replicas[stage])
            wires.send(stage, Open(FENCE, f"{stage}-1", {}))
        bench.sent.clear()
        yield bench
        for link in links:
            link.close()
        transfers.close()


def unread(events: Iterator[Event]) -> bool:
    """Whether the session is told that the turn has failed on talk, and nothing else."""
    (event,) = events
    assert isinstance(event, Reported)
    assert isinstance(event.report, TurnEnded)
    assert event.report.error is not None
    ended = event.report
    assert (event.stage, ended.turn, ended.status) == ("talk", 1, TurnStatus.FAILED)
    return ended.error is not None and ended.error.code == "engine_lost"


async def test_who_reads_a_turn_attaches_before_it_begins(codes_chain: Chain) -> None:
    assert codes_chain.run() == []
    (to_decode, attach), (to_talk, run) = codes_chain.sent
    assert (to_decode, to_talk) == ("decode", "talk")
    assert isinstance(attach, Attach)
    assert isinstance(run, Run)
    assert run.readers == {"talk->decode": "decode-1"}


async def test_a_reader_that_is_gone_ends_the_turn_and_unbinds_nobody(codes_chain: Chain) -> None:
    codes_chain.wires.give_up("decode")
    codes_chain.sent.clear()
    assert unread(iter(codes_chain.run()))
    assert codes_chain.sent == []
    assert codes_chain.bound() == ["talk"]


async def test_a_reader_that_cannot_be_told_is_the_one_that_is_unbound(codes_chain: Chain) -> None:
    codes_chain.refusing = "decode"
    lost, *others = codes_chain.run()
    assert lost == StageLost("decode")
    assert unread(iter(others))
    assert codes_chain.sent == []
    assert codes_chain.bound() == ["talk"]


async def test_a_reader_without_an_arena_ends_the_turn_and_unbinds_nobody(
    codes_chain: Chain,
) -> None:
    codes_chain.replicas["decode"].consumer = None
    assert unread(iter(codes_chain.run()))
    assert codes_chain.sent == []
    assert codes_chain.bound() == ["talk", "decode"]


async def test_a_worker_that_cannot_be_told_of_a_turn_is_unbound_alone(codes_chain: Chain) -> None:
    codes_chain.refusing = "talk"
    assert codes_chain.run() == [StageLost("talk")]
    assert codes_chain.bound() == ["decode"]
