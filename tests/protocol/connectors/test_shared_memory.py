"""What only shared memory promises: views, credits, and no trust in descriptors."""

from __future__ import annotations

import asyncio

import pytest

from protocol.connector_errors import (
    PeerLost,
)
from tests.protocol.connectors.ends import LIMITS, WINDOW_BYTES, Ends, wire
from tests.protocol.connectors.far_end import payload_of
from tests.protocol.connectors.test_conformance import checksum, fill


@pytest.fixture
def kind() -> str:
    """Shared memory alone."""
    return "shm"


async def test_a_consumer_killed_while_its_producer_waits_for_it(ends: Ends) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    fill(ends, flow, 100_000)
    waiting = asyncio.create_task(ends.near.put_when_ready(payload_of(100_000, 1), flow, 30.0))
    await asyncio.sleep(0)
    await far.kill()
    with pytest.raises(PeerLost):
        await waiting
    assert ends.near.health().reserved_bytes == 0


async def test_ten_times_the_arena_against_a_stalled_consumer(ends: Ends) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    size, total = 100_000, 10 * LIMITS["size_bytes"] // 100_000
    far.stop()
    made = fill(ends, flow, size)
    assert len(made) == WINDOW_BYTES // 100_096 == 10
    more = asyncio.Event()

    async def produce() -> None:
        for seed in range(len(made), total):
            made.append(await ends.near.put_when_ready(payload_of(size, seed), flow))
            more.set()

    producing = asyncio.create_task(produce())
    await asyncio.sleep(0)
    assert (len(made), ends.near.health().waiting) == (10, 1)
    far.go_on()
    for seed in range(total):
        while len(made) <= seed:
            more.clear()
            await more.wait()
        assert await far.call("consume", wire(made[seed])) == checksum(size, seed)
        assert ends.near.health().used_bytes <= WINDOW_BYTES
    await producing
    assert total * size > 9.9 * LIMITS["size_bytes"]
    await ends.near.drained(flow)
