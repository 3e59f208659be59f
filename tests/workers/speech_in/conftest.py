"""The real engine, loaded for each test that asks for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from workers.engines.speech_in import SpeechInEngine


@pytest.fixture
async def engine() -> AsyncIterator[SpeechInEngine]:
    engine = SpeechInEngine.create(SpeechInEngine.Options())
    await engine.load()
    yield engine
    await engine.shutdown()
