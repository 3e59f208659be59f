"""The client's worlds, against a gateway with a random world, over networks that break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from antiphon_client import (
    ControlLost,
    Gateway,
    NotReachable,
    Refused,
    ServerFailed,
    SessionEnded,
    SteppedWorld,
    World,
)
from gateway.surfaces.worlds.stepping import Stepper
from sessions.steps.events import Step
from tests.gateway.worlds.player import controlled, serving_worlds
from tests.gateway.worlds.test_requests import Held
from tests.relay import Relay, relay
from workers.engines.world import WorldEngine, WorldOptions

UP = [1, 0, 0, 0, 0]
DOWN = [0, 1, 0, 0, 0]


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Gateway, Relay]]:
    """A gateway that is reached over a relay."""
    async with serving_worlds() as (gateway, _), relay(gateway.port) as network:
        yield Gateway(network.url), network


async def test_a_world_is_played_and_what_is_held_comes_back() -> None:
    async with (
        relayed() as (gateway, _),
        await World.open(gateway, settings={"scene": "one"}, format="raw") as world,
    ):
        assert world.world["keys"] == ["up", "down", "left", "right"]
        sequence = await world.hold("up", axes={"turn": 0.25})
        await world.play()
        first = await world.next_picture()
        assert (first.frame, first.action_sequence) == (1, sequence)
        assert first.pixels.shape == (16, 16, 3)
        assert first.told["control_ms"] > 0
        later = await world.next_picture()
        assert later.frame > first.frame
        kept = (await world.checkpoint())[-1]
        assert kept >= later.step
        await world.next_picture()
        await world.pause()
        await world.rewind(kept)
        assert world.committed_step == kept
        await world.reset({"seed": 5, "scene": "one"})
        assert world.committed_step == 0
        with pytest.raises(Refused, match="scene"):
            await world.change_scene("nowhere")
        changing = asyncio.create_task(world.change_scene("two"))
        await world.play()
        changed = await changing
        while (picture := await world.next_picture()).step < changed:
            assert picture.told["scene"] == "one"
        assert picture.told["scene"] == "two"


async def test_what_the_world_has_not_is_not_held_and_what_was_stays() -> None:
    async with relayed() as (gateway, _), await World.open(gateway, format="raw") as world:
        sequence = await world.hold("up")
        for keys, axes in ((("jump",), {}), (("up",), {"roll": 0.5}), ((), {"turn": float("nan")})):
            with pytest.raises(ValueError, match=r"roll|jump|turn"):
                await world.hold(*keys, axes=axes)
        await world.play()
        assert (await world.next_picture()).action_sequence == sequence


async def test_one_step_at_a_time() -> None:
    async with relayed() as (gateway, _), await SteppedWorld.open(gateway) as world:
        first, second = await asyncio.gather(
            world.step([UP]), world.step([UP]), return_exceptions=True
        )
        assert isinstance(second, RuntimeError)
        assert isinstance(first, np.ndarray)
        assert world.committed_step == 1


async def test_the_newest_picture_counts_and_those_passed_over_are_counted() -> None:
    async with relayed() as (gateway, _), await World.open(gateway, format="raw") as world:
        await world.play()
        while world.missed < 3:
            # Pictures come, and nobody asks for them.
            await world.pause()
            await world.play()
        picture = await world.next_picture()
        assert picture.frame >= 4


async def test_after_a_broken_connection_the_same_world_goes_on_as_it_was_played() -> None:
    async with relayed() as (gateway, network), await World.open(gateway, format="raw") as world:
        sequence = await world.hold("left")
        await world.play()
        before = await world.next_picture()
        network.drop()
        while world.connections < 2:
            await world.next_picture()
        while (picture := await world.next_picture()).action_sequence != sequence:
            pass
        # It plays on, and holds what was held.
        assert picture.step > before.step


async def test_a_world_begins_as_another_is_which_goes_on() -> None:
    async with relayed() as (gateway, _), await World.open(gateway, format="raw") as world:
        await world.play()
        await world.next_picture()
        await world.pause()
        kept = (await world.checkpoint())[-1]
        async with await World.open(gateway, fork=world.id, format="raw") as fork:
            assert fork.committed_step == kept
            assert fork.id != world.id
            for one in (fork, world):
                await one.play()
                picture = await one.next_picture()
                while picture.step <= kept:
                    picture = await one.next_picture()
    with pytest.raises(SessionEnded):
        await fork.play()


async def test_another_process_goes_on_in_the_world() -> None:
    async with relayed() as (gateway, _):
        world = await World.open(gateway, format="raw")
        await world.play()
        frame = (await world.next_picture()).frame
        token = world.token
        await world.detach()
        with pytest.raises(SessionEnded):
            await world.hold("up")
        async with await World.resume(gateway, token, format="raw") as other:
            assert other.id == world.id
            await other.play()
            assert (await other.next_picture()).frame > frame
            # Who comes with a secret that was good once has lost control.
            with pytest.raises(ControlLost):
                await World.resume(gateway, token)


async def test_a_step_whose_answer_was_lost_is_done_once() -> None:
    async with (
        relayed() as (gateway, _),
        await SteppedWorld.open(gateway) as world,
        await SteppedWorld.open(gateway) as other,
    ):
        expected = [await other.step([UP]), await other.step([UP, UP], frames=2)]
        ask = gateway.requests.ask
        lost: list[Any] = []

        async def lossy(method: str, path: str, body: Any, timeout_s: float) -> Any:
            answer = await ask(method, path, body, timeout_s)
            if path.endswith("/step") and len(lost) < 2:
                lost.append(answer)
                raise NotReachable("the answer was lost")
            return answer

        vars(gateway.requests)["ask"] = lossy
        found = [await world.step([UP]), await world.step([UP, UP], frames=2)]
        assert len(lost) == 2
        del vars(gateway.requests)["ask"]
        assert [one.tolist() for one in found] == [one.tolist() for one in expected]
        assert (world.committed_step, found[1].shape) == (2, (2, 16, 16, 3))
        with pytest.raises(Refused, match="scene"):
            await world.step(scene="nowhere")
        assert world.committed_step == 2
        assert await world.checkpoint() == [2]
        after = await world.step([UP])
        await world.rewind(2)
        assert np.array_equal(await world.step([UP]), after)
        await world.reset()
        assert np.array_equal(await world.step([UP]), expected[0])
        await other.close()
        with pytest.raises(Refused) as gone:
            await other.step()
        assert gone.value.code == "session_closed"


@asynccontextmanager
async def given_up() -> AsyncIterator[tuple[SteppedWorld, SteppedWorld]]:
    """A world in which a step of two frames was given up, and one in which nothing was."""
    async with serving_worlds() as (served, _):
        gateway = Gateway(served.http)
        world, other = await SteppedWorld.open(gateway), await SteppedWorld.open(gateway)
        held = Held(served)
        stepping = asyncio.create_task(world.step([UP], frames=2))
        await held.begun()
        stepping.cancel()
        await asyncio.wait([stepping])
        held.let_go()
        yield world, other


async def test_what_a_step_that_was_given_up_has_made_is_not_the_next_ones() -> None:
    async with given_up() as (world, other):
        await other.step([UP], frames=2)
        for frames in (1, 3):
            expected = await other.step([DOWN], frames=frames)
            assert np.array_equal(await world.step([DOWN], frames=frames), expected)
        assert (world.committed_step, world.unclaimed, other.unclaimed) == (3, 2, 0)


async def test_a_step_that_was_given_up_and_is_asked_for_again_is_the_same() -> None:
    async with given_up() as (world, other):
        expected = await other.step([UP], frames=2)
        assert np.array_equal(await world.step([UP], frames=2), expected)
        assert (world.committed_step, world.unclaimed) == (1, 0)


@pytest.mark.parametrize("change", ["checkpoint", "reset"])
async def test_what_was_given_up_is_done_before_a_checkpoint_and_over_with_a_reset(
    change: str,
) -> None:
    async with given_up() as (world, _):
        if change == "checkpoint":
            assert await world.checkpoint() == [1]
        else:
            await world.reset()
        assert len(await world.step([DOWN])) == 1
        assert world.committed_step == (2 if change == "checkpoint" else 1)


@asynccontextmanager
async def unanswered(world: SteppedWorld, verb: str) -> AsyncIterator[None]:
    """The next such request is carried out, and its answer is lost."""
    requests = world._gateway.requests
    ask = requests.ask

    async def lossy(method: str, path: str, body: Any, timeout_s: float) -> Any:
        answer = await ask(method, path, body, timeout_s)
        if path.endswith(f"/{verb}"):
            raise NotReachable("the answer was lost")
        return answer

    vars(requests)["ask"] = lossy
    with pytest.raises(NotReachable):
        yield
    del vars(requests)["ask"]


async def test_a_change_whose_answer_was_lost_is_done_before_the_next_step() -> None:
    async with (
        relayed() as (gateway, _),
        await SteppedWorld.open(gateway) as world,
        await SteppedWorld.open(gateway) as other,
    ):
        expected = [await other.step([UP]), await other.step([DOWN])]
        assert np.array_equal(await world.step([UP]), expected[0])
        await world.checkpoint()
        await world.step([UP])
        async with unanswered(world, "rewind"):
            await world.rewind(1)
        assert np.array_equal(await world.step([DOWN]), expected[1])
        async with unanswered(world, "reset"):
            await world.reset()
        assert np.array_equal(await world.step([UP]), expected[0])
        # What is refused is not done later, and the change before it still is.
        async with unanswered(world, "reset"):
            await world.reset()
        with pytest.raises(Refused):
            await world.rewind(7)
        assert np.array_equal(await world.step([UP]), expected[0])
        assert (world.committed_step, world.unclaimed) == (1, 0)


@pytest.fixture
def changing(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once a reset or a checkpoint is under way at the gateway."""
    under_way, send = asyncio.Event(), Stepper._send

    def sending(stepper: Stepper, verb: Any) -> None:
        send(stepper, verb)
        if not isinstance(verb, Step):
            under_way.set()

    monkeypatch.setattr(Stepper, "_send", sending)
    return under_way


