"""Worlds that are stepped over HTTP, with a random world behind the real host."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from PIL import Image

from sessions.pipeline import Limits
from tests.gateway.worlds.player import WAIT_S, controlled, opened, serving_worlds
from workers.snapshots import SnapshotPlace

SIZE = 16
UP = [1.0, 0.0, 0.0, 0.0, 0.0]
DOWN = [0.0, 1.0, 0.0, 0.0, 0.5]
PACKED = {"accept": "application/msgpack"}


async def stepped(http: httpx.AsyncClient, world: dict[str, Any], **body: Any) -> httpx.Response:
    return await http.post(f"/v1/worlds/{world['id']}/step", json=body, headers=PACKED)


async def frames(http: httpx.AsyncClient, world: dict[str, Any], **body: Any) -> list[bytes]:
    """The frames of a step that is done, lossless."""
    answer = await stepped(http, world, **body)
    assert answer.status_code == 200, answer.text
    return [frame["data"] for frame in msgspec.msgpack.decode(answer.content)["frames"]]


def error(answer: httpx.Response) -> tuple[int, str, str | None]:
    told = answer.json()["error"]
    return answer.status_code, told["code"], told["param"]


async def test_a_step_is_done_once_and_answered_as_often_as_it_is_asked_for() -> None:
    async with serving_worlds() as (_, http):
        one, other = await opened(http), await opened(http)
        first = await frames(http, one, step=1, actions=[UP, DOWN], frames=2)
        # Its answer was lost: the same number gets it again, whatever else is said.
        assert await frames(http, one, step=1, actions=[DOWN]) == first
        second = await frames(http, one, step=2, actions=[UP], frames=3)
        expected = [await frames(http, other, actions=[row]) for row in (UP, DOWN, UP, UP, UP)]
        assert [*first, *second] == [frame for step in expected for frame in step]
        status = (await http.get(f"/v1/worlds/{one['id']}")).json()
        assert (status["facts"], status["state"]) == ({"committed_step": 2}, "active")
        assert "secret" not in status


async def test_a_step_asked_for_again_does_not_take_the_world_back() -> None:
    async with serving_worlds() as (_, http):
        one, other = await opened(http), await opened(http)
        expected = [await frames(http, other, actions=[UP]) for _ in range(6)]
        for step in (1, 2, 3, 4):
            assert await frames(http, one, step=step, actions=[UP]) == expected[step - 1]
        again = msgspec.msgpack.decode((await stepped(http, one, step=2)).content)
        assert [frame["data"] for frame in again["frames"]] == expected[1]
        assert (again["step"], again["committed_step"]) == (2, 4)
        # The next one is the one after the last, for each way to ask for it.
        assert await frames(http, one, actions=[UP]) == expected[4]
        await stepped(http, one, step=3)
        several = {"worlds": [{"id": one["id"], "actions": [UP]}]}
        answer = await http.post("/v1/worlds/step", json=several, headers=PACKED)
        (done,) = msgspec.msgpack.decode(answer.content)["worlds"]
        assert done["answer"]["step"] == done["answer"]["committed_step"] == 6
        assert [frame["data"] for frame in done["answer"]["frames"]] == expected[5]


async def test_frames_come_as_pictures_in_json() -> None:
    async with serving_worlds() as (_, http):
        world = await opened(http)
        expected = await frames(http, world, step=1)
        answer = await http.post(f"/v1/worlds/{world['id']}/step", json={"step": 1})
        told = answer.json()
        assert (told["step"], told["committed_step"]) == (1, 1)
        (frame,) = told["frames"]
        assert (frame["format"], frame["frame"], frame["width"]) == ("png", 1, SIZE)
        picture = Image.open(io.BytesIO(base64.b64decode(frame["data"])))
        assert picture.convert("RGB").tobytes() == expected[0]
        asked = {"step": 1, "format": "jpeg", "quality": 95}
        answer = await http.post(f"/v1/worlds/{world['id']}/step", json=asked)
        picture = Image.open(io.BytesIO(base64.b64decode(answer.json()["frames"][0]["data"])))
        assert (picture.format, picture.size) == ("JPEG", (SIZE, SIZE))


async def test_a_reset_begins_anew_with_what_it_says() -> None:
    async with serving_worlds() as (_, http):
        world, other = await opened(http), await opened(http, settings={"seed": 9})
        before = await frames(http, world, step=1, actions=[UP])
        reset = f"/v1/worlds/{world['id']}/reset"
        assert (await http.post(reset)).json() == {"committed_step": 0}
        assert await frames(http, world, step=1, actions=[UP]) == before
        assert (await http.post(reset, json={"settings": {"seed": 9}})).status_code == 200
        found = await frames(http, world, step=1, actions=[UP])
        assert found == await frames(http, other, step=1, actions=[UP]) != before
        refused = await http.post(reset, json={"settings": {"seed": "x"}})
        assert error(refused) == (400, "invalid_type", "settings.seed")
        # It was refused, and nothing has changed.
        assert await frames(http, world, step=1) == found


async def test_requests_keep_a_state_and_go_back_to_it() -> None:
    async with serving_worlds() as (_, http):
        world = await opened(http)
        path = f"/v1/worlds/{world['id']}"
        await frames(http, world, step=1, actions=[UP])
        assert (await http.post(f"{path}/checkpoint")).json() == {"committed_step": 1, "kept": [1]}
        expected = await frames(http, world, step=2, actions=[UP], frames=2)
        assert (await http.post(f"{path}/rewind", json={"step": 1})).json() == {"committed_step": 1}
        assert await frames(http, world, step=2, actions=[UP], frames=2) == expected
        refused = await http.post(f"{path}/rewind", json={"step": 2})
        assert error(refused) == (400, "no_checkpoint", "step")
        too_long = await http.post(f"{path}/reset", json={"settings": {"scene": "x" * 70_000}})
        assert error(too_long)[2] == "settings"


async def test_a_fork_begins_as_its_source_is_and_leaves_it_undisturbed() -> None:
    async with serving_worlds() as (_, http):
        source, other = (
            await opened(http, settings={"seed": 4}),
            await opened(http, settings={"seed": 4}),
        )
        for world in (source, other):
            await frames(http, world, step=1, actions=[UP], frames=2)
        fork = await opened(http, fork={"session": source["id"]})
        assert fork["facts"]["committed_step"] == 1
        expected = await frames(http, other, step=2, actions=[DOWN])
        assert await frames(http, fork, step=2, actions=[UP]) != expected
        assert await frames(http, source, step=2, actions=[DOWN]) == expected
        refused = await http.post("/v1/worlds", json={"fork": {"session": "sess_none"}})
        assert error(refused) == (404, "session_not_found", "fork.session")


async def test_the_settings_of_a_world_are_those_that_it_has_begun_with(tmp_path: Path) -> None:
    async def settings(world: dict[str, Any]) -> Any:
        return (await http.get(f"/v1/worlds/{world['id']}")).json()["settings"]

    spec = {"snapshots": [SnapshotPlace(str(tmp_path), 1 << 24)]}
    async with serving_worlds(spec=spec) as (gateway, http):
        world, other = await opened(http, settings={"scene": "two"}), await opened(http)
        path = f"/v1/worlds/{world['id']}"
        await http.post(f"{path}/reset", json={"settings": {"seed": 9}})
        assert await settings(world) == {"scene": "two", "seed": 9}
        made = await frames(http, world, step=1, actions=[UP])
        # Put away and brought back it is the same one.
        for parked in (False, True):
            if parked:
                await gateway.host.park_session(world["id"])
            refused = await http.post(f"{path}/fork", json={"settings": {"seed": 0}})
            assert error(refused) == (400, "invalid_value", "settings")
            answer = await http.post(f"{path}/fork", json={"settings": {"seed": 9}})
            fork = answer.json()
            assert fork["settings"] == await settings(fork) == {"scene": "two", "seed": 9}
            # Its own resets go back to them.
            await http.post(f"/v1/worlds/{fork['id']}/reset")
            assert await frames(http, fork, step=1, actions=[UP]) == made
        # A reset without any begins with those of the open.
        await http.post(f"{path}/reset")
        assert await settings(world) == {"scene": "two"}
        await http.post(f"/v1/worlds/{other['id']}/reset", json={"settings": {"scene": "two"}})
        both = [await frames(http, it, step=1, actions=[UP]) for it in (world, other)]
        assert both[0] == both[1] != made


async def test_a_world_is_forked_by_its_path() -> None:
    async with serving_worlds() as (_, http):
        source = await opened(http, settings={"seed": 4})
        await frames(http, source, step=1, actions=[UP], frames=2)
        path = f"/v1/worlds/{source['id']}/fork"
        answers = [await http.post(path), await http.post(path, json={"limits": {"idle_s": 30}})]
        assert [answer.status_code for answer in answers] == [201, 201]
        forks = [answer.json() for answer in answers]
        assert [fork["facts"]["committed_step"] for fork in forks] == [1, 1]
        assert forks[1]["limits"]["idle_s"] == 30
        same = [await frames(http, it, step=2, actions=[DOWN]) for it in (source, *forks)]
        assert same[0] == same[1] == same[2]
        refused = await http.post(path, json={"fork": {"session": source["id"]}})
        assert error(refused)[0] == 400
        await http.delete(f"/v1/worlds/{source['id']}")
        assert error(await http.post(path))[0] == 410
        ended = await http.post("/v1/worlds", json={"fork": {"session": source["id"]}})
        assert error(ended) == (410, "session_closed", "fork.session")
        assert error(await http.post("/v1/worlds/sess_none/fork"))[:2] == (404, "session_not_found")


@pytest.mark.parametrize(
    ("body", "status", "code", "field"),
    [
        ({"step": 3}, 400, "step_out_of_order", "step"),
        ({"step": 0}, 400, "invalid_value", "step"),
        ({"frames": 9}, 400, "invalid_value", "frames"),
        ({"actions": [UP, UP]}, 400, "invalid_value", "actions"),
        ({"actions": [[1.0]]}, 400, "invalid_value", "actions[0]"),
        ({"actions": [[0.5, 0, 0, 0, 0]]}, 400, "invalid_value", "actions[0][0]"),
        ({"actions": [[2, 0, 0, 0, 0]]}, 400, "invalid_value", "actions[0][0]"),
        ({"scene": "nowhere"}, 400, "invalid_value", "scene"),
        ({"format": "bmp"}, 400, "invalid_value", "format"),
        ({"stepp": 1}, 400, "unknown_parameter", "stepp"),
    ],
)
async def test_what_is_wrong_is_refused_and_nothing_was_done(
    body: dict[str, Any], status: int, code: str, field: str
) -> None:
    async with serving_worlds() as (_, http):
        world = await opened(http)
        refused = await stepped(http, world, **body)
        assert error(refused) == (status, code, field)
        if code == "step_out_of_order":
            assert refused.json()["committed_step"] == 0
        assert len(await frames(http, world, step=1)) == 1


async def test_a_world_that_requests_have_had_leaves_nothing_when_it_ends() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        await frames(http, world, step=1)
        await frames(http, world, step=2)
        assert (await http.delete(f"/v1/worlds/{world['id']}")).status_code == 204
        await gateway.served.emptied()
        entries = gateway.host.history(world["id"]).timeline["entries"]
        assert [entry["reason"] for entry in entries if entry["event"] == "closing"] == ["client"]
        assert not [entry for entry in entries if entry["event"] == "failed"]
        assert gateway.served.workers["dream"]._control.sessions == 0


class Held:
    """A world's model, held fast in the midst of its next call."""

    def __init__(self, gateway: Any) -> None:
        model = gateway.served.engines["dream"].model
        self._inner, self._begun, self._goes_on = (
            model.denoise,
            threading.Event(),
            threading.Event(),
        )
        vars(model)["denoise"] = self._denoise

    def _denoise(self, batch: Any) -> Any:
        self._begun.set()
        assert self._goes_on.wait(WAIT_S)
        return self._inner(batch)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, WAIT_S)

    def let_go(self) -> None:
        self._goes_on.set()


