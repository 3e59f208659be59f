"""Credits: arena bytes reserved for (edge, session, turn), spent and returned.

A grant reserves one window of the arena for a turn; every edge on which the turn's
output leaves has credit for that window. A payload spends its size on all of them, each
consumer's release returns it on its own edge, and the bytes are reused when the last
one has released. So a window in use is never more than the window, whatever stalls.

Nobody who merely watches holds credit: an observer gets a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from protocol.connector_errors import NoCredit, PayloadTooLarge, TurnVoid


class GrantState(StrEnum):
    """What a grant may still do."""

    LIVE = "live"
    CLOSED = "closed"
    VOID = "void"


# An attribute of an Enum class costs five times a name of the module.
_LIVE, _CLOSED, _VOID = GrantState.LIVE, GrantState.CLOSED, GrantState.VOID


@dataclass(slots=True, eq=False)
class Grant:
    """The credits of one turn.

    `outstanding` is what each edge has spent and not got back, `used_bytes` what lies in
    the arena, `extra_bytes` the reservations of payloads larger than the window.
    """

    session: str
    turn: int
    window_bytes: int
    outstanding: dict[str, int]
    state: GrantState = _LIVE
    used_bytes: int = 0
    extra_bytes: int = 0

    @property
    def reserved_bytes(self) -> int:
        """What the grant takes of the arena."""
        return self.window_bytes + self.extra_bytes


@dataclass(slots=True)
class Credits:
    """All grants of one arena.

    The sum of what is reserved never exceeds `arena_bytes`, that of a session's never
    `session_cap_bytes`; a grant that would is refused, and its turn may ask again.
    """

    arena_bytes: int
    session_cap_bytes: int
    reserved_bytes: int = 0
    grants: dict[Grant, None] = field(default_factory=dict)
    _sessions: dict[str, int] = field(default_factory=dict)

    def grant(self, session: str, turn: int, edges: Iterable[str], window_bytes: int) -> Grant:
        """Reserve a window.

        Raises NoCredit while there is no room, PayloadTooLarge when there never is.
        """
        self._reserve(session, window_bytes)
        grant = Grant(session, turn, window_bytes, dict.fromkeys(edges, 0))
        self.grants[grant] = None
        return grant

    def spend(self, grant: Grant, size_bytes: int) -> None:
        """Spend credit on every edge; what is larger than the window goes alone.

        Raises TurnVoid when the grant has ended, NoCredit where an edge lacks it; then
        nothing has changed.
        """
        if grant.state is not _LIVE:
            raise TurnVoid(f"turn {grant.turn} puts nothing more")
        window = grant.window_bytes
        # No edge has spent more than lies in the arena.
        if grant.used_bytes + size_bytes > window:
            for spent in grant.outstanding.values():
                if spent and spent + size_bytes > window:
                    raise NoCredit(f"turn {grant.turn} has used its window of {window} bytes")

        for edge in grant.outstanding:
            grant.outstanding[edge] += size_bytes
        grant.used_bytes += size_bytes

    def spend_not(self, grant: Grant, size_bytes: int) -> None:
        """Take `spend` back: there is no place for the payload."""
        for edge in grant.outstanding:
            grant.outstanding[edge] -= size_bytes
        grant.used_bytes -= size_bytes

    def reserve_more(self, grant: Grant, extra_bytes: int) -> None:
        """Reserve bytes beside the window. Raises NoCredit or PayloadTooLarge as `grant`."""
        self._reserve(grant.session, extra_bytes)
        grant.extra_bytes += extra_bytes

    def give_back(self, grant: Grant, edge: str, size_bytes: int) -> bool:
        """A consumer released; whether that returned credit. A void turn gets none."""
        if grant.state is _VOID or edge not in grant.outstanding:
            return False
        grant.outstanding[edge] -= size_bytes
        return True

    def free(self, grant: Grant, size_bytes: int, extra_bytes: int = 0) -> None:
        """The bytes of a payload are reusable, those of an ended grant for everyone."""
        grant.used_bytes -= size_bytes
        if extra_bytes:
            grant.extra_bytes -= extra_bytes
            self._unreserve(grant.session, extra_bytes)
        if grant.state is not _LIVE and not grant.used_bytes:
            self._end(grant)

    def drop_edge(self, grant: Grant, edge: str) -> None:
        """The consumer on `edge` is gone and holds the others up no longer."""
        grant.outstanding.pop(edge, None)

    def close(self, grant: Grant) -> None:
        """Nothing more will be spent; what lies in the arena may still be read."""
        if grant.state is _LIVE:
            self._leave(grant, _CLOSED)

    def void(self, grant: Grant) -> None:
        """The turn's content is not wanted any more: its credits are gone at once.

        Bytes that a consumer still holds stay reserved until it has released them.
        """
        if grant.state is not _VOID and grant in self.grants:
            self._leave(grant, _VOID)
            for edge in grant.outstanding:
                grant.outstanding[edge] = 0

    def session_bytes(self, session: str) -> int:
        """What a session has reserved."""
        return self._sessions.get(session, 0)

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            self.reserved_bytes,
            tuple(sorted(self._sessions.items())),
            tuple(
                sorted(
                    (
                        grant.session,
                        grant.turn,
                        grant.window_bytes,
                        grant.state.value,
                        grant.used_bytes,
                        grant.extra_bytes,
                        tuple(sorted(grant.outstanding.items())),
                    )
                    for grant in self.grants
                )
            ),
        )

    def _leave(self, grant: Grant, state: GrantState) -> None:
        grant.state = state
        if not grant.used_bytes:
            self._end(grant)

    def _end(self, grant: Grant) -> None:
        if grant in self.grants:
            del self.grants[grant]
            self._unreserve(grant.session, grant.window_bytes)

    def _reserve(self, session: str, size_bytes: int) -> None:
        if size_bytes > min(self.arena_bytes, self.session_cap_bytes):
            raise PayloadTooLarge(
                f"{size_bytes} bytes exceed the arena ({self.arena_bytes} bytes) or what one "
                f"session may reserve of it ({self.session_cap_bytes} bytes)"
            )
        taken = self._sessions.get(session, 0)
        if taken + size_bytes > self.session_cap_bytes:
            raise NoCredit(
                f"the session has reserved {taken} of {self.session_cap_bytes} bytes", shared=True
            )
        if self.reserved_bytes + size_bytes > self.arena_bytes:
            raise NoCredit(
                f"{self.reserved_bytes} of {self.arena_bytes} bytes are reserved", shared=True
            )
        self._sessions[session] = taken + size_bytes
        self.reserved_bytes += size_bytes

    def _unreserve(self, session: str, size_bytes: int) -> None:
        self.reserved_bytes -= size_bytes
        left = self._sessions[session] - size_bytes
        if left:
            self._sessions[session] = left
        else:
            del self._sessions[session]
