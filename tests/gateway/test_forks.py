"""Sessions that begin as another one is, through the real host, link and worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.clients import HostedAttachment
from gateway.host import GatewayHost
from loadtest.synthetic_step import StepOptions, SyntheticStep, checksum_after, checksum_of
from protocol.errors import AntiphonError, CapacityExceeded, InvalidRequest, NotFound
from protocol.payloads import Payload
from sessions.pipeline import Pipeline
from sessions.steps.events import (
    Checkpoint,
    CheckpointKept,
    Rewind,
    Step,
    StepDone,
    WasRewound,
)
from tests.gateway.serving import Client, Served, served
from tests.gateway.test_step_sessions import held, nth, world
from tests.sessions.harness import voice_pipeline
from workers.snapshots import SnapshotPlace


class GatedStep(SyntheticStep):
    """Its steps wait at `gate` while that is closed; `begun` is set when one has come to it."""

    def __init__(self) -> None:
        super().__init__(StepOptions(state_bytes=100))
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()

    def admit(self, settings: dict[str, Any]) -> Any:
        """A loop whose steps wait at the gate."""
        loop = super().admit(settings)
        run = loop.run

        async def gated(turn: Any) -> Any:
            self.begun.set()
            await self.gate.wait()
            return await run(turn)

        loop.run = gated  # type: ignore[method-assign]
        return loop


@asynccontextmanager
async def playing(tmp_path: Path, pipeline: Pipeline | None = None) -> AsyncIterator[Served]:
    pipeline = pipeline or world()
    spec = {"snapshots": [SnapshotPlace(str(tmp_path), 1 << 20)]}
    async with served({pipeline.name: pipeline}, lambda _: GatedStep(), spec=spec) as it:
        yield it


class Player:
    """A client of a loop, and what its state has to know of."""

    def __init__(self, host: GatewayHost) -> None:
        self.host = host
        self.client = Client()
        self.inputs: list[list[Payload]] = []
        self.attachment: HostedAttachment

    @property
    def session(self) -> str:
        return self.attachment.session

    async def open(self, fork: Player | None = None, **options: Any) -> Player:
        """Have a session; as a fork it knows of what the other does now."""
        self.attachment = await self.host.open(
            pipeline="game",
            tenant="local",
            secret="s",
            on_output=self.client.on_output,
            fork=None if fork is None else fork.session,
            **options,
        )
        if fork is not None:
            self.inputs = list(fork.inputs)
        return self

    def ask(self, *keys: int) -> None:
        """Ask for the next step."""
        self.inputs.append([held(*keys)])
        self.attachment.send(Step(len(self.inputs), self.inputs[-1]))

    async def step(self, *keys: int, seed: int = 0) -> None:
        """Do the next step: its answer tells the whole state."""
        before = sum(isinstance(output, StepDone) for output in self.client.outputs)
        self.ask(*keys)
        done = await nth(self.client, StepDone, before + 1)
        assert done.step == len(self.inputs)
        (frame,) = done.outputs["frames"]
        assert checksum_of(frame) == checksum_after(self.inputs, seed)

    def facts(self) -> dict[str, Any]:
        return self.host.summary(self.session, "local").facts


async def test_a_fork_goes_on_from_where_the_other_is_and_neither_sees_the_other(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as it:
        first = await Player(it.host).open(settings_patch={"seed": 3})
        await first.step(1, seed=3)
        await first.step(2, seed=3)
        second = await Player(it.host).open(first)
        assert second.facts() == {"committed_step": 2}
        assert it.host.describe(second.session, "local").settings == {"seed": 3}
        third = await Player(it.host).open(second)
        for player, key in ((first, 7), (second, 8), (third, 9), (first, 1)):
            await player.step(key, seed=3)
        assert [p.facts()["committed_step"] for p in (first, second, third)] == [4, 3, 3]
        # Each ends by itself.
        first.attachment.close("client")
        await second.step(5, seed=3)


async def test_a_fork_waits_for_the_step_in_flight(tmp_path: Path) -> None:
    async with playing(tmp_path) as it:
        engine: GatedStep = it.engines["world"]
        first = await Player(it.host).open()
        await first.step(1)
        engine.gate.clear()
        engine.begun.clear()
        first.ask(2)
        await engine.begun.wait()
        forking = asyncio.create_task(Player(it.host).open(first))
        await asyncio.sleep(0)
        assert not forking.done()
        engine.gate.set()
        second = await forking
        assert second.facts() == {"committed_step": 2}
        await second.step(3)
        await nth(first.client, StepDone, 2)
        await first.step(4)


async def test_a_fork_of_a_parked_session_brings_it_back(tmp_path: Path) -> None:
    async with playing(tmp_path) as it:
        first = await Player(it.host).open()
        await first.step(1)
        await it.host.park_session(first.session)
        second = await Player(it.host).open(first)
        assert not it.host.summary(first.session, "local").parked
        await second.step(2)
        await first.step(3)
        # A fork is parked and comes back like any other.
        await it.host.park_session(second.session)
        await second.step(4)


async def test_checkpoints_are_each_ones_own(tmp_path: Path) -> None:
    async with playing(tmp_path) as it:
        first = await Player(it.host).open()
        await first.step(1)
        first.attachment.send(Checkpoint())
        await first.client.until(CheckpointKept)
        await first.step(2)
        second = await Player(it.host).open(first)
        second.attachment.send(Checkpoint())
        kept = await second.client.until(CheckpointKept)
        assert kept == CheckpointKept(2, [2])
        await it.host.park_session(first.session)
        first.attachment.send(Rewind(1))
        assert await first.client.until(WasRewound) == WasRewound(1)
        del first.inputs[1:]
        await first.step(5)
        await second.step(6)


async def test_a_fork_whose_source_ends_meanwhile_is_refused_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as it:
        engine: GatedStep = it.engines["world"]
        first = await Player(it.host).open()
        engine.gate.clear()
        engine.begun.clear()
        first.ask(1)
        await engine.begun.wait()
        forking = asyncio.create_task(Player(it.host).open(first))
        await asyncio.sleep(0)
        it.host.close_session(first.session)
        with pytest.raises(AntiphonError) as refused:
            await forking
        assert refused.value.code == "fork_source_lost"
        engine.gate.set()
        await it.emptied()
        assert engine.open_sessions == 0


async def test_a_fork_of_what_has_lost_its_state_is_refused(tmp_path: Path) -> None:
    async with playing(tmp_path) as it:
        first = await Player(it.host).open()
        await first.step(1)
        await it.replace("world")
        await it.ready()
        with pytest.raises(AntiphonError) as refused:
            await Player(it.host).open(first)
        assert refused.value.code == "fork_source_lost"
        assert len(it.host.sessions()) == 1


async def test_a_fork_takes_a_place_and_never_that_of_its_source(tmp_path: Path) -> None:
    async with playing(tmp_path, world(sessions=1)) as it:
        first = await Player(it.host).open()
        await first.step(1)
        first.attachment.detach()
        # Any other open would have this one's place, which nobody is at.
        with pytest.raises(CapacityExceeded):
            await Player(it.host).open(first)
        assert [summary.id for summary in it.host.sessions()] == [first.session]
        await Player(it.host).open()
        assert first.session not in [summary.id for summary in it.host.sessions()]


@pytest.mark.parametrize("when", ["at once", "while it waits"])
async def test_a_fork_that_is_given_up_leaves_nothing(tmp_path: Path, when: str) -> None:
    async with playing(tmp_path) as it:
        engine: GatedStep = it.engines["world"]
        first = await Player(it.host).open()
        if when == "while it waits":
            engine.gate.clear()
            engine.begun.clear()
            first.ask(1)
            await engine.begun.wait()
        forking = asyncio.create_task(Player(it.host).open(first))
        await asyncio.sleep(0)
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
        engine.gate.set()
        first.attachment.close("client")
        await it.emptied()
        assert engine.open_sessions == 0
        assert not it.host._hosted.forks


async def test_what_cannot_be_forked_is_refused_by_its_field(tmp_path: Path) -> None:
    async with served({"voice": voice_pipeline()}) as it:
        client = Client()
        talk = await it.host.open(pipeline="voice", tenant="local", on_output=client.on_output)
        with pytest.raises(InvalidRequest) as refused:
            await it.host.open(pipeline="voice", tenant="local", fork=talk.session)
        assert (refused.value.field, refused.value.code) == ("fork.session", "unsupported")
    async with playing(tmp_path) as it:
        first = await Player(it.host).open()
        with pytest.raises(NotFound):
            await it.host.open(pipeline="game", tenant="another", fork=first.session)
        with pytest.raises(NotFound):
            await it.host.open(pipeline="game", tenant="local", fork="sess_none")
        with pytest.raises(AntiphonError) as bad:
            await Player(it.host).open(first, settings_patch={"seed": "three"})
        assert bad.value.field == "seed"
        assert len(it.host.sessions()) == 1