async def test_a_step_whose_world_is_closed_is_told_that_it_is_gone() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        held = Held(gateway)
        stepping = asyncio.create_task(stepped(http, world, step=1))
        await held.begun()
        assert (await http.delete(f"/v1/worlds/{world['id']}")).status_code == 204
        held.let_go()
        assert error(await stepping)[:2] == (410, "session_closed")


async def test_a_step_whose_world_is_taken_over_is_told_how_far_it_was() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        await frames(http, world, step=1)
        held = Held(gateway)
        stepping = asyncio.create_task(stepped(http, world, step=2))
        await held.begun()
        async with controlled(gateway.http, {**world, "secret": None}, takeover=True):
            refused = await stepping
            held.let_go()
        assert error(refused)[:2] == (409, "session_busy")
        assert refused.json()["committed_step"] == 1


async def test_who_names_no_step_does_not_get_what_somebody_else_has_asked_for() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        await frames(http, world, step=1)
        held = Held(gateway)
        theirs = {"input": {"type": "step", "step": 2, "inputs": [], "parameters": {}}}
        answer = await http.post(f"/v1/sessions/{world['id']}/update", json=theirs)
        assert answer.status_code == 200
        await held.begun()
        ours = asyncio.create_task(stepped(http, world, actions=[UP], frames=3))
        await http.get("/v1/worlds/schema")
        held.let_go()
        refused = await ours
        assert error(refused)[:2] == (409, "session_busy")
        assert refused.json()["committed_step"] == 2
        assert len(await frames(http, world, actions=[UP], frames=3)) == 3


