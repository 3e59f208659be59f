"""What every connector promises, shown with real processes at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from typing import Any

import pytest

from protocol.connector_errors import (
    NoCredit,
    PayloadClaimed,
    PeerLost,
    TurnVoid,
)
from protocol.connectors import Descriptor
from protocol.payloads import PayloadType, text_payload
from tests.protocol.connectors.ends import WINDOW_BYTES, Ends, descriptor_of, wire
from tests.protocol.connectors.far_end import content_of, payload_of

SIZES = [0, 1, 63, 64, 65, 4096, 1 << 20, (1 << 20) + 1, 3 << 20, 6 << 20]


def checksum(size: int, seed: int) -> int:
    return zlib.crc32(content_of(size, seed).data)


def fill(ends: Ends, flow: Any, size: int) -> list[Descriptor]:
    """Put payloads of `size` bytes, with seeds from 0, until there is no room."""
    made: list[Descriptor] = []
    with contextlib.suppress(NoCredit):
        while len(made) < 1000:
            made.append(ends.near.put(payload_of(size, len(made)), flow))
    return made


async def test_every_size_arrives_at_a_far_consumer(ends: Ends) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    for size in SIZES:
        descriptor = await ends.near.put_when_ready(payload_of(size, 5), flow, 10.0)
        assert await far.call("consume", wire(descriptor)) == checksum(size, 5)
    await ends.near.drained(flow)


async def test_every_size_arrives_from_a_far_producer(ends: Ends) -> None:
    far = await ends.add("far")
    await far.call("open", 1, {"edge": "near"}, WINDOW_BYTES)
    for size in SIZES:
        descriptor = descriptor_of(await far.call("put_when_ready", 1, size, 6))
        payload = await ends.near.receive(descriptor, 10.0)
        assert zlib.crc32(payload.data) == checksum(size, 6)
        assert (payload.type, payload.shape) == (PayloadType.FRAMES, (size,))
        assert payload.attributes == {"seed": 6}
        ends.near.release(descriptor)


async def test_256_megabytes_arrive(ends: Ends) -> None:
    far = await ends.add("far")
    size = 256 << 20
    flow = ends.flow(1, far)
    descriptor = ends.near.put(payload_of(size, 7), flow)
    assert await far.call("consume", wire(descriptor)) == checksum(size, 7)
    await ends.near.drained(flow)


async def test_text_arrives_as_bytes_that_outlive_the_release(ends: Ends) -> None:
    far = await ends.add("far")
    descriptor = ends.near.put(text_payload("naïve", clause=3), ends.flow(1, far))
    assert await far.call("consume", wire(descriptor)) == zlib.crc32("naïve".encode())


async def test_payloads_arrive_in_order(ends: Ends) -> None:
    far = await ends.add("far")
    await far.call("open", 1, {"edge": "near"}, WINDOW_BYTES)
    seeds = []
    for seed in range(200):
        descriptor = await far.put(1, 100 * seed, seed)
        payload = await ends.near.receive(descriptor, 10.0)
        seeds.append(payload.attributes["seed"])
        assert zlib.crc32(payload.data) == checksum(100 * seed, seed)
        ends.near.release(descriptor)
    assert seeds == list(range(200))


async def test_several_consumers_read_one_payload(ends: Ends) -> None:
    first, second = await ends.add("first"), await ends.add("second")
    flow = ends.flow(1, first, second)
    for seed in range(20):
        descriptor = wire(await ends.near.put_when_ready(payload_of(200_000, seed), flow, 10.0))
        assert await first.call("consume", descriptor) == checksum(200_000, seed)
        assert await second.call("consume", descriptor) == checksum(200_000, seed)
    await ends.near.drained(flow)


async def test_getting_twice_gives_the_same_and_releasing_twice_is_as_once(ends: Ends) -> None:
    far = await ends.add("far")
    await far.call("open", 1, {"edge": "near"}, WINDOW_BYTES)
    descriptor = await far.put(1, 1000, 1)
    assert ends.near.get(descriptor) is ends.near.get(descriptor)
    ends.near.release(descriptor)
    ends.near.release(descriptor)
    again = await far.put(1, 1000, 2)
    assert zlib.crc32(ends.near.get(again).data) == checksum(1000, 2)
    ends.near.release(again)


async def test_a_payload_is_not_replaced_while_it_is_claimed(ends: Ends) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    descriptor = ends.near.put(payload_of(1000, 1), flow)
    with pytest.raises(PayloadClaimed):
        ends.near.replace(descriptor, payload_of(1000, 2))
    assert await far.call("consume", wire(descriptor)) == checksum(1000, 1)


async def test_nothing_is_put_after_the_end_of_a_turn(ends: Ends) -> None:
    far = await ends.add("far")
    closed, void = ends.flow(1, far), ends.flow(2, far)
    ends.near.close_flow(closed)
    ends.near.void("s", 2)
    for flow in (closed, void):
        with pytest.raises(TurnVoid):
            ends.near.put(payload_of(10, 1), flow)


async def test_traffic_is_counted_by_edge(ends: Ends) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    for seed in range(3):
        await far.call("consume", wire(ends.near.put(payload_of(1000, seed), flow)))
    put = ends.near.health().put["to-far"]
    assert (put.payloads, put.bytes) == (3, 3000)
    if ends.kind == "shm":
        health = await far.call("health")
        assert health["got"] == {"to-far": {"payloads": 3, "bytes": 3000}}


async def test_a_consumer_that_gives_back_unread_is_as_good_as_one_that_read(ends: Ends) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    for seed in range(20):
        descriptor = await ends.near.put_when_ready(payload_of(200_000, seed), flow, 10.0)
        await far.call("discard", wire(descriptor))
    await ends.near.drained(flow)


# The death of either end


async def test_the_death_of_an_idle_peer_is_known_at_once(ends: Ends) -> None:
    far = await ends.add("far")
    await far.kill()
    async with asyncio.timeout(5.0):
        await ends.one_lost(far)


@pytest.mark.parametrize("phase", ["put", "taken", "released"])
@pytest.mark.parametrize("size", [100_000, 6 << 20])
async def test_a_consumer_killed_at_any_phase_leaves_nothing(
    ends: Ends, phase: str, size: int
) -> None:
    far, other = await ends.add("far"), await ends.add("other")
    flow = ends.flow(1, far)
    descriptor = wire(ends.near.put(payload_of(size, 1), flow))
    if phase == "taken":
        await far.call("receive", descriptor)
    elif phase == "released":
        await far.call("consume", descriptor)
    await far.kill()
    await ends.one_lost(far)
    if ends.kind == "shm":
        assert ends.near.health().slots == 0
        with pytest.raises(PeerLost):
            ends.near.put(payload_of(10, 1), flow)
    # The other one goes on as if nothing had been.
    flow = ends.flow(2, other)
    descriptor = wire(ends.near.put(payload_of(100_000, 2), flow))
    assert await other.call("consume", descriptor) == checksum(100_000, 2)


@pytest.mark.parametrize("phase", ["put", "taken", "released"])
@pytest.mark.parametrize("size", [100_000, 6 << 20])
async def test_a_producer_killed_at_any_phase(ends: Ends, phase: str, size: int) -> None:
    far = await ends.add("far")
    await far.call("open", 1, {"edge": "near"}, WINDOW_BYTES)
    descriptor = await far.put(1, size, 3)
    payload = None
    if phase != "put":
        payload = await ends.near.receive(descriptor, 10.0)
    if phase == "released":
        ends.near.release(descriptor)
    await far.kill()
    await ends.one_lost(far)
    if phase == "taken":
        assert payload is not None
        assert zlib.crc32(payload.data) == checksum(size, 3)
    elif phase == "put" and ends.kind == "shm":
        with pytest.raises(PeerLost):
            ends.near.get(descriptor)
    ends.near.release(descriptor)
    assert ends.near.health().held == 0


# Readers that do not read


async def test_a_stopped_reader_keeps_what_it_holds_and_stops_only_itself(ends: Ends) -> None:
    far, other = await ends.add("far"), await ends.add("other")
    flow = ends.flow(1, far)
    held = wire(ends.near.put(payload_of(100_000, 1), flow))
    await far.call("keep", held, 1)
    far.stop()
    if ends.kind == "shm":
        assert len(fill(ends, flow, 100_000)) == 9
    for seed in range(50):
        beside = ends.flow(100 + seed, other)
        descriptor = wire(ends.near.put(payload_of(400_000, seed), beside))
        assert await other.call("consume", descriptor) == checksum(400_000, seed)
        ends.near.close_flow(beside)
    far.go_on()
    assert await far.call("read_kept", 1) == checksum(100_000, 1)
