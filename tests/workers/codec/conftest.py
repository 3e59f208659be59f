"""The real dictionary and the real voice, loaded once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from workers.engines.codec import CodecEngine, CodecOptions
from workers.engines.codec.letters import LetterReader
from workers.engines.codec.lexicon import Lexicon, read_dictionary
from workers.models import locate


@pytest.fixture(scope="session")
def lexicon() -> Lexicon:
    return Lexicon(read_dictionary(locate("cmudict")), LetterReader(locate("g2p-en")))


@pytest.fixture(scope="session")
def engine() -> Iterator[CodecEngine]:
    """The default voice without its random variation, so that two takes are equal."""
    engine = CodecEngine.create(CodecOptions(noise_scale=0, noise_w=0))
    asyncio.run(engine.load())
    yield engine
    asyncio.run(engine.shutdown())