async def test_bodies_that_say_nothing_may_be_absent() -> None:
    async with serving_worlds() as (_, http):
        answer = await http.post("/v1/worlds")
        assert answer.status_code == 201
        path = f"/v1/worlds/{answer.json()['id']}"
        assert (await http.post(f"{path}/step")).json()["committed_step"] == 1
        for verb in ("reset", "checkpoint"):
            assert (await http.post(f"{path}/{verb}")).status_code == 200
        for verb in ("checkpoint", "close"):
            for said, code in ((b"{{{", "invalid_json"), (b'{"x": 1}', "unknown_parameter")):
                refused = await http.post(f"{path}/{verb}", content=said)
                assert error(refused)[:2] == (400, code)
            assert (await http.post(f"{path}/checkpoint", content=b"{}")).status_code == 200
        refused = await http.request("DELETE", path, content=b"[]")
        assert error(refused)[:2] == (400, "invalid_type")
        missing = "missing_required_parameter"
        assert error(await http.post(f"{path}/rewind")) == (400, missing, "step")
        assert error(await http.post("/v1/worlds/step")) == (400, missing, "worlds")


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        ({"seed": "x"}, "invalid_type", "settings.seed"),
        ({"seed": -1}, "invalid_value", "settings.seed"),
        ({"sed": 1}, "unknown_parameter", "settings.sed"),
        ({"scene": "nowhere"}, "invalid_value", "settings.scene"),
    ],
)
async def test_settings_that_the_engine_refuses_are_named(
    settings: dict[str, Any], code: str, field: str
) -> None:
    async with serving_worlds() as (_, http):
        assert error(await http.post("/v1/worlds", json={"settings": settings})) == (
            400,
            code,
            field,
        )
        world = await opened(http)
        path = f"/v1/worlds/{world['id']}"
        for verb in ("reset", "fork"):
            refused = await http.post(f"{path}/{verb}", json={"settings": settings})
            assert error(refused) == (400, code, field)
        assert len(await frames(http, world, step=1)) == 1


