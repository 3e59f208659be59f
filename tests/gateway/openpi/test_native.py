"""A robot's policy is also served over the native surface, as steps."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from gateway.surfaces.native.about import told
from protocol.openpi import from_parts, pack, to_parts
from protocol.payloads import Payload, PayloadType
from tests.gateway.native_client import opened, requests, stream
from tests.gateway.openpi.test_port import ARM
from tests.gateway.real_host import serving_kind
from tests.workers.vla.policies import HORIZON
from workers.engines.vla import VlaEngine, VlaOptions


def said(part: Payload) -> dict[str, Any]:
    """A payload as a client of that surface writes it."""
    return {
        "type": part.type.value,
        "data": bytes(part.data),
        "dtype": part.dtype,
        "shape": list(part.shape),
        "attributes": part.attributes,
    }


async def test_an_observation_is_a_step() -> None:
    engine = VlaEngine.create(VlaOptions(policy="tests.workers.vla.policies:Counting"))
    async with serving_kind(ARM, lambda _: engine) as it, requests(it.http) as http:
        session = await opened(http)
        async with stream(
            it.stream(session["id"]),
            "antiphon.msgpack",
            role="controller",
            secret=session["secret"],
        ) as client:
            observation = {"state": np.array([0.5]), "prompt": "go"}
            inputs = [said(part) for part in to_parts(PayloadType.OBSERVATION, observation)]
            step = {"type": "step", "step": 1, "inputs": inputs, "parameters": {"deadline_ms": 50}}
            await client.say("update", input=step)
            done = await client.until("step_done")
            pieces = [
                Payload(
                    PayloadType(piece["type"]),
                    piece["data"],
                    piece["dtype"],
                    tuple(piece["shape"]),
                    piece["attributes"],
                )
                for piece in done["outputs"]["actions"]
            ]
            assert from_parts(pieces)["actions"][0, 0] == 1.5
            assert pieces[0].attributes["batch"] == 1
            step = {**step, "step": 2, "parameters": {"deadline": 50}}
            await client.say("update", input=step)
            failed = await client.until("step_failed")
            assert failed["committed_step"] == 1


async def test_who_opens_a_session_is_told_what_its_policy_says_of_itself() -> None:
    engine = VlaEngine.create(VlaOptions(policy="tests.workers.vla.policies:Counting"))
    async with serving_kind(ARM, lambda _: engine) as it, requests(it.http) as http:
        session = await opened(http)
        low = {"dtype": "<f4", "shape": [2], "data": base64.b64encode(bytes(8)).decode()}
        assert session["about"] == {"act": {"metadata": {"horizon": HORIZON, "low": low}}}
        again = (await http.get(f"/v1/sessions/{session['id']}")).json()
        assert again["about"] == session["about"]


def test_what_a_policy_says_is_told_in_what_json_has() -> None:
    said = {
        "n": np.int64(3),
        "rate": np.float32(0.5),
        b"raw": [True, None, {"names": np.array(["a"])}],
    }
    about = {"act": {"metadata": pack(said), "more": 1}, "see": {}}
    names = {"dtype": "<U1", "shape": (1,), "data": "a".encode("utf-32-le")}
    metadata = {"n": 3, "rate": 0.5, "raw": [True, None, {"names": names}]}
    assert told(about) == {"act": {"metadata": metadata, "more": 1}}
    assert told({"world": {"width": 64}, "other": {}}) == {"world": {"width": 64}}
