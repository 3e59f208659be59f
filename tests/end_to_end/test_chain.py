"""A pipeline whose sound is made in two steps: bytes between workers pass no gateway."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import numpy as np
import pytest

from antiphon.talk.realtime_client import RealtimeClient
from tests.deployment import Deployment

CONFIG = """
stages:
  listen: {engine: "loadtest.synthetic_voice:SyntheticListen"}
  think: {engine: "loadtest.synthetic_voice:SyntheticThink", clauses: 4}
  talk: {engine: "loadtest.synthetic_voice:SyntheticTalk"}
  decode: {engine: "loadtest.synthetic_voice:SyntheticDecode"}
pipelines:
  chain:
    kind: duplex
    required: true
    edges:
      - {from: listen, to: think, payload: text, delivery: full}
      - {from: think, to: talk, payload: text, delivery: chunk}
      - {from: talk, to: decode, payload: codec_codes, delivery: DELIVERY}
    outputs: {text: think, audio: decode}
    limits: {lead_ms: 60000}
    defaults: {voice: tone}
    voices: {tone: []}
"""


def serve(folder: Path, delivery: str) -> Deployment:
    config = folder / "chain.yaml"
    config.write_text(CONFIG.replace("DELIVERY", delivery))
    return Deployment(config, environment={"PYTHONPATH": str(Path.cwd())})


async def reply(url: str, modality: str = "audio") -> tuple[str, list[int]]:
    """The status of one reply, and the sample values heard, each once, in order."""
    pcm = b""
    async with RealtimeClient.open(url, model="chain") as client:
        await client.receive()
        response = {"output_modalities": [modality]}
        await client.send({"type": "response.create", "response": response})
        while True:
            event = (await client.receive()).event
            if event["type"] == "response.output_audio.delta":
                pcm += base64.b64decode(event["delta"])
            if event["type"] == "response.done":
                break
    heard = np.frombuffer(pcm, "<i2")
    order = [int(value) for value in dict.fromkeys(heard.tolist())]
    return event["response"]["status"], order


@pytest.mark.parametrize(("delivery", "connector"), [("chunk", "shm"), ("full", "inline")])
def test_codes_reach_the_decoder_in_order(tmp_path: Path, delivery: str, connector: str) -> None:
    with serve(tmp_path, delivery) as deployment:
        status, order = asyncio.run(reply(deployment.base_url))
        assert status == "completed"
        assert order == sorted(order)
        assert order[0] == 100
        samples = deployment.metrics()
        crossed = f'antiphon_edge_bytes_total{{connector="{connector}",edge="talk->decode"}}'
        assert samples[crossed] == len(order) * 4 * 200 * 4
        assert asyncio.run(reply(deployment.base_url, "text"))[0] == "completed"
        assert not [line for line in deployment.log if '"level": "error"' in line]


def test_a_reader_that_comes_back_reads_again(tmp_path: Path) -> None:
    with serve(tmp_path, "chunk") as deployment:
        assert asyncio.run(reply(deployment.base_url))[0] == "completed"
        deployment.kill("decode-0")
        deployment.until_ready(False)
        deployment.until_ready()
        assert asyncio.run(reply(deployment.base_url))[0] == "completed"