async def test_a_refused_request_takes_no_world_from_its_player() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with controlled(gateway.http, world) as it:
            secret = it.frames[0]["secret"]
        assert error(await stepped(http, world, frames=99))[0] == 400
        assert error(await stepped(http, world, actions=[[2, 0, 0, 0, 0]]))[0] == 400
        assert error(await stepped(http, world, scene="nowhere"))[0] == 400
        async with controlled(gateway.http, {**world, "secret": secret}) as it:
            assert it.frames[0]["type"] == "attached"


async def test_a_world_that_is_gone_and_one_that_never_was() -> None:
    async with serving_worlds() as (_, http):
        world = await opened(http)
        await frames(http, world, step=1)
        path = f"/v1/worlds/{world['id']}"
        assert (await http.post(f"{path}/close")).status_code == 204
        assert (await http.delete(path)).status_code == 204
        for answer in (
            await stepped(http, world, step=2),
            await http.post(f"{path}/reset"),
            await http.get(path),
        ):
            assert error(answer)[:2] == (410, "session_closed")
        for answer in (
            await stepped(http, {"id": "sess_none"}, step=1),
            await http.get("/v1/worlds/sess_none"),
            await http.delete("/v1/worlds/sess_none"),
        ):
            assert error(answer)[:2] == (404, "session_not_found")
        refused = await http.post("/v1/worlds", json={"model": "none"})
        assert error(refused) == (404, "model_not_found", "model")


