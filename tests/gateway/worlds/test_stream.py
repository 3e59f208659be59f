"""Playing a world over its WebSocket, with a random world behind the real host."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image
from websockets.exceptions import InvalidStatus

from gateway.access import Access
from gateway.surfaces.worlds import WorldStream
from gateway.surfaces.worlds.pictures import Studio
from gateway.surfaces.worlds.slots import SLOTS
from protocol.config import GatewayConfig
from sessions.pipeline import Limits
from tests.gateway.real_host import RealGateway
from tests.gateway.worlds.player import Player, controlled, opened, player, serving_worlds
from workers.snapshots import SnapshotPlace

SIZE = 16
DOTS = SIZE * SIZE * 3


def sample(gateway: RealGateway, name: str) -> float:
    """The value of a sample of /metrics, 0 where there is none."""
    for line in gateway.metrics.render().decode().splitlines():
        if line.startswith(name + " "):
            return float(line.rpartition(" ")[2])
    return 0.0


async def walked(it: Player, frames: int) -> list[bytes]:
    """So many single frames, as pixels."""
    await it.say("step", frames=frames)
    return [one["data"] for one in await it.pictures(frames)]


@pytest.mark.parametrize("subprotocol", ["antiphon.json", "antiphon.msgpack"])
async def test_a_world_is_played(subprotocol: str) -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http, settings={"seed": 3})
        assert world["world"] == {
            "width": SIZE,
            "height": SIZE,
            "rate_hz": 100.0,
            "chunk": 8,
            "denoising_steps": 2,
            "keys": ["up", "down", "left", "right"],
            "axes": ["turn"],
            "scenes": ["one", "two"],
            "formats": ["jpeg", "webp", "png", "raw"],
        }
        async with controlled(gateway.http, world, subprotocol) as it:
            await it.say("hold", sequence=7, keys=["up"], axes={"turn": 0.5})
            await it.say("play", ref="go")
            await it.until("playing", ref="go")
            pictures = await it.pictures(5)
            assert [one["frame"] for one in pictures] == [1, 2, 3, 4, 5]
            assert [one["step"] for one in pictures] == [1, 2, 3, 4, 5]
            assert [one["action_sequence"] for one in pictures] == [7] * 5
            assert len({one["data"] for one in pictures}) == 5
            first, second = pictures[:2]
            assert len(first["data"]) == DOTS == first["picture_bytes"]
            assert first["scene"] in ("one", "two")
            # Only the first of a hold tells how long that took.
            assert first["control_ms"] >= first["step_ms"] >= first["engine_ms"] > 0
            assert "control_ms" not in second
            await it.say("pause", ref="still")
            await it.until("paused", ref="still")
            await it.say("ping", at=4.5)
            assert (await it.until("pong"))["at"] == 4.5
        assert sample(gateway, 'antiphon_world_control_seconds_count{pipeline="world"}') == 1
        assert sample(gateway, 'antiphon_world_pictures_total{pipeline="world",result="sent"}') >= 5


async def test_the_latest_hold_counts_and_none_is_queued() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with controlled(gateway.http, world) as it:
            for sequence, key in enumerate(("up", "down", "left"), 1):
                await it.say("hold", sequence=sequence, keys=[key])
            held = await walked(it, 2)
            assert [one["action_sequence"] for one in it.frames[-2:]] == [3, 3]
            # One that is older than what is held is of no account.
            await it.say("hold", sequence=2, keys=["up"])
            await walked(it, 1)
            assert it.frames[-1]["action_sequence"] == 3
            await it.say("reset")
            await it.until("was_reset")
            await it.say("hold", sequence=4, keys=["left"])
            assert await walked(it, 2) == held
            await it.say("hold", sequence=5, keys=[])
            await it.say("reset")
            await it.until("was_reset")
            assert await walked(it, 2) != held


async def test_who_comes_back_goes_on_in_the_same_world_with_nothing_held() -> None:
    async with serving_worlds() as (gateway, http):
        alone, cut = await opened(http), await opened(http)
        async with controlled(gateway.http, alone) as it:
            await it.say("hold", sequence=1, keys=["up"])
            expected = await walked(it, 2)
            await it.say("hold", sequence=2, keys=[])
            expected += await walked(it, 2)
        async with controlled(gateway.http, cut) as it:
            await it.say("hold", sequence=1, keys=["up"])
            found = await walked(it, 2)
            it.socket.transport.abort()
        async with controlled(gateway.http, cut) as it:
            assert it.frames[0]["committed_step"] == 2
            found += await walked(it, 2)
            assert [one["frame"] for one in it.frames[1:]] == [3, 4]
        assert found == expected


async def test_the_world_stands_still_while_its_player_is_away() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with (
            player(gateway.http, world, role="observer", format="raw") as looking,
            controlled(gateway.http, world) as it,
        ):
            await looking.until("attached")
            await it.say("play")
            await it.pictures(3)
            it.socket.transport.abort()
            async with controlled(gateway.http, world) as back:
                committed = back.frames[0]["committed_step"]
                # Nothing was begun since: the next step is the one after that.
                await back.say("step")
                step = (await back.until("frame"))["step"]
                assert step in (committed + 1, committed + 2)
                assert (await looking.until("frame", step=step))["step"] == step


async def test_viewers_see_what_the_player_sees_each_in_its_own_format() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with (
            player(gateway.http, world, role="observer", format="raw") as raw,
            player(gateway.http, world, role="observer", format="webp", quality=90) as webp,
            player(gateway.http, world, role="observer", format="png") as png,
            player(gateway.http, world, "antiphon.msgpack", role="observer") as jpeg,
            controlled(gateway.http, world) as it,
        ):
            for viewer in (raw, webp, png, jpeg):
                await viewer.until("attached", role="observer")
            await it.say("step")
            pixels = (await it.until("frame"))["data"]
            assert (await raw.until("frame"))["data"] == pixels
            for viewer, name in ((webp, "WEBP"), (png, "PNG"), (jpeg, "JPEG")):
                shown = await viewer.until("frame")
                picture = Image.open(io.BytesIO(shown["data"]))
                assert (picture.format, picture.size) == (name, (SIZE, SIZE))
                if name == "PNG":
                    assert picture.convert("RGB").tobytes() == pixels
            # The player and the viewer that want the same share one.
            assert sample(gateway, 'antiphon_picture_encode_seconds_count{format="raw"}') == 1
            await raw.say("play", ref="mine")
            refused = await raw.until("refused", ref="mine")
            assert refused["error"]["code"] == "not_controller"


async def test_a_scene_changes_between_two_steps_or_not_at_all() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http, settings={"scene": "one"})
        async with controlled(gateway.http, world) as it:
            await walked(it, 1)
            await it.say("scene", scene="nowhere", ref="a")
            error = (await it.until("refused", ref="a"))["error"]
            assert (error["code"], error["field"]) == ("invalid_value", "scene")
            await it.say("scene", scene="one", ref="b")
            await it.say("scene", scene="two", ref="c")
            assert (await it.until("refused", ref="b"))["error"]["code"] == "superseded"
            await it.say("step", frames=2)
            assert (await it.until("scene_changed", ref="c"))["step"] == 2
            shown = await it.pictures(2)
            assert [one["scene"] for one in shown] == ["two", "two"]
            assert it.frames[1]["scene"] == "one"


async def test_what_was_asked_of_a_world_goes_with_it() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http, settings={"scene": "one"})
        async with controlled(gateway.http, world) as it:
            await it.say("scene", scene="two", ref="old")
            await it.say("reset", settings={"scene": "one"}, ref="new")
            assert (await it.until("refused", ref="old"))["error"]["code"] == "superseded"
            await it.until("was_reset", ref="new")
            await it.say("step")
            assert (await it.until("frame"))["scene"] == "one"
            await it.say("step", frames=20)
            await it.pictures(2)
            await it.say("reset", ref="again")
            await it.until("was_reset", ref="again")
            await it.say("step")
            assert (await it.until("frame"))["frame"] == 1
            await it.say("ping", at=1)
            await it.until("pong")
            assert it.frames[-2]["type"] == "frame"


async def test_who_names_what_it_says_is_answered_by_that_name_whatever_is_wrong_with_it() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        for subprotocol in ("antiphon.json", "antiphon.msgpack"):
            async with controlled(gateway.http, world, subprotocol=subprotocol) as it:
                world["secret"] = it.frames[0]["secret"]
                for number, (kind, fields) in enumerate(
                    [
                        ("scene", {"scene": 5}),
                        ("rewind", {"step": -1}),
                        ("reset", {"settings": 5}),
                        ("play", {"speed": 2}),
                        ("jump", {}),
                    ]
                ):
                    await it.say(kind, ref=f"named-{number}", **fields)
                    await it.until("refused", ref=f"named-{number}")


async def test_a_world_goes_back_to_a_state_that_was_kept() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with (
            player(gateway.http, world, role="observer", format="raw") as looking,
            controlled(gateway.http, world) as it,
        ):
            await looking.until("attached")
            await it.say("hold", sequence=1, keys=["up"])
            await walked(it, 2)
            await it.say("checkpoint", ref="keep")
            assert (await it.until("checkpoint_kept", ref="keep"))["kept"] == [2]
            expected = await walked(it, 3)
            await it.say("rewind", step=2, ref="back")
            assert (await it.until("was_rewound", ref="back"))["committed_step"] == 2
            assert await walked(it, 3) == expected
            assert [one["frame"] for one in it.frames[-3:]] == [3, 4, 5]
            await looking.until("was_rewound")
            assert [one["data"] for one in await looking.pictures(3)] == expected
            await it.say("rewind", step=1, ref="never")
            error = (await it.until("refused", ref="never"))["error"]
            assert (error["code"], error["field"]) == ("no_checkpoint", "step")
            await walked(it, 1)


async def test_a_step_that_somebody_asks_for_again_takes_no_player_back() -> None:
    async with serving_worlds() as (gateway, http):
        world, other = await opened(http), await opened(http)
        async with controlled(gateway.http, other) as it:
            await walked(it, 4)
            await it.say("scene", scene="two")
            expected = await walked(it, 2)
        async with controlled(gateway.http, world) as it:
            await walked(it, 4)
            again = {"input": {"type": "step", "step": 2, "inputs": [], "parameters": {}}}
            update = f"/v1/sessions/{world['id']}/update"
            assert (await http.post(update, json=again)).status_code == 200
            await it.say("scene", scene="two", ref="mine")
            await it.say("step", frames=2, ref="both")
            assert (await it.until("scene_changed", ref="mine"))["step"] == 5
            assert (await it.until("stepped", ref="both"))["frames"] == 2
            while len(seen := [one for one in it.frames if one["type"] == "frame"]) < 6:
                await it.next()
            assert [one["data"] for one in seen[-2:]] == expected


async def test_who_asks_for_single_frames_by_name_hears_when_no_more_of_them_come() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with controlled(gateway.http, world) as it:
            await it.say("step", frames=3, ref="three")
            assert (await it.until("stepped", ref="three"))["frames"] == 3
            made = 3
            for said in ("pause", "reset"):
                await it.say("step", frames=1000, ref="many")
                await it.say("step", frames=5, ref="behind")
                while (await it.until("frame"))["step"] <= made:
                    pass
                await it.say(said)
                told = [await it.until("stepped") for _ in range(2)]
                by_name = {one["ref"]: one["frames"] for one in told}
                assert 0 < by_name["many"] < 1000
                assert by_name["behind"] == 0
                made += by_name["many"]
            await it.say("step", ref="alone")
            assert (await it.until("stepped", ref="alone"))["frames"] == 1


async def test_what_is_wrong_is_refused_and_the_world_goes_on() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with controlled(gateway.http, world) as it:

            async def refused(kind: str, **fields: Any) -> tuple[str, str | None]:
                await it.say(kind, **fields)
                error = (await it.until("refused"))["error"]
                return error["code"], error.get("field")

            assert await refused("hold", sequence=1, keys=["jump"]) == ("invalid_value", "keys")
            axes = {"roll": 0.5}
            assert await refused("hold", sequence=1, axes=axes) == ("invalid_value", "axes")
            assert await refused("hold", sequence=0) == ("invalid_value", "sequence")
            assert await refused("hold", sequence=1, key="up") == ("unknown_parameter", "key")
            assert await refused("jump") == ("invalid_value", "type")
            assert await refused("reset", settings={"seed": -1}) == (
                "invalid_value",
                "settings.seed",
            )
            assert await refused("reset", settings={"seed": 2**70}) == (
                "invalid_value",
                "settings.seed",
            )
            assert await refused("attach", role="observer") == ("invalid_value", "type")
            assert await refused("restore") == ("nothing_to_restore", None)
            await it.say("play")
            assert await refused("step") == ("session_busy", "type")
            await it.until("frame")


@pytest.mark.parametrize(
    ("attach", "code", "field"),
    [
        ({"role": "controller"}, "secret_required", "secret"),
        ({"role": "controller", "secret": "wrong"}, "resume_refused", "secret"),
        ({"role": "observer", "secret": "mine"}, "invalid_value", "secret"),
        ({"role": "observer", "format": "bmp"}, "invalid_value", "format"),
        ({"role": "observer", "quality": 0}, "invalid_value", "quality"),
    ],
)
async def test_who_may_not_attach_is_told_why(
    attach: dict[str, Any], code: str, field: str
) -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with player(gateway.http, world, **attach) as it:
            error = (await it.until("error"))["error"]
            assert (error["code"], error["field"]) == (code, field)
            assert await it.closed() == (1008, code)
        assert (await http.get(f"/v1/worlds/{world['id']}")).json()["state"] == "detached"


async def test_a_world_that_is_not_there_cannot_be_seen() -> None:
    async with serving_worlds() as (gateway, _):
        world = {"stream": "/v1/worlds/sess_none/stream"}
        async with player(gateway.http, world) as it:
            assert (await it.until("error"))["error"]["code"] == "session_not_found"


async def test_a_player_who_sees_nothing_is_not_run_away_from() -> None:
    async with serving_worlds(rate_hz=240) as (gateway, http):
        world = await opened(http)
        async with controlled(gateway.http, world, window=3) as it:
            await it.say("play")
            await it.pictures(3)
            await it.say("ping")
            await it.until("pong")
            assert (await http.get(f"/v1/worlds/{world['id']}")).json()["facts"] == {
                "committed_step": 3
            }
            await it.say("seen", frame=2)
            assert [one["frame"] for one in await it.pictures(2)] == [4, 5]


async def test_the_oldest_pictures_go_where_a_viewer_does_not_read() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        stream = WorldStream(
            gateway.host, Access(GatewayConfig()), gateway.metrics, Studio(gateway.metrics)
        )
        said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        told: list[Any] = []
        sent, reads = asyncio.Semaphore(0), asyncio.Event()

        async def send(message: Any) -> None:
            told.append(message)
            sent.release()
            if '"frame"' in message.get("text", ""):
                await reads.wait()

        scope = {
            "type": "websocket",
            "path_params": {"session": world["id"]},
            "headers": [],
            "subprotocols": [],
            "extensions": {},
        }
        look = '{"type":"attach","role":"observer","format":"raw"}'
        said.put_nowait({"type": "websocket.connect"})
        said.put_nowait({"type": "websocket.receive", "text": look})
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(stream(scope, said.get, send))
            await sent.acquire()  # That it is let in,
            await sent.acquire()  # and attached.
            async with controlled(gateway.http, world) as it:
                # One is being sent, and another may be encoded already; four wait.
                await walked(it, SLOTS + 4)
                # The player was not held up.
                assert it.frames[-1]["dropped"] == 0
                reads.set()
                await walked(it, 1)
            while not (pictures := shown(told)) or pictures[-1]["frame"] < SLOTS + 5:
                await sent.acquire()
            said.put_nowait({"type": "websocket.disconnect", "code": 1000})
        numbers = [one["frame"] for one in pictures]
        assert numbers[0] == 1
        assert numbers == sorted(set(numbers))
        assert numbers[-SLOTS:] == list(range(6, SLOTS + 6))
        left_out = SLOTS + 5 - len(numbers)
        assert pictures[-1]["dropped"] == left_out > 0
        name = 'antiphon_world_pictures_total{pipeline="world",result="dropped"}'
        assert sample(gateway, name) == left_out


def shown(told: list[Any]) -> list[dict[str, Any]]:
    """The frames among the messages of a connection."""
    frames = [msgspec.json.decode(message["text"]) for message in told if message.get("text")]
    return [frame for frame in frames if frame["type"] == "frame"]


async def test_control_is_taken_over_and_the_world_ends_for_all() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with controlled(gateway.http, world) as first:
            await walked(first, 1)
            async with player(
                gateway.http, world, role="controller", takeover=True, format="raw"
            ) as second:
                assert (await second.until("attached"))["committed_step"] == 1
                assert (await first.until("let_go"))["reason"] == "replaced"
                assert await first.closed() == (4001, "replaced")
                await second.say("close")
                assert (await second.until("session_ended"))["reason"] == "client"
                assert await second.closed() == (1000, "client")
        assert (await http.get(f"/v1/worlds/{world['id']}")).status_code == 410
        async with player(gateway.http, world) as late:
            assert (await late.until("error"))["error"]["code"] == "session_closed"
            assert await late.closed() == (1008, "session_closed")
        with pytest.raises(InvalidStatus) as refused:
            async with player(gateway.http, world, None):
                pass
        assert refused.value.response.status_code == 410


async def test_who_attaches_to_a_world_that_has_just_ended_is_told_so() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with player(gateway.http, world) as it:
            assert (await http.delete(f"/v1/worlds/{world['id']}")).status_code == 204
            await gateway.served.emptied()
            await it.say("attach", role="observer")
            assert (await it.until("error"))["error"]["code"] == "session_closed"
            assert await it.closed() == (1008, "session_closed")


async def test_who_comes_back_knows_what_is_kept() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with controlled(gateway.http, world) as it:
            assert "kept" not in it.frames[0]
            await it.say("checkpoint")
            assert (await it.until("checkpoint_kept"))["kept"] == [0]
        async with controlled(gateway.http, world) as it:
            assert it.frames[0]["kept"] == [0]
        facts = (await http.get(f"/v1/worlds/{world['id']}")).json()["facts"]
        assert facts == {"committed_step": 0, "kept": [0]}


async def test_a_world_that_was_put_away_comes_back_with_what_is_kept(tmp_path: Path) -> None:
    spec = {"snapshots": [SnapshotPlace(str(tmp_path), 1 << 24)]}
    async with serving_worlds(spec=spec) as (gateway, http):
        world = await opened(http)
        async with controlled(gateway.http, world) as it:
            await it.say("checkpoint")
            await it.until("checkpoint_kept")
            await gateway.host.park_session(world["id"])
            await walked(it, 1)
            await it.say("rewind", step=0)
            await it.until("was_rewound", committed_step=0)
        facts = (await http.get(f"/v1/worlds/{world['id']}")).json()["facts"]
        assert facts == {"committed_step": 0, "kept": [0]}


async def test_a_world_that_is_not_played_ends_after_its_grace() -> None:
    limits = Limits(grace_ms=50)
    async with serving_worlds(limits=limits) as (gateway, http):
        world = await opened(http)
        async with asyncio.timeout(30):
            await gateway.host.drained()
        assert (await http.get(f"/v1/worlds/{world['id']}")).status_code == 410
