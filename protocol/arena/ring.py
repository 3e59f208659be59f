"""A stretch of an arena that one turn fills in order and reuses in order."""

from __future__ import annotations

from collections import deque

import msgspec


class Piece(msgspec.Struct, eq=False):
    """Bytes in use: `offset` within the ring. Freed pieces wait for those before them."""

    offset: int
    length: int
    freed: bool = False


class Ring:
    """Contiguous pieces in a stretch of `size_bytes`.

    A piece that is freed early waits for the older ones: what a slow reader holds costs
    its own turn room, and no other.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._pieces: deque[Piece] = deque()

    def take(self, length: int) -> Piece | None:
        """A piece of `length` bytes; None while it does not fit."""
        if not self._pieces:
            offset = 0
            fits = length <= self.size_bytes
        else:
            first, last = self._pieces[0], self._pieces[-1]
            offset = last.offset + last.length
            if last.offset < first.offset:
                fits = length <= first.offset - offset
            elif length <= self.size_bytes - offset:
                fits = True
            else:
                offset = 0
                fits = length <= first.offset
        if not fits:
            return None
        piece = Piece(offset, length)
        self._pieces.append(piece)
        return piece

    def free(self, piece: Piece) -> None:
        """The bytes of `piece` are needed no longer."""
        piece.freed = True
        pieces = self._pieces
        while pieces and pieces[0].freed:
            pieces.popleft()

    @property
    def empty(self) -> bool:
        """Whether no bytes are in use."""
        return not self._pieces

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return tuple((piece.offset, piece.length, piece.freed) for piece in self._pieces)
