"""Synthetic engines for the roles of a duplex pipeline: no model, known cost.

They cost next to nothing and say as much as they are told to, so that what a load test
measures is everything around them. Their names say what they are.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pydantic

from protocol.arrays import array_of, array_payload
from protocol.payloads import Payload, PayloadType, audio_payload, text_payload
from protocol.schema import PayloadSchema
from workers.engine import EmitEvent, Engine, EngineSession, Turn, TurnResult

PIECE_MS = 120
CODES = PayloadSchema(PayloadType.CODEC_CODES, "<i4", (4, None), frozenset({"clause"}))


class NoOptions(pydantic.BaseModel):
    """Nothing to choose."""

    model_config = pydantic.ConfigDict(extra="forbid")


class ThinkOptions(pydantic.BaseModel):
    """How much a synthetic reply says."""

    model_config = pydantic.ConfigDict(extra="forbid")

    clauses: int = pydantic.Field(2, ge=1)


class SpeakOptions(pydantic.BaseModel):
    """How long a synthetic clause sounds."""

    model_config = pydantic.ConfigDict(extra="forbid")

    clause_ms: int = pydantic.Field(500, ge=1)


class _Synthetic(Engine):
    """What all three share: nothing to load and nothing to free."""

    def __init__(self, options: Any) -> None:
        self.options = options

    @classmethod
    def create(cls, options: Any) -> _Synthetic:
        """An engine with `options`."""
        return cls(options)

    async def load(self) -> None:
        """Nothing to load."""

    async def shutdown(self) -> None:
        """Nothing to free."""


class SyntheticListen(_Synthetic):
    """Takes audio and hears the same words in whatever is committed."""

    Options = NoOptions
    inputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.AUDIO})
    outputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.TEXT})

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """A session's ear."""
        return _Ear()


class SyntheticThink(_Synthetic):
    """Answers with `clauses` sentences of eight words, at once."""

    Options = ThinkOptions
    inputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.TEXT})
    outputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.TEXT})

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """A session's thoughts."""
        return _Thought(self.options.clauses)


class SyntheticSpeak(_Synthetic):
    """Says each clause as `clause_ms` of a quiet square wave, at once."""

    Options = SpeakOptions
    inputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.TEXT})
    outputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.AUDIO})

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """A session's voice."""
        return _Voice(self.options.clause_ms)


class SyntheticTalk(_Synthetic):
    """Makes of each clause a block of codec codes, 4 codebooks of 200 frames."""

    Options = NoOptions
    produces = (CODES,)
    inputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.TEXT})
    outputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.CODEC_CODES})

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """A session's talker."""
        return _Talker()


class SyntheticDecode(_Synthetic):
    """Makes sound of blocks of codec codes: every code becomes six samples of its value."""

    Options = NoOptions
    takes = (CODES,)
    inputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.CODEC_CODES})
    outputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.AUDIO})

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """A session's decoder."""
        return _Decoder()


class _Ear(EngineSession):
    def update(self, payload: Payload) -> None:
        """Audio is taken and not looked at."""

    def configure(self, settings: dict[str, Any]) -> None:
        """All settings are the same to it."""

    def signal(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Nothing is buffered, so nothing is cut or cleared."""
        return {}

    async def run(self, turn: Turn) -> TurnResult:
        """The words of a commit."""
        turn.emit(text_payload("Say something."))
        return TurnResult()

    def close(self) -> None:
        """Nothing is held."""


class _Thought(EngineSession):
    def __init__(self, clauses: int) -> None:
        self._clauses = clauses

    async def run(self, turn: Turn) -> TurnResult:
        """A reply, clause by clause."""
        for number in range(self._clauses):
            await turn.room()
            turn.emit(text_payload(f"This is clause number {number} of the reply. "))
        return TurnResult({"input_tokens": 1, "cached_tokens": 0, "output_tokens": self._clauses})

    def close(self) -> None:
        """Nothing is held."""


class _Voice(EngineSession):
    _wave = (b"\x00\x04" * 40 + b"\x00\xfc" * 40) * (PIECE_MS * 24 // 80)

    def __init__(self, clause_ms: int) -> None:
        self._clause_ms = clause_ms

    async def run(self, turn: Turn) -> TurnResult:
        """Sound for every clause."""
        audio_ms = 0
        async for payload in turn.inputs:
            left_ms = self._clause_ms
            while left_ms > 0:
                await turn.room()
                piece_ms = min(PIECE_MS, left_ms)
                left_ms -= piece_ms
                audio_ms += piece_ms
                pcm = self._wave[: piece_ms * 48]
                clause = payload.attributes["clause"]
                turn.emit(audio_payload(pcm, 24_000, clause=clause, clause_end=left_ms == 0))
        return TurnResult({"audio_ms": audio_ms, "synthesis_ms": 0.0})

    def close(self) -> None:
        """Nothing is held."""


class _Talker(EngineSession):
    async def run(self, turn: Turn) -> TurnResult:
        """Codes that depend on the clause, so that what is heard tells them apart."""
        async for payload in turn.inputs:
            clause = payload.attributes["clause"]
            codes = np.full((4, 200), 100 + clause, np.dtype("<i4"))
            await turn.room()
            turn.emit(array_payload(PayloadType.CODEC_CODES, codes, clause=clause))
        return TurnResult()

    def close(self) -> None:
        """Nothing is held."""


class _Decoder(EngineSession):
    async def run(self, turn: Turn) -> TurnResult:
        """Sound for every block of codes, which it reads where they lie."""
        audio_ms = 0
        async for payload in turn.inputs:
            pcm = np.repeat(array_of(payload).astype("<i2").ravel(), 6).tobytes()
            audio_ms += len(pcm) // 48
            clause = payload.attributes["clause"]
            await turn.room()
            turn.emit(audio_payload(pcm, 24_000, clause=clause, clause_end=True))
        return TurnResult({"audio_ms": audio_ms, "synthesis_ms": 0.0})

    def close(self) -> None:
        """Nothing is held."""
