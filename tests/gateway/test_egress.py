from __future__ import annotations

import asyncio

import pytest

from gateway.egress import Egress, EgressLimits, EgressOverflow

LIMITS = EgressLimits(low=10, high=50, limit=100)


class Client:
    """Takes frames only while its gate is open."""

    def __init__(self) -> None:
        self.frames: list[str | bytes] = []
        self.gate = asyncio.Event()
        self.taken = asyncio.Event()

    async def send(self, frame: str | bytes) -> None:
        await self.gate.wait()
        self.frames.append(frame)
        self.taken.set()


async def test_frames_leave_in_order_and_drain_ends_after_finish() -> None:
    egress = Egress(lambda blocked: None, LIMITS)
    client = Client()
    client.gate.set()
    egress.put("a")
    egress.put("b")
    egress.finish()
    egress.put("never")
    await egress.drain(client.send)
    assert client.frames == ["a", "b"]
    assert egress.queued_bytes == 0


async def test_frames_put_while_draining_are_sent() -> None:
    egress = Egress(lambda blocked: None, LIMITS)
    client = Client()
    client.gate.set()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(egress.drain(client.send))
        egress.put("a")
        await client.taken.wait()
        client.taken.clear()
        egress.put("b")
        await client.taken.wait()
        egress.finish()
    assert client.frames == ["a", "b"]


async def test_the_producer_is_paced_between_high_and_low() -> None:
    told: list[bool] = []
    egress = Egress(told.append, LIMITS)
    client = Client()
    for _ in range(3):
        egress.put("x" * 20)
    assert told == [True]
    egress.put("x" * 20)
    assert told == [True]
    room = asyncio.ensure_future(egress.room())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(egress.drain(client.send))
        await asyncio.sleep(0)
        assert not room.done()
        client.gate.set()
        await room
        egress.finish()
    assert told == [True, False]


async def test_a_client_that_never_reads_is_cut_off_and_not_fed_with_gaps() -> None:
    egress = Egress(lambda blocked: None, LIMITS)
    client = Client()
    for _ in range(5):
        egress.put("x" * 20)
    egress.put("x")
    client.gate.set()
    with pytest.raises(EgressOverflow):
        await egress.drain(client.send)
    assert client.frames == []
    await egress.room()


async def test_the_queue_never_holds_more_than_its_limit() -> None:
    egress = Egress(lambda blocked: None, LIMITS)
    for _ in range(1000):
        egress.put("x" * 7)
        assert egress.queued_bytes <= LIMITS.limit


async def test_a_frame_that_is_longer_than_the_limit_reaches_who_keeps_up() -> None:
    egress = Egress(lambda blocked: None, LIMITS)
    client = Client()
    client.gate.set()
    egress.put("x" * 40)
    egress.put("y" * 500)
    egress.finish()
    await egress.drain(client.send)
    assert [len(frame) for frame in client.frames] == [40, 500]
    behind = Egress(lambda blocked: None, LIMITS)
    behind.put("x" * 60)
    behind.put("y" * 500)
    with pytest.raises(EgressOverflow):
        await behind.drain(client.send)


async def test_a_client_that_stops_reading_in_the_middle_of_a_frame_is_cut_off() -> None:
    egress = Egress(lambda blocked: None, LIMITS)
    client = Client()
    egress.put("x" * 20)
    draining = asyncio.ensure_future(egress.drain(client.send))
    await asyncio.sleep(0)
    for _ in range(5):
        egress.put("x" * 20)
    with pytest.raises(EgressOverflow):
        await draining


async def test_a_cancelled_drain_stays_cancelled() -> None:
    egress = Egress(lambda blocked: None, LIMITS)
    draining = asyncio.ensure_future(egress.drain(Client().send))
    await asyncio.sleep(0)
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    egress.put("x" * 101)