async def test_a_step_and_a_reset_that_were_given_up_leave_nothing_of_the_step(
    changing: asyncio.Event,
) -> None:
    async with serving_worlds() as (served, _):
        gateway = Gateway(served.http)
        async with (
            await SteppedWorld.open(gateway) as world,
            await SteppedWorld.open(gateway) as other,
        ):
            expected = await other.step([DOWN])
            held = Held(served)
            for given_up, begun in (
                (world.step([UP], frames=2), held.begun),
                (world.reset(), changing.wait),
            ):
                asking = asyncio.create_task(given_up)
                await begun()
                asking.cancel()
                await asyncio.wait([asking])
            held.let_go()
            found: Any = None
            async with asyncio.timeout(30):
                while found is None:
                    with contextlib.suppress(Refused):
                        found = await world.step([DOWN])
            assert np.array_equal(found, expected)
            assert (world.committed_step, world.unclaimed) == (1, 0)


async def test_a_restore_whose_answer_was_lost_is_looked_for() -> None:
    async with relayed() as (gateway, _), await SteppedWorld.open(gateway) as world:
        ask = gateway.requests.ask
        asked: list[Any] = []

        async def restored(method: str, path: str, body: Any, timeout_s: float) -> Any:
            asked.append((method, path.rpartition("/")[2], body))
            if path.endswith("/restore"):
                if len(asked) == 1:
                    raise NotReachable("the answer was lost")
                raise Refused("nothing is lost", code="nothing_to_restore")
            if method == "GET":
                return {"facts": {"committed_step": 3}}
            raise Refused("that is all")

        vars(gateway.requests)["ask"] = restored
        with pytest.raises(NotReachable):
            await world.restore()
        for _ in range(2):
            with pytest.raises(Refused, match="that is all"):
                await world.step()
        assert [name for _, name, _ in asked] == ["restore", "restore", world.id, "step", "step"]
        assert [body["step"] for _, name, body in asked if name == "step"] == [4, 4]
        vars(gateway.requests)["ask"] = ask


