"""What became of each session, in the order in which it happened, for operators."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from gateway.hosting import SessionHistory, SessionSummary
from protocol.errors import ErrorInfo
from sessions.actions import ToClient, TurnMeasured
from sessions.client import (
    Attached,
    LetGo,
    Parked,
    Parking,
    Restored,
    Restoring,
    SessionCreated,
    SessionEnded,
)
from sessions.lanes import DEFAULT_LANE
from sessions.steps.events import EmergencyStopped, StateLost, StopReleased

TURNS = 32
OTHERS = 32
"""A timeline keeps this many entries of either sort: a loop of steps would drop all else."""
ENDED = 64
"""The histories of this many sessions are kept beyond their end."""


def _failed(error: ErrorInfo | None) -> dict[str, Any]:
    return {} if error is None else {"error": error.code}


def _why(error: ErrorInfo | None) -> dict[str, Any]:
    return {} if error is None else {"error": error.code, "reason": error.message}


_DESCRIPTIONS: dict[type[Any], Callable[[Any], tuple[str, dict[str, Any]]]] = {
    SessionCreated: lambda _: ("opened", {}),
    Attached: lambda output: ("attached", {"role": output.role.value}),
    LetGo: lambda output: ("let_go", {"reason": output.reason}),
    Parking: lambda output: ("parking", {"stage": output.stage, "reason": output.reason}),
    Parked: lambda output: ("parked", {"stage": output.stage, **_why(output.error)}),
    Restoring: lambda output: ("restoring", {"stage": output.stage}),
    Restored: lambda output: (
        "restored",
        {"stage": output.stage, "origin": output.origin.value, **_why(output.error)},
    ),
    StateLost: lambda output: (
        "state_lost",
        {
            "committed_step": output.committed_step,
            "restorable_step": output.restorable_step,
            **({} if output.reason is None else {"reason": output.reason}),
        },
    ),
    EmergencyStopped: lambda output: ("stopped", {"by": output.by.value}),
    StopReleased: lambda _: ("released", {}),
    SessionEnded: lambda output: ("closing", {"reason": output.reason, **_failed(output.error)}),
}

NOTED = frozenset(_DESCRIPTIONS)
"""The types of outputs that a timeline takes in. None of them comes with every frame."""


@dataclass(frozen=True)
class Entry:
    """Something that happened `at_ms` after the session's open had begun."""

    number: int
    at_ms: float
    event: str
    details: dict[str, Any]


class _Turn(NamedTuple):
    """A turn that ended at monotonic `at_ms`."""

    number: int
    at_ms: float
    turn: int
    lane: str
    status: str
    reason: str | None
    error: str | None
    ttft_ms: float | None

    def details(self) -> dict[str, Any]:
        """What is said of it."""
        details = {
            "turn": self.turn,
            "lane": None if self.lane == DEFAULT_LANE else self.lane,
            "status": self.status,
            "reason": self.reason,
            "error": self.error,
            "ttft_ms": None if self.ttft_ms is None else round(self.ttft_ms, 1),
        }
        return {name: value for name, value in details.items() if value is not None}


class Timeline:
    """The latest entries of one session: `TURNS` that ended and `OTHERS` besides."""

    def __init__(self, begun_ms: float) -> None:
        self.begun_ms = begun_ms
        self.noted = 0
        """How many entries there have been."""
        # Turns end often, and are seldom looked at: each is described when it is.
        self._turns: deque[_Turn] = deque(maxlen=TURNS)
        self._others: deque[Entry] = deque(maxlen=OTHERS)

    def note(self, now_ms: float, event: str, **details: Any) -> None:
        """Something happened that is no turn."""
        self._others.append(self._entry(now_ms, event, details))

    def told(self, now_ms: float, action: ToClient) -> None:
        """Clients are told an output, of a type in `NOTED`."""
        output = action.output
        if action.to is None or isinstance(output, Attached | LetGo):
            event, details = _DESCRIPTIONS[type(output)](output)
            self.note(now_ms, event, **details)
        # All else that is for one alone is told again, and was noted before.

    def turn_ended(self, now_ms: float, turn: TurnMeasured) -> None:
        """A turn has ended."""
        self.noted += 1
        self._turns.append(
            _Turn(
                self.noted,
                now_ms,
                turn.turn,
                turn.lane,
                turn.status,
                turn.reason,
                turn.error,
                turn.ttft_ms,
            )
        )

    def entries(self) -> list[Entry]:
        """What is kept, in the order in which it happened."""
        turns = [
            Entry(turn.number, self._at_ms(turn.at_ms), "turn_ended", turn.details())
            for turn in self._turns
        ]
        return list(heapq.merge(turns, self._others, key=lambda entry: entry.number))

    def described(self) -> dict[str, Any]:
        """The form in which operators see it: `entries`, and how many were `dropped`."""
        entries = self.entries()
        return {
            "dropped": self.noted - len(entries),
            "entries": [
                {"at_ms": entry.at_ms, "event": entry.event, **entry.details} for entry in entries
            ],
        }

    def _entry(self, now_ms: float, event: str, details: dict[str, Any]) -> Entry:
        self.noted += 1
        return Entry(self.noted, self._at_ms(now_ms), event, details)

    def _at_ms(self, now_ms: float) -> float:
        return round(now_ms - self.begun_ms, 1)


class Timelines:
    """The timelines of all sessions of a gateway, and the histories of the last that ended."""

    def __init__(self) -> None:
        self._running: dict[str, Timeline] = {}
        self._ended: OrderedDict[str, SessionHistory] = OrderedDict()

    def begin(self, session: str, now_ms: float) -> None:
        """The open of a session begins."""
        self._running[session] = timeline = Timeline(now_ms)
        timeline.note(now_ms, "opening")

    def of(self, session: str) -> Timeline | None:
        """The timeline of a session that holds anything."""
        return self._running.get(session)

    def running(self, summary: SessionSummary) -> SessionHistory:
        """The session of this summary, which holds something."""
        return SessionHistory(summary, self._running[summary.id].described())

    def ended(self, session: str) -> SessionHistory | None:
        """A session that has ended, if it is one of the last."""
        return self._ended.get(session)

    def noted(self, session: str) -> int:
        """How many entries a session has had that holds something, or was just released."""
        timeline = self._running.get(session)
        return 0 if timeline is None else timeline.noted

    def end(self, summary: SessionSummary, *, keep: bool) -> None:
        """Nothing of a session is held any more; with its last summary it may be kept a while."""
        timeline = self._running.pop(summary.id)
        if keep:
            self._ended[summary.id] = SessionHistory(summary, timeline.described())
            if len(self._ended) > ENDED:
                self._ended.popitem(last=False)
