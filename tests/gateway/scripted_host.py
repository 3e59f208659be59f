"""A synthetic session host for tests of surfaces: it does what a test's script says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from gateway.hosting import (
    OnOutput,
    PipelineHealth,
    SessionSummary,
    StageHealth,
    WorkerSummary,
)
from protocol.errors import AntiphonError, NotFound
from sessions.duplex.events import ClientOutput, ClientVerb, SessionCreated, SessionEnded
from sessions.duplex.settings import DuplexSettings

EXPIRES_AT_S = 1_900_000_000

Script = Callable[["ScriptedAttachment", ClientVerb], None]


class ScriptedAttachment:
    """Records what a surface does, and puts out what a test says."""

    def __init__(self, session: str, on_output: OnOutput, script: Script) -> None:
        self._session = session
        self._on_output = on_output
        self._script = script
        self._sequence = 0
        self.tenant = ""
        self.pipeline = ""
        self.verbs: list[ClientVerb] = []
        self.blocked: list[bool] = []
        self.closed: str | None = None
        self.ended = False
        self.gone = asyncio.Event()
        self.has_room = asyncio.Event()
        self.has_room.set()

    @property
    def session(self) -> str:
        return self._session

    def put_out(self, output: ClientOutput) -> None:
        self._sequence += 1
        self._on_output(self._sequence, output)

    def send(self, verb: ClientVerb) -> None:
        self.verbs.append(verb)
        self._script(self, verb)

    async def room(self) -> None:
        await self.has_room.wait()

    def set_blocked(self, blocked: bool) -> None:
        self.blocked.append(blocked)

    def close(self, reason: str) -> None:
        if self.closed is None:
            self.closed = reason
            self.end(reason)

    def end(self, reason: str) -> None:
        if not self.ended:
            self.ended = True
            self.gone.set()
            self.put_out(SessionEnded(reason))


class ScriptedHost:
    """One pipeline, `voice`, with alias `gpt-realtime`."""

    def __init__(self, script: Script = lambda attachment, verb: None) -> None:
        self.pipelines: Mapping[str, Any] = {"voice": None}
        self.draining = False
        self.holds_lease = True
        self.script = script
        self.open_error: AntiphonError | None = None
        self.attachments: list[ScriptedAttachment] = []
        self.stages = {"listen": StageHealth.READY}
        self.required = True
        self.session_limit = 2

    def resolve(self, model: str | None) -> str:
        if model not in (None, "voice", "gpt-realtime"):
            raise NotFound("No such model.", field="model", code="model_not_found")
        return "voice"

    async def open(
        self,
        *,
        pipeline: str,
        tenant: str,
        settings_patch: dict[str, Any] | None,
        on_output: OnOutput,
    ) -> ScriptedAttachment:
        if self.open_error is not None:
            raise self.open_error
        session = f"sess_{len(self.attachments)}"
        attachment = ScriptedAttachment(session, on_output, self.script)
        attachment.tenant, attachment.pipeline = tenant, pipeline
        self.attachments.append(attachment)
        attachment.put_out(SessionCreated(session, pipeline, DuplexSettings(), EXPIRES_AT_S))
        return attachment

    def health(self) -> list[PipelineHealth]:
        held = sum(not attachment.ended for attachment in self.attachments)
        return [PipelineHealth("voice", self.required, self.stages, held, self.session_limit)]

    def sessions(self) -> list[SessionSummary]:
        return [
            SessionSummary(entry.session, "voice", "duplex", entry.tenant, "active", 1, 0, 1.5, 0.5)
            for entry in self.attachments
            if not entry.ended
        ]

    def workers(self) -> list[WorkerSummary]:
        return [WorkerSummary("listen", "listen-0", "inc-1", "ready", 0, 0, 7, 1024)]

    def close_session(self, session: str) -> bool:
        for entry in self.attachments:
            if entry.session == session and not entry.ended:
                entry.end("admin")
                return True
        return False

    def drain(self) -> None:
        self.draining = True
        for entry in self.attachments:
            entry.end("drained")