async def test_a_checkpoint_beside_a_step_takes_nothing_of_it(changing: asyncio.Event) -> None:
    async with (
        serving_worlds() as (served, _),
        await SteppedWorld.open(Gateway(served.http)) as world,
    ):
        held = Held(served)
        stepping = asyncio.create_task(world.step([UP], frames=2))
        await held.begun()
        keeping = asyncio.create_task(world.checkpoint())
        await changing.wait()
        held.let_go()
        assert (len(await stepping), await keeping) == (2, [1])
        assert (world.committed_step, world.unclaimed) == (1, 0)


async def test_a_player_knows_to_which_steps_the_world_can_go_back() -> None:
    async with relayed() as (gateway, _):
        world = await World.open(gateway, format="raw")
        assert (world.kept, await world.checkpoint()) == ([], [0])
        await world.play()
        await world.next_picture()
        await world.pause()
        kept = await world.checkpoint()
        assert world.kept == kept
        await world.detach()
        async with await World.resume(gateway, world.token, format="raw") as other:
            assert other.kept == kept
            await other.rewind(0)
            assert other.kept == [0]
            await other.reset()
            assert other.kept == []


async def looked_on(world: World) -> None:
    """Take pictures, as long as there are any."""
    while True:
        await world.next_picture()


async def test_a_world_that_stands_still_for_an_error_says_so_until_it_goes_on() -> None:
    async with serving_worlds() as (served, _):
        gateway = Gateway(served.http)
        async with await World.open(gateway, format="raw") as world:
            await world.play()
            await world.next_picture()
            served.served.make_engine = lambda _: WorldEngine.create(WorldOptions(random=1))
            await served.served.replace("dream")
            for _ in range(2):
                with pytest.raises(ServerFailed, match="reset it") as lost:
                    await looked_on(world)
                assert lost.value.code == "session_state_lost"
            assert (world.lost, world.restorable_step) == (True, None)
            with pytest.raises(Refused):
                await world.restore()
            # Who comes back learns it as well.
            await world.detach()
            async with await World.resume(gateway, world.token, format="raw") as other:
                assert other.lost
                with pytest.raises(ServerFailed):
                    await other.next_picture()
                with pytest.raises(ServerFailed):
                    await other.play()
                with pytest.raises(ServerFailed):
                    await other.next_picture()
                with pytest.raises(ServerFailed):
                    await other.change_scene("two")
                await other.reset()
                assert not other.lost
                await other.play()
                assert (await other.next_picture()).frame == 1


