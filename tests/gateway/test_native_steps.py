"""Step loops and sessions of one turn on the native surface, over the real host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from loadtest.synthetic_step import StepOptions, SyntheticStep, checksum_after, checksum_of
from loadtest.synthetic_voice import SyntheticThink, ThinkOptions
from protocol.arrays import array_payload
from protocol.payloads import Payload, PayloadType
from sessions.pipeline import Kind, Limits, Pipeline
from tests.gateway.native_client import opened, requests, stream
from tests.gateway.real_host import serving_kind
from workers.engine import Engine

WORLD = Pipeline("game", ("world",), (), {"frames": "world"}, kind=Kind.WORLD, limits=Limits())
ONCE = Pipeline("once", ("think",), (), {"text": "think"}, kind=Kind.ONE_SHOT, limits=Limits())


@asynccontextmanager
async def serving(
    pipeline: Pipeline, engine: Engine
) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    async with serving_kind(pipeline, lambda _: engine) as it, requests(it.http) as http:
        yield http, f"ws://127.0.0.1:{it.port}/v1/sessions"


def held(*keys: int) -> Payload:
    return array_payload(PayloadType.ACTIONS, np.array(keys, "<i4"))


def step(number: int, action: Payload) -> dict[str, Any]:
    data = {"type": "actions", "data": action.data, "dtype": "<i4", "shape": list(action.shape)}
    return {"type": "step", "step": number, "inputs": [data]}


async def test_f5_a_step_whose_answer_was_lost_is_not_done_twice() -> None:
    async with serving(WORLD, SyntheticStep(StepOptions())) as (http, url):
        session = await opened(http)
        assert (session["kind"], session["facts"]) == ("world", {"committed_step": 0})
        address = f"{url}/{session['id']}/stream"
        async with stream(
            address, "antiphon.msgpack", role="controller", secret=session["secret"]
        ) as first:
            attached = await first.until("attached")
            assert attached["snapshot"]["committed_step"] == 0
            await first.say("update", id="s1", input=step(1, held(7)))
            done = await first.until("step_done")
        async with stream(
            address, "antiphon.msgpack", role="controller", secret=attached["secret"]
        ) as second:
            assert (await second.until("attached"))["snapshot"]["committed_step"] == 1
            await second.say("update", id="s1", input=step(1, held(7)))
            assert (await second.until("answer"))["id"] == "s1"
            await second.say("update", input=step(1, held(7)))
            again = await second.until("step_done")
            assert again["outputs"] == done["outputs"]
            await second.say("update", ref="mine", input=step(3, held(7)))
            failed = await second.until("step_failed")
            assert (failed["committed_step"], failed["ref"]) == (1, "mine")
            assert failed["error"]["code"] == "step_out_of_order"
            assert failed["error"]["field"] == "input.step"
            await second.say("update", input=step(2, held(8)))
            done = await second.until("step_done")
            (frame,) = done["outputs"]["frames"]
            made = Payload(PayloadType(frame["type"]), frame["data"], frame["dtype"])
            made = Payload(made.type, made.data, made.dtype, tuple(frame["shape"]))
            assert checksum_of(made) == checksum_after([[held(7)], [held(8)]])
            status = (await http.get(f"/v1/sessions/{session['id']}")).json()
            assert status["facts"] == {"committed_step": 2}
            await second.say("signal", signal={"type": "reset"})
            assert (await second.until("was_reset"))["committed_step"] == 0


@pytest.mark.parametrize(
    ("path", "said", "field"),
    [
        ("update", {"input": {"type": "audio", "pcm": ""}}, "input.type"),
        ("signal", {"signal": {"type": "commit"}}, "signal.type"),
    ],
)
async def test_what_a_kind_does_not_take_is_refused_by_its_name(
    path: str, said: dict[str, Any], field: str
) -> None:
    async with serving(WORLD, SyntheticStep(StepOptions())) as (http, url):
        session = await opened(http)
        answer = await http.post(f"/v1/sessions/{session['id']}/{path}", json=said)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported", field)
        async with stream(
            f"{url}/{session['id']}/stream", role="controller", secret=session["secret"]
        ) as client:
            await client.say("update" if path == "update" else "signal", id="c", **said)
            assert (await client.until("answer"))["error"]["field"] == field


async def test_a_session_of_one_turn_gives_its_answer_and_ends() -> None:
    async with serving(ONCE, SyntheticThink(ThinkOptions(clauses=2))) as (http, url):
        session = await opened(http)
        async with stream(
            f"{url}/{session['id']}/stream", role="controller", secret=session["secret"]
        ) as client:
            text = {"type": "text", "data": "SGVsbG8u"}
            await client.say("update", input={"type": "request", "inputs": [text]})
            await client.until("piece")
            await client.until("request_done")
            assert (await client.until("session_ended"))["reason"] == "completed"
            assert await client.closed() == (1000, "completed")
