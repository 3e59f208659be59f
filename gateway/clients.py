"""The clients of one session in its gateway: who listens, who waits for what."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from gateway.hosting import OnOutput
from gateway.state_moves import StateMoves
from protocol.errors import AntiphonError, ErrorInfo, raised
from sessions.actions import (
    AttachRefused,
    ClientBlocked,
    ClientHas,
    ClientMisspoke,
    ClientSaid,
    CloseRequested,
    Detached,
    Event,
    ToClient,
)
from sessions.client import (
    Answered,
    Attached,
    LetGo,
    SessionCreated,
    Verb,
)
from sessions.lifecycle import CloseReason
from sessions.session import Session

_log = structlog.get_logger(__name__)


class Clients:
    """Listeners and waiting calls of one session; `opened_at_ms` is monotonic.

    `turns` says how many turns the session has had.
    """

    def __init__(
        self,
        session: Session,
        opened: asyncio.Future[Clients],
        opened_at_ms: float,
        turns: Callable[[], int],
    ) -> None:
        self.session = session
        self.turns = turns
        self.opened = opened
        self.opened_at_ms = opened_at_ms
        self.announced = False
        """Whether a client was told that the session is open."""
        self.room = asyncio.Event()
        """Set while the session takes verbs."""
        self.room.set()
        self.released = asyncio.Event()
        """Set once nothing of the session is held."""
        self.listeners: dict[str, OnOutput] = {}
        self.arrivals: dict[str, asyncio.Future[Attached]] = {}
        self.answers: dict[str, list[asyncio.Future[Answered]]] = {}
        """Who waits for the answer to each command that is being carried out; a command stays
        here until it is answered, also when nobody waits for that any more."""
        self.moves = StateMoves()

    def hold(self, hold: bool) -> None:
        """The session takes no verbs for now, or takes them again."""
        if hold:
            self.room.clear()
        else:
            self.room.set()

    def tell(self, action: ToClient) -> None:
        """Hand an output to whom it is for: to all, but to those who still wait to be let in.

        A listener that fails fails the session, if it has control of it; an observer is
        let go, and told so.
        """
        output = action.output
        if action.to is not None:
            self._tell_one(action.to, action.sequence, output)
            return
        if isinstance(output, SessionCreated) and not self.opened.done():
            self.announced = True
            self.opened.set_result(self)
        self.moves.told(output)
        if isinstance(output, Answered):
            for answer in self.answers.pop(output.command, []):
                if not answer.done():
                    answer.set_result(output)
        for attachment in list(self.listeners):
            if attachment not in self.arrivals:
                self._call(attachment, action.sequence, output)

    def refuse(self, action: AttachRefused) -> None:
        """A client that wanted to attach does not."""
        arrival = self.arrivals.pop(action.attachment, None)
        if arrival is not None and not arrival.done():
            arrival.set_exception(raised(action.error))
        self.listeners.pop(action.attachment, None)

    def end(self, error: AntiphonError) -> None:
        """Nothing more comes: whoever waits for something is told so."""
        self.room.set()
        self.released.set()
        waiting: list[asyncio.Future[Any]] = [*self.arrivals.values()]
        for answers in self.answers.values():
            waiting += answers
        waiting += self.moves.end()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        self.arrivals.clear()
        self.answers.clear()
        self.listeners.clear()

    def _tell_one(self, attachment: str, sequence: int, output: Any) -> None:
        if isinstance(output, Attached):
            arrival = self.arrivals.pop(attachment, None)
            if arrival is not None and not arrival.done():
                arrival.set_result(output)
        self._call(attachment, sequence, output)
        if isinstance(output, LetGo):
            self.listeners.pop(attachment, None)

    def _call(self, attachment: str, sequence: int, output: Any) -> None:
        listener = self.listeners.get(attachment)
        if listener is None:
            return
        try:
            listener(sequence, output)
        except Exception:
            if not self.session.observed_by(attachment):
                raise
            _log.exception("observer_failed", session=self.session.identity.session)
            del self.listeners[attachment]
            with contextlib.suppress(Exception):
                # Nothing may be left out silently: its connection ends here.
                listener(sequence, LetGo("failed"))


class Handler(Protocol):
    """Where events of a session go."""

    def handle(self, session: str, event: Event) -> None:
        """Feed `event` to the session and carry out what it asks for."""

    def has_room(self, session: str) -> bool:
        """Whether the session takes more verbs, or has ended."""

    async def room(self, session: str) -> None:
        """Wait until the session takes more verbs, or has ended."""

    def superseded(self, session: str, count: int) -> None:
        """So many inputs of the session were answered with what a newer one gave."""


class HostedAttachment:
    """A client's hold on its session."""

    def __init__(
        self, host: Handler, session: str, name: str, forget: Callable[[str], None]
    ) -> None:
        self._host = host
        self._session = session
        self._name = name
        self._forget = forget

    @property
    def session(self) -> str:
        """The session's id."""
        return self._session

    def send(self, verb: Verb, command: str | None = None) -> None:
        """Hand a verb to the session; after its end it goes nowhere."""
        self._host.handle(self._session, ClientSaid(verb, self._name, command))

    def misspoke(self, command: str, error: ErrorInfo) -> None:
        """What the client said with this command id is no verb: that is its answer, if it has
        none yet."""
        self._host.handle(self._session, ClientMisspoke(self._name, command, error))

    def has(self, through: int) -> None:
        """The client has all outputs up to number `through`: they need not be kept for it."""
        self._host.handle(self._session, ClientHas(self._name, through))

    @property
    def has_room(self) -> bool:
        """Whether the session takes more verbs."""
        return self._host.has_room(self._session)

    async def room(self) -> None:
        """Wait until the session takes more verbs."""
        await self._host.room(self._session)

    def set_blocked(self, blocked: bool) -> None:
        """The client's egress queue is full, or has room again."""
        self._host.handle(self._session, ClientBlocked(blocked, self._name))

    def superseded(self, count: int) -> None:
        """So many of the client's inputs were answered with what a newer one gave."""
        self._host.superseded(self._session, count)

    def detach(self) -> None:
        """The client is gone, and may come back; idempotent."""
        self._forget(self._name)
        self._host.handle(self._session, Detached(self._name))

    def close(self, reason: str) -> None:
        """Close the session, if this client has control; clean-up goes on after the call."""
        self._host.handle(self._session, CloseRequested(CloseReason(reason), self._name))
