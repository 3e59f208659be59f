"""Field cases with the real model behind the stage that thinks."""

from __future__ import annotations

import pytest

from gateway.health import readiness
from sessions.duplex.events import (
    CreateItem,
    CreateResponse,
    Item,
    ItemStatus,
    Part,
    PartKind,
    ResponseCreated,
    ResponseDone,
    ResponseStatus,
    Role,
)
from tests.gateway.serving import Client, VoiceEngine, served
from tests.sessions.harness import voice_pipeline
from workers.engine import Engine
from workers.engines.ar import ArEngine, ArOptions

PLACES = 8
CYCLES = 50
QUESTION = "What is the capital of France?"


def make_engine(stage: str) -> Engine:
    """The real engine with no more places than the pipeline, and synthetic ones beside it."""
    if stage == "think":
        return ArEngine.create(ArOptions(sessions=PLACES, context_tokens=512))
    return VoiceEngine(stage)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_f01_the_real_engine_takes_sessions_for_ever_that_vanish() -> None:
    # A server kept each finished session's cache; soon every request failed, its health was 200.
    async with served({"voice": voice_pipeline(sessions=PLACES)}, make_engine) as it:
        for cycle in range(CYCLES):
            client = Client()
            attachment = await it.host.open(
                pipeline="voice", tenant="local", secret="s", on_output=client.on_output
            )
            assert readiness(it.host).ready
            part = Part(PartKind.INPUT_TEXT, QUESTION)
            attachment.send(CreateItem(Item("asked", Role.USER, ItemStatus.COMPLETED, [part])))
            attachment.send(CreateResponse(output_modalities=("text",), max_output_tokens=8))
            if cycle % 2:
                # It vanishes in the middle of its answer, which then ends without it.
                await client.until(ResponseCreated)
            else:
                response = (await client.until(ResponseDone)).response
                assert response.status is not ResponseStatus.FAILED, response.error
                assert response.output[0].parts[0].text
            attachment.detach()
            held = min(cycle + 1, PLACES)
            told = readiness(it.host, "voice", capacity=True)
            assert told.body["pipelines"]["voice"]["sessions"] == held
            # Whoever comes next takes a free place, or that of one who left.
            assert (told.ready, told.body["capacity"]) == (True, "free")
