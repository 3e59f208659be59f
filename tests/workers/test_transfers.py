"""A worker's output on its way: to readers that do not come, that go, that do not read."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.arena import ArenaLimits
from protocol.connectors import ShmDescriptor
from protocol.edges import ConnectorKind, OutputEdge, worker_arena
from protocol.errors import AntiphonError, EngineLost
from protocol.messages import Output, TurnEnded, TurnStatus
from protocol.payloads import text_payload
from protocol.shm_connector import ShmConnector
from workers.control_events import SendOutput
from workers.transfers import Transfers

GATEWAY, READER = "gateway-1", "speak-1"
EDGE = OutputEdge("think->client", ConnectorKind.SHM, 4096)
PIECE = text_payload("x" * 3000)
DONE = TurnEnded("s", 1, TurnStatus.COMPLETED)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as name:
        yield Path(name)


class Bench:
    """One worker's transfers; what it reports, and which turns it gives up."""

    def __init__(self, directory: Path) -> None:
        self.reports: asyncio.Queue[Output | TurnEnded] = asyncio.Queue()
        self.failures: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        endpoint = f"ipc://{directory}/think.sock"
        self.arena = worker_arena(endpoint) or ""
        self.reader = ShmConnector(str(directory / "reader.arena"), READER)
        self.transfers = Transfers(
            endpoint,
            "think-1",
            send=lambda _, report: self.reports.put_nowait(report),
            on_failed=self.failed,
            on_input=lambda _: None,
        )
        self.transfers.opened("s", GATEWAY, EDGE)

    def failed(self, session: str, turn: int, error: AntiphonError) -> None:
        assert session == "s"
        self.failures.put_nowait((turn, error.code))

    def put(self, turn: int, sequence: int) -> None:
        self.transfers.put(SendOutput(GATEWAY, "s", turn, sequence, PIECE))

    async def descriptor(self) -> ShmDescriptor:
        report = await self.reports.get()
        assert isinstance(report, Output)
        assert isinstance(report.payload, ShmDescriptor)
        return report.payload


@pytest.fixture
async def bench(directory: Path) -> AsyncIterator[Bench]:
    bench = Bench(directory)
    for turn in (1, 2):
        bench.transfers.begin("s", turn, {"think->speak": READER}, to_client=False)
    yield bench
    bench.reader.close()
    await bench.transfers.close()


async def test_a_turn_whose_reader_never_comes_fails_although_its_engine_is_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.transfers.ATTACH_S", 0.01)
    bench.put(1, 1)
    assert bench.transfers.end(GATEWAY, DONE)
    ended = await bench.reports.get()
    assert isinstance(ended, TurnEnded)
    assert (ended.status, ended.error and ended.error.code) == (TurnStatus.FAILED, "engine_lost")
    assert ended.error is not None
    assert "speak-1 did not attach in time" in ended.error.message
    assert not bench.transfers.end(GATEWAY, DONE)
    assert bench.failures.empty()


async def test_a_turn_whose_reader_goes_fails_whether_its_output_waits_or_not(
    bench: Bench,
) -> None:
    await bench.reader.attach(bench.arena)
    for sequence in (1, 2):
        bench.put(1, sequence)
    bench.put(2, 1)
    for _ in range(2):
        await bench.descriptor()
    bench.reader.close()
    assert await bench.failures.get() == (1, "engine_lost")
    bench.put(2, 2)
    assert await bench.failures.get() == (2, "engine_lost")


async def test_an_ended_turn_whose_reader_goes_fails(bench: Bench) -> None:
    await bench.reader.attach(bench.arena)
    for sequence in (1, 2):
        bench.put(1, sequence)
    assert bench.transfers.end(GATEWAY, DONE)
    await bench.descriptor()
    bench.reader.close()
    ended = await bench.reports.get()
    assert isinstance(ended, TurnEnded)
    assert (ended.status, ended.error and ended.error.code) == (TurnStatus.FAILED, "engine_lost")


