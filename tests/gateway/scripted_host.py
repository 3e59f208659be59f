"""A synthetic session host for tests of surfaces: it does what a test's script says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from gateway.cameras import Seen
from gateway.hosting import (
    OnOutput,
    OnPosition,
    PipelineHealth,
    SessionDescription,
    SessionHistory,
    SessionSummary,
    StageHealth,
    WaitingSummary,
    WorkerSummary,
)
from protocol.errors import AntiphonError, ErrorInfo, NotFound
from sessions.client import Answered, Attached, Role, SessionCreated, SessionEnded, Verb
from sessions.duplex.events import ClientOutput, ClientVerb
from sessions.duplex.settings import DuplexSettings
from sessions.pipeline import Limits, Pipeline

EXPIRES_AT_S = 1_900_000_000

Script = Callable[["ScriptedAttachment", ClientVerb], None]


class ScriptedAttachment:
    """Records what a surface does, and puts out what a test says."""

    def __init__(self, session: str, on_output: OnOutput | None, script: Script) -> None:
        self._session = session
        self._on_output = on_output
        self._script = script
        self._sequence = 0
        self.tenant = ""
        self.pipeline = ""
        self.role = Role.CONTROLLER
        self.detached = False
        self.resumable = False
        self.verbs: list[Any] = []
        self.blocked: list[bool] = []
        self.acknowledged = 0
        self.closed: str | None = None
        self.ended = False
        self.gone = asyncio.Event()
        self.was_blocked = asyncio.Event()
        self.roomy = asyncio.Event()
        self.roomy.set()
        self.wanted_room = asyncio.Event()
        self.got = asyncio.Event()
        """Set with every verb."""

    @property
    def session(self) -> str:
        return self._session

    def put_out(self, output: Any) -> None:
        self._sequence += 1
        if self._on_output is not None:
            self._on_output(self._sequence, output)

    def send(self, verb: Verb, command: str | None = None) -> None:
        said = cast(ClientVerb, verb)
        self.verbs.append(said)
        self.got.set()
        self._script(self, said)

    def misspoke(self, command: str, error: ErrorInfo) -> None:
        self.put_out(Answered(command, error))

    def has(self, through: int) -> None:
        self.acknowledged = through

    @property
    def has_room(self) -> bool:
        return self.roomy.is_set()

    async def room(self) -> None:
        self.wanted_room.set()
        await self.roomy.wait()

    def set_blocked(self, blocked: bool) -> None:
        self.blocked.append(blocked)
        self.was_blocked.set()

    def superseded(self, count: int) -> None:
        pass

    def detach(self) -> None:
        self.detached = True
        self.gone.set()
        if not self.resumable:
            self.close("client")

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
        self.pipelines: Mapping[str, Pipeline] = {
            "voice": Pipeline("voice", ("listen",), (), {"text": "listen"})
        }
        self.kind = "duplex"
        """Of all sessions."""
        self.draining = False
        self.holds_lease = True
        self.script = script
        self.open_error: AntiphonError | None = None
        self.queue: Callable[[OnPosition], Awaitable[None]] | None = None
        """What an open waits for first."""
        self.asked = asyncio.Event()
        self.attachments: list[ScriptedAttachment] = []
        self.stages = {"listen": StageHealth.READY}
        self.required = True
        self.session_limit = 2
        self.missed: list[ClientOutput] = []
        """What a client that attaches is told again."""
        self.attached = asyncio.Event()
        self.overview_changed = asyncio.Event()
        self.looks = 0
        """How often somebody asked for all sessions."""

    def resolve(self, model: str | None) -> str:
        if model not in (None, "voice", "gpt-realtime"):
            raise NotFound("No such model.", field="model", code="model_not_found")
        return "voice"

    async def open(
        self,
        *,
        pipeline: str,
        tenant: str,
        settings_patch: dict[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        priority: int | None = None,
        control: Mapping[str, Any] | None = None,
        secret: str | None = None,
        on_output: OnOutput | None = None,
        on_position: OnPosition | None = None,
        fork: str | None = None,
    ) -> ScriptedAttachment:
        self.asked.set()
        if self.queue is not None:
            assert on_position is not None
            await self.queue(on_position)
        if self.open_error is not None:
            raise self.open_error
        session = f"sess_{len(self.attachments)}"
        attachment = ScriptedAttachment(session, on_output, self.script)
        attachment.tenant, attachment.pipeline = tenant, pipeline
        attachment.resumable = secret is not None
        self.attachments.append(attachment)
        attachment.put_out(SessionCreated(session, pipeline, DuplexSettings(), EXPIRES_AT_S))
        return attachment

    def health(self) -> list[PipelineHealth]:
        held = sum(not attachment.ended for attachment in self.attachments)
        full = held >= self.session_limit
        return [PipelineHealth("voice", self.required, self.stages, held, self.session_limit, full)]

    def sessions(self, most: int | None = None) -> list[SessionSummary]:
        self.looks += 1
        return [
            SessionSummary(
                entry.session, "voice", self.kind, entry.tenant, "active", 1, 0, 1.5, 0.5
            )
            for entry in self.attachments
            if not entry.ended
        ]

    def waiting(self, most: int | None = None) -> list[WaitingSummary]:
        return [WaitingSummary("voice", "local", 0, 1, False, 2.5, None, "Full.")]

    def workers(self) -> list[WorkerSummary]:
        return [WorkerSummary("listen", "listen-0", "inc-1", "ready", 0, 0, 7, 1024)]

    async def attach(
        self,
        session: str,
        *,
        tenant: str,
        role: Role,
        secret: str | None,
        cursor: int | None,
        on_output: OnOutput,
    ) -> tuple[ScriptedAttachment, Attached]:
        opened = self.summary(session, tenant)
        attachment = ScriptedAttachment(session, on_output, self.script)
        attachment.tenant, attachment.pipeline, attachment.role = tenant, opened.pipeline, role
        attachment.resumable = True
        last = len(self.missed)
        attached = Attached(
            session, "voice", DuplexSettings(), EXPIRES_AT_S, Limits(), last, None, role, None, "s2"
        )
        self.attachments.append(attachment)
        self.attached.set()
        on_output(last, attached)
        for output in self.missed:
            attachment.put_out(output)
        return attachment, attached

    async def command(self, session: str, tenant: str, verb: Verb, command: str) -> Answered:
        raise self._no(session)

    def summary(self, session: str, tenant: str | None) -> SessionSummary:
        for entry in self.sessions():
            if entry.id == session and tenant in (None, entry.tenant):
                return entry
        raise self._no(session)

    def history(self, session: str) -> SessionHistory:
        return SessionHistory(self.summary(session, None), {"dropped": 0, "entries": []})

    def describe(self, session: str, tenant: str) -> SessionDescription:
        summary = self.summary(session, tenant)
        return SessionDescription(summary, DuplexSettings(), Limits(), EXPIRES_AT_S)

    def ended(self, session: str, tenant: str) -> bool:
        return any(
            a.session == session and a.tenant == tenant and a.closed is not None
            for a in self.attachments
        )

    def close_session(self, session: str, tenant: str | None = None) -> None:
        for entry in self.attachments:
            if entry.session == session and not entry.ended:
                entry.end("admin")
                return
        raise self._no(session)

    def evict_session(self, session: str) -> None:
        raise self._no(session)

    async def seen(self, session: str) -> Seen:
        raise self._no(session)

    def stop_session(self, session: str, stopped: bool) -> bool:
        return stopped

    def stop_robots(self, pipeline: str | None, stopped: bool) -> dict[str, list[str]]:
        return {}

    async def park_session(self, session: str) -> tuple[tuple[str, ...], dict[str, str]]:
        raise self._no(session)

    async def restore_session(self, session: str) -> tuple[dict[str, str], dict[str, str]]:
        raise self._no(session)

    @staticmethod
    def _no(session: str) -> NotFound:
        return NotFound(f"there is no session {session!r}", code="session_not_found")

    def drain(self) -> None:
        self.draining = True
        self.overview_changed.set()
        for entry in self.attachments:
            entry.end("drained")
