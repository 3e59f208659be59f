"""The AR engine and the choice of its back end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Protocol

import pydantic

from protocol.errors import InvalidRequest
from protocol.payloads import PayloadType
from workers.engine import DeviceUse, EmitEvent, Engine, EngineSession
from workers.engines.ar.openai import OpenAiBackend
from workers.engines.ar.options import ArOptions


class Backend(Protocol):
    """What generates the text."""

    async def load(self) -> None:
        """Get ready for sessions."""

    def devices(self) -> dict[str, DeviceUse]:
        """What it holds for all sessions together."""

    def declare(self) -> dict[str, int]:
        """The most bytes that a session holds, by device."""

    def open(self) -> EngineSession:
        """A new session; raises CapacityExceeded when there is no room."""

    def weights(self) -> str:
        """What a snapshot fits; empty where nothing is restored."""

    async def restore(self, path: Path) -> EngineSession:
        """The session of the snapshot at `path`.

        Raises as `open` does, and SessionStateLost for a snapshot that it cannot read.
        """

    async def shutdown(self) -> None:
        """Free everything. Sessions are closed before."""


class ArEngine(Engine):
    """Text of a reply from the conversation so far, piece by piece.

    A turn takes one conversation payload and the parameters `instructions` (str) and
    `max_output_tokens` (int or None). Its usage names `input_tokens`, `cached_tokens`
    (of those, resident and not read again), `output_tokens`, `finish_reason` ("stop"
    or "length") and, where the conversation no longer fits, `dropped_messages`.
    """

    Options: ClassVar[type[pydantic.BaseModel]] = ArOptions
    inputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.TEXT})
    outputs: ClassVar[frozenset[PayloadType]] = frozenset({PayloadType.TEXT})

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @classmethod
    def create(cls, options: ArOptions) -> ArEngine:
        """An engine with the back end that `options` names. Nothing is loaded yet."""
        if options.backend == "openai":
            return cls(OpenAiBackend(options))
        # The library takes a second to import; a remote back end does not need it.
        from workers.engines.ar.llamacpp import LlamaBackend

        return cls(LlamaBackend(options))

    async def load(self) -> None:
        """Load the model, or get ready to talk to its server."""
        await self._backend.load()

    def devices(self) -> dict[str, DeviceUse]:
        """The contexts of a local model; a remote one's are its server's."""
        return self._backend.devices()

    def declare(self, settings: dict[str, Any]) -> dict[str, int]:
        """A session's context, in full. Raises InvalidRequest for any setting."""
        _refuse(settings)
        return self._backend.declare()

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        """A session with a place of its own.

        Raises InvalidRequest for any setting, there are none, and CapacityExceeded
        when all places are taken.
        """
        _refuse(settings)
        return self._backend.open()

    def weights(self) -> str:
        """Of a local model: its file, and what else decides how a context is read."""
        return self._backend.weights()

    async def restore(
        self, session: str, settings: dict[str, Any], emit: EmitEvent, path: Path
    ) -> EngineSession:
        """A session whose conversation so far is resident again.

        Raises as `open` does, SessionStateLost for a snapshot that it cannot read, and
        InvalidRequest for a remote model.
        """
        _refuse(settings)
        return await self._backend.restore(path)

    async def shutdown(self) -> None:
        """Stop what runs and free the model."""
        await self._backend.shutdown()


def _refuse(settings: dict[str, Any]) -> None:
    if settings:
        raise InvalidRequest("an AR stage has no session settings", field=min(settings))