async def test_a_step_in_whose_midst_a_player_came_is_not_the_next_one() -> None:
    async with serving_worlds() as (served, _):
        gateway = Gateway(served.http)
        world, other = await SteppedWorld.open(gateway), await SteppedWorld.open(gateway)
        await world.step([UP])
        held = Held(served)
        stepping = asyncio.create_task(world.step([UP], frames=3))
        await held.begun()
        named = {"stream": f"/v1/worlds/{world.id}/stream", "secret": None}
        async with controlled(served.http, named, takeover=True) as player:
            with pytest.raises(Refused) as refused:
                await stepping
            assert (refused.value.code, refused.value.committed_step) == ("session_busy", 1)
            # It is not known while the player is there.
            with pytest.raises(Refused):
                await world.step([DOWN])
            held.let_go()
            await player.until("frame", step=2)
            await player.say("step", frames=2)
            await player.until("frame", step=4)
        await other.step([UP])
        await other.step([UP], frames=3)
        await other.step(frames=1)
        await other.step(frames=1)
        expected = await other.step([DOWN], frames=2)
        made = None
        while made is None:
            with contextlib.suppress(Refused):  # The player is still leaving.
                made = await world.step([DOWN], frames=2)
        assert np.array_equal(made, expected)
        assert (world.committed_step, world.unclaimed) == (5, 3)


async def test_what_a_player_has_made_is_nobody_elses() -> None:
    async with serving_worlds() as (served, _):
        gateway = Gateway(served.http)
        world = await SteppedWorld.open(gateway)
        await world.step([UP])
        named = {"stream": f"/v1/worlds/{world.id}/stream", "secret": None}
        async with controlled(served.http, named, takeover=True) as player:
            await player.say("step", frames=2)
            await player.until("frame", step=3)
        while world.committed_step == 1:
            with pytest.raises(Refused):
                await world.step([DOWN], frames=2)
        assert world.committed_step == 3
        assert len(await world.step([DOWN], frames=2)) == 2
        assert (world.committed_step, world.unclaimed) == (4, 0)


async def test_after_a_reset_that_was_given_up_the_world_says_where_it_stands() -> None:
    async with serving_worlds() as (served, http):
        world = await SteppedWorld.open(Gateway(served.http))
        await world.step([UP])
        await world.step([UP])
        # As if its answer had been lost.
        assert (await http.post(f"/v1/worlds/{world.id}/reset")).status_code == 200
        with pytest.raises(Refused) as refused:
            await world.step([UP])
        assert (refused.value.code, world.committed_step) == ("step_out_of_order", 0)
        await world.step([UP])
        assert world.committed_step == 1


async def test_what_was_never_sent_is_not_owed() -> None:
    async with serving_worlds() as (served, _):
        world = await SteppedWorld.open(Gateway(served.http))
        with pytest.raises(ValueError, match="attempts"):
            await world.step([UP], attempts=0)
        with pytest.raises(TypeError):
            await world.step([UP], scene=object())  # type: ignore[arg-type]
        assert len(await world.step([DOWN])) == 1
        assert (world.committed_step, world.unclaimed) == (1, 0)
