"""A turn's input: what is read is released, what is not is discarded, on every path."""

from __future__ import annotations

import asyncio

import pytest

from protocol.connector_errors import TransferTimeout
from protocol.connectors import Descriptor, InlineDescriptor
from protocol.payloads import Payload, text_payload
from workers.turns import TurnInputs

ONE, TWO = (InlineDescriptor(text_payload(text)) for text in ("one", "two"))


class Bench:
    """Turn input whose payloads come at once, never, or not at all."""

    def __init__(self) -> None:
        self.released: list[Descriptor] = []
        self.discarded: list[Descriptor] = []
        self.taken: list[int] = []
        self.asked = asyncio.Event()
        self.late: Descriptor | None = None
        self.inputs = TurnInputs(
            self.receive, self.released.append, self.discarded.append, self.taken.append
        )

    async def receive(self, descriptor: Descriptor) -> Payload:
        assert isinstance(descriptor, InlineDescriptor)
        if descriptor is self.late:
            self.asked.set()
            await asyncio.Event().wait()
        if descriptor.payload.data == b"":
            raise TransferTimeout("the payload did not arrive in time")
        return descriptor.payload


async def test_a_payload_is_released_when_the_next_is_asked_for() -> None:
    bench = Bench()
    bench.inputs.put(ONE, counted=False)
    bench.inputs.put(TWO, counted=True)
    bench.inputs.end()
    assert await anext(bench.inputs) == ONE.payload
    assert bench.released == []
    assert await anext(bench.inputs) == TWO.payload
    assert (bench.released, bench.taken) == ([ONE], [3])
    assert await anext(bench.inputs, None) is None
    assert (bench.released, bench.discarded) == ([ONE, TWO], [])


async def test_at_the_end_what_was_read_is_released_and_the_rest_discarded() -> None:
    bench = Bench()
    bench.inputs.put(ONE, counted=False)
    bench.inputs.put(TWO, counted=False)
    await anext(bench.inputs)
    bench.inputs.close()
    bench.inputs.close()
    assert (bench.released, bench.discarded) == ([ONE], [TWO])


async def test_a_reader_cancelled_while_a_payload_comes_leaves_it_to_be_discarded() -> None:
    bench = Bench()
    bench.late = ONE
    bench.inputs.put(ONE, counted=True)
    reading = asyncio.ensure_future(anext(bench.inputs))
    await bench.asked.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    bench.inputs.close()
    assert (bench.released, bench.discarded, bench.taken) == ([], [ONE], [])


async def test_a_payload_that_cannot_be_had_is_discarded_at_the_end() -> None:
    bench = Bench()
    lost = InlineDescriptor(text_payload(""))
    bench.inputs.put(lost, counted=True)
    with pytest.raises(TransferTimeout):
        await anext(bench.inputs)
    bench.inputs.close()
    assert (bench.released, bench.discarded) == ([], [lost])