async def test_where_there_is_no_room_no_world_is_opened_and_no_time_is_made_up() -> None:
    async with serving_worlds(limits=Limits(sessions=1)) as (_, http):
        world = await opened(http)
        await frames(http, world, step=1)
        refused = await http.post("/v1/worlds", json={})
        assert error(refused)[:2] == (503, "capacity_exceeded")
        assert "retry-after" not in refused.headers


async def test_a_player_and_requests_do_not_step_the_same_world() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with controlled(gateway.http, world) as it:
            await it.say("step")
            await it.until("frame")
            assert error(await stepped(http, world, step=2))[:2] == (409, "session_busy")
        async with asyncio.timeout(30):
            while (await http.get(f"/v1/worlds/{world['id']}")).json()["state"] == "active":
                pass
        assert len(await frames(http, world, step=2)) == 1
        async with controlled(gateway.http, {**world, "secret": None}, takeover=True) as it:
            assert it.frames[0]["committed_step"] == 2
            assert error(await stepped(http, world, step=3))[:2] == (409, "session_busy")


async def test_several_worlds_are_stepped_by_one_request() -> None:
    async with serving_worlds() as (_, http):
        worlds = [await opened(http, settings={"seed": seed}) for seed in range(3)]
        alone = await opened(http, settings={"seed": 2})
        entries = [{"id": world["id"], "step": 1, "actions": [UP]} for world in worlds]
        entries += [{"id": worlds[0]["id"], "step": 5}, {"id": "sess_none"}]
        answer = await http.post("/v1/worlds/step", json={"worlds": entries}, headers=PACKED)
        told = msgspec.msgpack.decode(answer.content)["worlds"]
        assert [one["id"] for one in told] == [entry["id"] for entry in entries]
        assert [one["status"] for one in told] == [200, 200, 200, 409, 404]
        made = [one["answer"]["frames"][0]["data"] for one in told[:3]]
        assert len(set(made)) == 3
        assert [made[2]] == await frames(http, alone, step=1, actions=[UP])
        assert told[4]["error"]["code"] == "session_not_found"
