"""What a world really says, held against the documents that describe it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.surfaces.worlds.documents import DOCUMENTS
from tests.gateway.json_schema import check, resolved
from tests.gateway.worlds.player import controlled, opened, serving_worlds


def check_body(value: Any, name: str) -> None:
    check(value, DOCUMENTS.json_schema["$defs"][name], DOCUMENTS.json_schema)


def check_frame(frame: dict[str, Any]) -> None:
    schema = DOCUMENTS.json_schema
    mapping = schema["$defs"]["ServerFrame"]["discriminator"]["mapping"]
    said = {name: value for name, value in frame.items() if name != "data"}
    check(said, resolved(schema, mapping[frame["type"]]), schema)


async def test_what_a_player_is_told() -> None:
    async with serving_worlds() as (gateway, http):
        world = await opened(http)
        async with controlled(gateway.http, world) as it:
            for said, told in (
                ({"kind": "play"}, "playing"),
                ({"kind": "pause"}, "paused"),
                ({"kind": "step"}, "frame"),
                ({"kind": "scene", "scene": world["world"]["scenes"][0]}, None),
                ({"kind": "step"}, "scene_changed"),
                ({"kind": "checkpoint"}, "checkpoint_kept"),
                ({"kind": "hold", "sequence": 1, "keys": ["none"]}, "refused"),
                ({"kind": "ping"}, "pong"),
                ({"kind": "reset"}, "was_reset"),
                ({"kind": "close"}, "session_ended"),
            ):
                await it.say(**said)
                if told is not None:
                    await it.until(told)
        for frame in it.frames:
            check_frame(frame)
        assert len({frame["type"] for frame in it.frames}) >= 10


async def test_what_requests_are_answered() -> None:
    async with serving_worlds() as (_, http):
        assert (await http.get("/v1/worlds/schema")).json() == DOCUMENTS.json_schema
        assert (await http.get("/v1/worlds/asyncapi.json")).json() == DOCUMENTS.asyncapi
        world = await opened(http)
        check_body(world, "WorldBody")
        path = f"/v1/worlds/{world['id']}"
        check_body((await http.post(f"{path}/step", json={"step": 1})).json(), "StepAnswer")
        several = {"worlds": [{"id": world["id"]}, {"id": "none"}]}
        check_body((await http.post("/v1/worlds/step", json=several)).json(), "BatchAnswers")
        check_body((await http.post(f"{path}/checkpoint")).json(), "ChangeAnswer")
        check_body((await http.post(f"{path}/rewind", json={"step": 2})).json(), "ChangeAnswer")
        check_body((await http.get(path)).json(), "WorldBody")


def test_the_page_names_everything() -> None:
    page = (Path(__file__).parents[3] / "docs" / "worlds.md").read_text()
    kinds = (*DOCUMENTS.client_frames, *DOCUMENTS.server_frames)
    tags = {str(struct.__struct_config__.tag) for struct in kinds}
    assert {tag for tag in tags if f"`{tag}`" not in page} == set()
