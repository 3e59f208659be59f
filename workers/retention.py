"""What a session's turns have produced, kept until the consumer has acknowledged it.

Bounded in bytes and in age. A producer whose session has reached the bound is paced:
it makes nothing more until something is acknowledged. One that makes more nevertheless
comes to a hard bound, where its turn fails. What grows older than the age
bound goes, oldest first; a replay that begins before what is left says so.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class RetentionLimits:
    """`bytes` and `pieces` of a session beyond which its producers wait; `age_ms` of a piece.

    Beyond `hard_bytes` or `hard_pieces` nothing more is taken.
    """

    bytes: int = 8 * 1024 * 1024
    pieces: int = 4_096
    hard_bytes: int = 32 * 1024 * 1024
    hard_pieces: int = 16_384
    age_ms: float = 120_000.0


@dataclass(frozen=True)
class Replayed(Generic[Kept]):
    """What a replay yields: the pieces after the cursor, and the gap before them.

    `lost` is how many pieces after the cursor are gone; 0 when the replay is whole.
    """

    pieces: list[Kept]
    lost: int


@dataclass
class _Piece(Generic[Kept]):
    sequence: int
    size: int
    kept_ms: float
    what: Kept


@dataclass
class _Turn(Generic[Kept]):
    """The kept pieces of one turn, and the last sequence that it ever had."""

    pieces: deque[_Piece[Kept]] = field(default_factory=deque)
    last: int = 0


class Retention(Generic[Kept]):
    """The kept output of one session. `Kept` is whatever the caller sends again."""

    def __init__(self, limits: RetentionLimits) -> None:
        self._limits = limits
        self._turns: OrderedDict[int, _Turn[Kept]] = OrderedDict()
        self._unacknowledged: dict[int, _Turn[Kept]] = {}
        """The few of those turns that have pieces: deadlines are asked for at every event."""
        self.bytes = 0
        self.pieces = 0

    @property
    def full(self) -> bool:
        """Whether producers of this session must wait."""
        return self.bytes >= self._limits.bytes or self.pieces >= self._limits.pieces

    @property
    def overfull(self) -> bool:
        """Whether producers of this session did not wait, for so long that no more is taken."""
        return self.bytes >= self._limits.hard_bytes or self.pieces >= self._limits.hard_pieces

    def keep(self, turn: int, sequence: int, size: int, what: Kept, now_ms: float) -> None:
        """Keep a piece; `sequence` grows by one from piece to piece of a turn."""
        kept = self._turns.setdefault(turn, _Turn())
        self._unacknowledged[turn] = kept
        kept.pieces.append(_Piece(sequence, size, now_ms, what))
        kept.last = sequence
        self.bytes += size
        self.pieces += 1

    def acknowledge(self, turn: int, through: int) -> list[Kept]:
        """The consumer has taken the turn's pieces up to `through`; those that go."""
        kept = self._turns.get(turn)
        if kept is None:
            return []
        gone = []
        while kept.pieces and kept.pieces[0].sequence <= through:
            gone.append(self._drop(kept.pieces.popleft()))
        if not kept.pieces:
            self._unacknowledged.pop(turn, None)
        return gone

    def forget(self, turn: int) -> list[Kept]:
        """Nobody wants the turn any more (its floor was raised, or it is over); what goes."""
        kept = self._turns.pop(turn, None)
        if kept is None:
            return []
        self._unacknowledged.pop(turn, None)
        return [self._drop(piece) for piece in kept.pieces]

    def replay(self, turn: int, after: int) -> Replayed[Kept]:
        """The turn's pieces after `after` that are still kept."""
        kept = self._turns.get(turn)
        if kept is None:
            return Replayed([], 0)
        pieces = [piece for piece in kept.pieces if piece.sequence > after]
        first = pieces[0].sequence if pieces else kept.last + 1
        return Replayed([piece.what for piece in pieces], max(0, first - after - 1))

    def expire(self, now_ms: float) -> list[Kept]:
        """Drop what is older than the age bound; what goes."""
        gone = []
        for turn, kept in list(self._unacknowledged.items()):
            while kept.pieces and kept.pieces[0].kept_ms + self._limits.age_ms <= now_ms:
                gone.append(self._drop(kept.pieces.popleft()))
            if not kept.pieces:
                del self._unacknowledged[turn]
        return gone

    @property
    def deadline_ms(self) -> float | None:
        """When the next piece grows too old."""
        if not self._unacknowledged:
            return None
        oldest = [kept.pieces[0].kept_ms for kept in self._unacknowledged.values()]
        return min(oldest) + self._limits.age_ms

    def clear(self) -> list[Kept]:
        """Drop everything; what goes."""
        return [what for turn in list(self._turns) for what in self.forget(turn)]

    def _drop(self, piece: _Piece[Kept]) -> Kept:
        self.bytes -= piece.size
        self.pieces -= 1
        return piece.what

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return tuple(
            (
                turn,
                kept.last,
                tuple((piece.sequence, piece.kept_ms) for piece in kept.pieces),
            )
            for turn, kept in sorted(self._turns.items())
        )