@pytest.mark.parametrize("how", ["void", "freed"])
async def test_what_nobody_read_of_an_ended_turn_is_taken_back(bench: Bench, how: str) -> None:
    await bench.reader.attach(bench.arena)
    bench.put(1, 1)
    await bench.descriptor()
    flow = bench.transfers._streams["s", 1].flow
    assert not bench.transfers.end(GATEWAY, DONE)
    if how == "void":
        bench.transfers.void("s", 1)
    else:
        bench.transfers.freed("s")
    assert flow is not None
    assert bench.transfers._shm is not None
    await bench.transfers._shm.drained(flow)
    assert bench.transfers._shm.health().used_bytes == 0


async def test_output_that_fits_goes_at_once_and_its_end_behind_it(bench: Bench) -> None:
    await bench.reader.attach(bench.arena)
    bench.put(1, 1)
    bench.put(1, 2)
    assert bench.transfers.end(GATEWAY, DONE)
    first = await bench.descriptor()
    bench.reader.get(first)
    assert bench.reports.empty()
    bench.reader.release(first)
    second = await bench.descriptor()
    assert bench.reader.get(second).data == PIECE.data
    assert await bench.reports.get() == DONE


async def test_a_turn_that_finds_no_room_in_the_arena_fails_for_want_of_capacity(
    bench: Bench,
) -> None:
    await bench.reader.attach(bench.arena)
    whole = OutputEdge("think->client", ConnectorKind.SHM, ArenaLimits().session_cap_bytes)
    bench.transfers.opened("s", GATEWAY, whole)
    bench.put(1, 1)
    await bench.descriptor()
    bench.put(2, 1)
    assert await bench.failures.get() == (2, "capacity_exceeded")


@pytest.mark.parametrize("fault", ["lost", "never attached", "void", "taken back"])
async def test_what_cannot_be_read_of_another_worker_is_lost_with_it(
    bench: Bench, directory: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.transfers.ATTACH_S", 0.01)
    producer = ShmConnector(str(directory / "listen.arena"), "listen-1")
    bench.transfers.read_from(producer.path)
    await producer.consumer("think-1")
    await asyncio.gather(*bench.transfers._attaching.values())
    flow = producer.open("s", 1, {"listen->think": "think-1"}, 4096)
    descriptor = producer.put(PIECE, flow)
    assert isinstance(descriptor, ShmDescriptor)
    assert bench.transfers._shm is not None
    match fault:
        case "lost":
            bench.transfers._shm.attachments[0].close()
        case "never attached":
            descriptor = replace(descriptor, arena=descriptor.arena + 1)
        case "void":
            bench.transfers.void("s", 1)
        case "taken back":
            descriptor = replace(descriptor, generation=descriptor.generation + 1)
    with pytest.raises(EngineLost, match="on its way to another process was lost: "):
        await bench.transfers.receive(descriptor)
    producer.close()


async def test_an_end_that_waits_behind_unread_output_is_said_when_the_turn_is_voided(
    bench: Bench,
) -> None:
    await bench.reader.attach(bench.arena)
    for sequence in (1, 2):
        bench.put(1, sequence)
    assert bench.transfers.end(GATEWAY, DONE)
    await bench.descriptor()
    bench.transfers.void("s", 1)
    assert bench.reports.get_nowait() == DONE
    assert bench.reports.empty()


async def test_producers_that_came_and_went_leave_nothing(bench: Bench, directory: Path) -> None:
    shm = bench.transfers._shm
    assert shm is not None
    gone: asyncio.Queue[str] = asyncio.Queue()
    shm._on_lost = gone.put_nowait
    for number in range(3):
        producer = ShmConnector(str(directory / f"gateway-{number}.arena"), f"gateway-{number}")
        bench.transfers.read_from(producer.path)
        await asyncio.gather(*bench.transfers._attaching.values())
        assert list(bench.transfers._paths.values()) == [f"gateway-{number}"]
        producer.close()
        async with asyncio.timeout(10):
            assert await gone.get() == f"gateway-{number}"
