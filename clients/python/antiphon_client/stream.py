"""The native stream as its client sees it, free of I/O: what to send, and what came of it.

One machine is one session through all of its connections. Each connection begins with
`attach()`; frames that come go into `receive()`, frames to send come out of `take()`, and
`dropped()` says that the connection is gone. Commands have ids, so that those that were not
answered can be sent again on the next connection and are carried out once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from antiphon_client import told
from antiphon_client.errors import (
    AntiphonError,
    ControlLost,
    ProtocolError,
    Refused,
    SessionEnded,
    error_of,
)
from antiphon_client.limits import MAX_FRAME_BYTES, MAX_ID_CHARS

SUBPROTOCOL = "antiphon.msgpack"

MAX_COMMANDS = 64
"""Commands without an answer; the gateway remembers the last 256 of a session."""
MAX_COMMAND_BYTES = 32 * 1024 * 1024
"""Of all commands without an answer, which are kept here to be sent again."""
REMEMBERED_COMMANDS = 256
"""What the gateway answers again instead of doing it again: no more can be without an answer, not
even with those that wait for no room."""
ACKNOWLEDGE_OUTPUTS = 32
"""After so many outputs that were read the gateway is told that it need not keep them."""

# An output that a connection of its own gets bears the number of the output before it.
_UNNUMBERED = frozenset({"attached", "let_go", "refused", "error"})

# Close codes after which coming back is of no use.
_FINAL = frozenset({1000, 1008, 4001})

# Close codes that say what is wrong with a message, which would be sent again.
_UNREADABLE = frozenset({1003, 1007, 1009})

# It becomes a part of paths.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")

_VISIBLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


@dataclass(frozen=True)
class Output:
    """What the session put out as number `sequence`. `fields` are its own members."""

    type: str
    sequence: int
    cursor: str
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A member, or `default` where there is none."""
        return self.fields.get(name, default)


@dataclass(frozen=True)
class Attached:
    """A connection controls the session. `fields` are those of the frame, without the secret;
    `again` tells whether this is another connection than the first."""

    fields: Mapping[str, Any]
    again: bool


@dataclass(frozen=True)
class Lost:
    """The outputs from `first` to `last` are gone."""

    first: int
    last: int


@dataclass(frozen=True)
class Answered:
    """The one answer to a command."""

    id: str
    result: Mapping[str, Any]
    error: AntiphonError | None


@dataclass(frozen=True)
class Over:
    """Nothing more will come, for this reason."""

    error: AntiphonError


Event = Output | Attached | Lost | Answered | Over


@dataclass(frozen=True)
class Token:
    """What it takes to come back to a session: keep it as you would a password.

    `cursor` is the last output that was read; None: nothing is told again.
    """

    session: str
    secret: str = field(repr=False)
    cursor: str | None = None


def token_of(opened: Any) -> Token:
    """Of the answer to an open. Raises ProtocolError for one that names no session."""
    answer = told.fields(opened, "the answer to an open")
    session = told.text(answer.get("id"), "id")
    if not _NAME.fullmatch(session):
        raise ProtocolError(f"id names no session: {session!r:.100}")
    return Token(session, told.text(answer.get("secret"), "secret"))


@dataclass
class _Command:
    frame: bytes
    urgent: bool


