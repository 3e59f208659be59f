"""Step loops and sessions of one turn through the real host, link and worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import numpy as np
import pytest

from gateway.clients import HostedAttachment
from gateway.host import GatewayHost
from loadtest.synthetic_step import StepOptions, SyntheticStep, checksum_after, checksum_of
from loadtest.synthetic_voice import SyntheticThink, ThinkOptions
from protocol.arrays import array_payload
from protocol.errors import CapacityExceeded
from protocol.payloads import Payload, PayloadType, text_payload
from sessions.client import Role, SessionEnded
from sessions.oneshot.events import Piece, Request, RequestDone
from sessions.pipeline import Kind, Limits, Pipeline
from sessions.steps.events import Reset, Step, StepDone, StepFailed, WasReset
from tests.gateway.serving import WAIT_S, Client, served

Output = TypeVar("Output")


def world(**limits: int) -> Pipeline:
    return Pipeline(
        "game", ("world",), (), {"frames": "world"}, kind=Kind.WORLD, limits=Limits(**limits)
    )


@asynccontextmanager
async def playing(pipeline: Pipeline) -> AsyncIterator[GatewayHost]:
    async with served({pipeline.name: pipeline}, lambda _: SyntheticStep(StepOptions())) as it:
        yield it.host


def held(*keys: int) -> Payload:
    return array_payload(PayloadType.ACTIONS, np.array(keys, "<i4"))


async def nth(client: Client, kind: type[Output], number: int) -> Output:
    """The `number`th output of a type, from 1."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = [output for output in client.outputs if isinstance(output, kind)]
            if len(found) >= number:
                return found[number - 1]
            client.changed.clear()
            await client.changed.wait()


async def test_steps_are_answered_with_what_is_committed() -> None:
    async with playing(world()) as host:
        client = Client()
        player = await host.open(pipeline="game", tenant="local", on_output=client.on_output)
        actions = [held(1, 0), held(0, 1), held(1, 1)]
        for step, action in enumerate(actions, 1):
            player.send(Step(step, [action]))
            done = await nth(client, StepDone, step)
            assert (done.step, done.committed_step) == (step, step)
        (frame,) = done.outputs["frames"]
        assert checksum_of(frame) == checksum_after([[action] for action in actions])
        assert host.summary(player.session, "local").facts == {"committed_step": 3}


async def test_a_step_that_is_sent_again_by_another_connection_is_not_done_twice() -> None:
    async with playing(world()) as host:
        first = Client()
        player = await host.open(
            pipeline="game", tenant="local", secret="s1", on_output=first.on_output
        )
        player.send(Step(1, [held(7)]), "c1")
        await nth(first, StepDone, 1)
        player.detach()
        again = Client()
        player, attached = await host.attach(
            player.session,
            tenant="local",
            role=Role.CONTROLLER,
            secret="s1",
            cursor=None,
            on_output=again.on_output,
        )
        assert attached.snapshot.committed_step == 1
        player.send(Step(1, [held(7)]))
        repeated = await nth(again, StepDone, 1)
        assert repeated == await nth(first, StepDone, 1)
        player.send(Step(3, [held(7)]))
        refused = await nth(again, StepFailed, 1)
        assert (refused.error.code, refused.committed_step) == ("step_out_of_order", 1)


async def test_a_failed_step_leaves_state_and_counter_and_a_reset_begins_anew() -> None:
    async with playing(world()) as host:
        client = Client()
        player = await host.open(pipeline="game", tenant="local", on_output=client.on_output)
        player.send(Step(1, [held(1)]))
        await nth(client, StepDone, 1)
        player.send(Step(2, [held(2)], {"fail": True}))
        failed = await nth(client, StepFailed, 1)
        assert failed.committed_step == 1
        player.send(Step(2, [held(2)]))
        done = await nth(client, StepDone, 2)
        (frame,) = done.outputs["frames"]
        assert checksum_of(frame) == checksum_after([[held(1)], [held(2)]])
        player.send(Reset())
        await nth(client, WasReset, 1)
        player.send(Step(1, [held(1)]))
        await nth(client, StepDone, 3)


async def test_a_session_of_one_turn_ends_by_itself() -> None:
    pipeline = Pipeline(
        "once", ("think",), (), {"text": "think"}, kind=Kind.ONE_SHOT, limits=Limits(sessions=1)
    )
    think = SyntheticThink(ThinkOptions(clauses=2))
    async with served({"once": pipeline}, lambda _: think) as it:
        host = it.host
        for _ in range(3):
            client = Client()
            caller = await host.open(pipeline="once", tenant="local", on_output=client.on_output)
            caller.send(Request([text_payload("Hello.")]))
            await nth(client, RequestDone, 1)
            assert (await client.until(SessionEnded)).reason == "completed"
            pieces = [output for output in client.outputs if isinstance(output, Piece)]
            said = [bytes(piece.payload.data) for piece in pieces]
            assert [text[:26] for text in said] == [
                b"This is clause number 0 of",
                b"This is clause number 1 of",
            ]
            async with asyncio.timeout(WAIT_S):
                await host.drained()


async def test_players_that_vanish_make_room_for_others() -> None:
    async with playing(world(sessions=4, grace_ms=600_000)) as host:
        for _ in range(30):
            client = Client()
            player = await host.open(
                pipeline="game", tenant="local", secret="s", on_output=client.on_output
            )
            player.send(Step(1, [held(1)]))
            await nth(client, StepDone, 1)
            player.detach()
        assert len(host.sessions()) == 4
        assert all(health.ready for health in host.health())


async def left_alone(host: GatewayHost, tenant: str) -> HostedAttachment:
    """A session whose client was there and has gone."""
    attachment = await host.open(
        pipeline="game", tenant=tenant, secret="s", on_output=Client().on_output
    )
    attachment.detach()
    return attachment


async def test_a_tenant_has_no_more_sessions_than_one_may_have() -> None:
    async with playing(world(sessions=4, sessions_per_tenant=2, grace_ms=600_000)) as host:
        other = await left_alone(host, "other")
        watched = Client()
        held = await host.open(pipeline="game", tenant="greedy", on_output=watched.on_output)
        alone = await left_alone(host, "greedy")
        # Its own session that was left alone makes room for it, and another tenant's never.
        last = Client()
        await host.open(pipeline="game", tenant="greedy", on_output=last.on_output)
        assert alone.session not in {summary.id for summary in host.sessions()}
        with pytest.raises(CapacityExceeded, match="2 sessions of one tenant"):
            await left_alone(host, "greedy")
        assert {other.session, held.session} < {summary.id for summary in host.sessions()}
        await left_alone(host, "other")
        assert len(host.sessions()) == 4


async def test_a_tenant_that_opens_many_sessions_ends_none_of_who_has_fewer() -> None:
    async with playing(world(sessions=4, grace_ms=600_000)) as host:
        quiet = await left_alone(host, "quiet")
        for _ in range(12):
            await left_alone(host, "greedy")
        assert host.summary(quiet.session, "quiet").state == "detached"
        # Who has fewer gets what who has more left alone.
        await left_alone(host, "third")
        tenants = [session.tenant for session in host.sessions()]
        assert sorted(tenants) == ["greedy", "greedy", "quiet", "third"]