class StreamMachine:
    """One session's stream. `new_id` makes a command's id, of visible ASCII."""

    def __init__(self, token: Token, new_id: Callable[[], str]) -> None:
        self.session = token.session
        self.limits: Mapping[str, Any] = {}
        """The session's, in seconds, once attached."""
        self.over: AntiphonError | None = None
        """Why nothing more will come."""
        self._secret = token.secret
        self._cursor = token.cursor
        self._read = token.cursor
        self._new_id = new_id
        self._last: int | None = None
        self.attachments = 0
        """How many connections controlled the session so far."""
        self._attached = False
        self._stalled = False
        self._commands: dict[str, _Command] = {}
        self._command_bytes = 0
        # Ids of commands that are to be sent, each of them in `_commands`, which bounds both.
        self._out: dict[str, None] = {}
        self._urgent: dict[str, None] = {}
        self._have: str | None = None
        """The cursor to be acknowledged; the newest takes the place of the one before."""
        self._unacknowledged = 0
        self._closing = False
        self._close_said = False

    @property
    def token(self) -> Token:
        """What it takes to come back, and be told all that was not read yet."""
        return Token(self.session, self._secret, self._read)

    @property
    def attached(self) -> bool:
        """Whether the present connection controls the session."""
        return self._attached

    @property
    def room(self) -> bool:
        """Whether another command that is not urgent can be taken."""
        return len(self._commands) < MAX_COMMANDS and self._command_bytes < MAX_COMMAND_BYTES

    # To the gateway

    def attach(self) -> bytes:
        """A connection is there: its first frame."""
        frame: dict[str, Any] = {"type": "attach", "role": "controller", "secret": self._secret}
        if self._cursor is not None:
            frame["cursor"] = self._cursor
        return _encoder.encode(frame)

    def update(self, said: Mapping[str, Any]) -> str:
        """Take an input up: the id of the command. Ask `room` first.

        Raises Refused, `payload_too_large`, for one that is longer than a frame, and
        `too_many_events` where far too many have no answer; TypeError for what has no form in
        msgpack.
        """
        return self._command("update", "input", said, urgent=False, id=None)

    def signal(
        self, said: Mapping[str, Any], *, urgent: bool = False, id: str | None = None
    ) -> str:
        """Take a signal up: the id of the command. An urgent one goes before all that waits.
        Raises as `update` does, and ValueError for an `id` that the gateway would not read."""
        return self._command("signal", "signal", said, urgent=urgent, id=id)

    def _command(
        self, type: str, name: str, said: Mapping[str, Any], *, urgent: bool, id: str | None
    ) -> str:
        if self.over is not None:
            raise self.over
        if id is None:
            id = self._new_id()
        elif not _VISIBLE.fullmatch(id):
            raise ValueError(f"an id is up to {MAX_ID_CHARS} visible characters of ASCII: {id!r}")
        elif id in self._commands:
            raise ValueError(f"the command {id} has no answer yet")
        if len(self._commands) >= REMEMBERED_COMMANDS:
            raise Refused(
                f"{REMEMBERED_COMMANDS} commands are without an answer", code="too_many_events"
            )
        frame = _encoder.encode({"type": type, "id": id, name: said})
        if len(frame) > MAX_FRAME_BYTES:
            raise Refused(
                f"a frame of {len(frame)} bytes: the gateway takes {MAX_FRAME_BYTES} at most",
                code="payload_too_large",
                field=name,
            )
        self._commands[id] = _Command(frame, urgent)
        self._command_bytes += len(frame)
        if self._attached:
            (self._urgent if urgent else self._out)[id] = None
        return id

    def forget(self, id: str) -> None:
        """Nobody waits for the answer to this command, and it is not sent any more."""
        command = self._commands.pop(id, None)
        self._out.pop(id, None)
        self._urgent.pop(id, None)
        if command is not None:
            self._command_bytes -= len(command.frame)

    def close(self) -> None:
        """The session shall end. It is said again on each connection until it has."""
        self._closing = True

    def read(self, output: Output) -> None:
        """An output has been dealt with: it need not be told again."""
        self._read = output.cursor
        self._unacknowledged += 1
        if self._unacknowledged >= ACKNOWLEDGE_OUTPUTS and self._attached:
            self._unacknowledged = 0
            self._have = output.cursor

    def take(self) -> bytes | None:
        """The next frame to send, if there is one."""
        for queue in (self._urgent, self._out):
            for id in queue:
                del queue[id]
                return self._commands[id].frame
        if self._have is not None:
            cursor, self._have = self._have, None
            return _encoder.encode({"type": "have", "cursor": cursor})
        if self._closing and self._attached and not self._close_said:
            self._close_said = True
            return _encoder.encode({"type": "close"})
        return None

    # From the gateway

    def receive(self, message: str | bytes) -> list[Event]:
        """What a frame means. Raises ProtocolError for what is none."""
        frame = frame_of(message)
        with told.understood(f"a frame {frame['type']!r:.64}"):
            return self._receive(frame)

    def _receive(self, frame: dict[str, Any]) -> list[Event]:
        type = frame.pop("type")
        match type:
            case "error":
                return self._on_error(frame["error"])
            case "attached":
                return self._on_attached(frame)
            case "let_go":
                if frame.get("reason") == "replaced":
                    return self._end(ControlLost("another connection has taken the session over"))
                # The session goes on, and the close that follows would say not to come back.
                self._stalled = True
                return []
        events: list[Event] = []
        sequence = told.whole(frame.pop("sequence"), "sequence")
        cursor = told.text(frame.pop("cursor"), "cursor")
        if type not in _UNNUMBERED and self._last is not None:
            if sequence <= self._last:
                return []  # It was told before.
            if sequence > self._last + 1:
                events.append(Lost(self._last + 1, sequence - 1))
        self._last, self._cursor = sequence, cursor
        if type == "answer":
            return events + self._on_answer(frame)
        if type == "session_ended":
            error = frame.get("error")
            ended = SessionEnded(str(frame["reason"]), error_of(error) if error else None)
            return events + self._end(ended)
        return [*events, Output(type, sequence, cursor, frame)]

    def _on_attached(self, frame: dict[str, Any]) -> list[Event]:
        came_with, cursor = self._cursor, frame.pop("cursor", None)
        sequence = told.whole(frame["sequence"], "sequence")
        secret = told.text(frame.pop("secret"), "secret")
        limits = told.fields(frame["limits"], "limits")
        if "grace_s" in limits:
            told.seconds(limits["grace_s"], "grace_s")
        lost = [told.whole(number, "lost") for number in frame.pop("lost", None) or ()]
        events: list[Event] = [Attached(frame, self.attachments > 0)]
        if lost:
            events.append(Lost(*lost))
            self._last = lost[1]
        elif came_with is None:
            self._last = sequence
        self._cursor = came_with if cursor is None else told.text(cursor, "cursor")
        self._secret, self.limits = secret, limits
        self._attached = True
        self._stalled = False
        self.attachments += 1
        if self._read is None:
            self._read = self._cursor
        self._send_again()
        return events

    def _send_again(self) -> None:
        """Say all that was not answered, as this connection's first words."""
        for id, command in self._commands.items():
            (self._urgent if command.urgent else self._out)[id] = None
        self._close_said = False

    def _on_error(self, info: Any) -> list[Event]:
        """This connection was refused, the next one perhaps not."""
        error = error_of(info)
        if error.code in ("secret_reused", "resume_refused"):
            return self._end(ControlLost(error.message, code=error.code))
        return self._end(error) if isinstance(error, Refused) else []

    def _on_answer(self, frame: dict[str, Any]) -> list[Event]:
        id = told.text(frame["id"], "id")
        if id not in self._commands:
            return []  # The first answer came before the connection broke.
        result = told.fields(frame.get("result") or {}, "result")
        error = error_of(frame["error"]) if frame.get("error") else None
        self.forget(id)
        return [Answered(id, result, error)]

    def _end(self, error: AntiphonError) -> list[Event]:
        self.over = error
        return [Over(error)]

    def dropped(self, code: int | None, reason: str) -> list[Event]:
        """The connection is gone; `code` is the WebSocket's, None: without any."""
        self._attached = False
        self._unacknowledged = 0
        self._out.clear()
        self._urgent.clear()
        self._have = None
        if self.over is None and code in _UNREADABLE:
            return self._end(
                ProtocolError(f"a message that the other side does not take: {code} {reason}")
            )
        if self.over is None and code in _FINAL and not self._stalled:
            return self._end(SessionEnded(reason or f"close {code}"))
        return []

    def give_up(self, error: AntiphonError) -> list[Event]:
        """No connection comes about any more."""
        return [] if self.over is not None else self._end(error)


def frame_of(message: str | bytes) -> dict[str, Any]:
    """A frame with its `type`, which is text. Raises ProtocolError for what is none."""
    try:
        frame = _decoder.decode(message.encode() if isinstance(message, str) else message)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"a frame that is not MessagePack: {error}") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise ProtocolError("a frame without a type")
    return frame
