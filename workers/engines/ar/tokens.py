"""Which tokens a slot holds, so that the next prompt can begin with exactly those.

A reply that comes back as text need not be tokenised as it was generated, nor is
text tokenised the same with other text behind it. Either would break the prefix
that is resident. So tokens are remembered with the text they stand for, and only
text beyond what is remembered is tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    """One token: its id, and the UTF-8 bytes it adds to the text."""

    id: int
    data: bytes


class TokenMemory:
    """The text of one slot as tokens.

    Invariant: the concatenated bytes of the tokens are the text remembered.
    """

    def __init__(self) -> None:
        self._tokens: list[Token] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def ids(self) -> list[int]:
        """The token ids, first to last."""
        return [token.id for token in self._tokens]

    def tokens(self) -> list[Token]:
        """The tokens, first to last."""
        return list(self._tokens)

    def extend(self, tokens: Sequence[Token]) -> None:
        """More tokens at the end."""
        self._tokens.extend(tokens)

    def keep_prefix_of(self, text: str) -> str:
        """Forget all tokens but those that `text` begins with; the rest of `text`."""
        data = text.encode()
        kept = end = boundary = 0
        for index, token in enumerate(self._tokens, start=1):
            if not data.startswith(token.data, end):
                break
            end += len(token.data)
            # A token may end within a character; text is cut only between two.
            if end == len(data) or data[end] & 0xC0 != 0x80:
                kept, boundary = index, end
        del self._tokens[kept:]
        return data[boundary:].decode()


def align(text: str, pieces: Sequence[tuple[int, bytes]]) -> list[Token]:
    """Tokens for `text` from a tokeniser's (id, bytes) pieces.

    Some tokenisers put a space before the first word, or change the text in other
    ways. Where the pieces do not add up to `text`, the first token stands for all of it:
    the tokens are then kept or forgotten together.
    """
    if not pieces:
        return []
    data = text.encode()
    joined = b"".join(piece for _, piece in pieces)
    if joined == b" " + data and pieces[0][1].startswith(b" "):
        first, *others = pieces
        pieces = [(first[0], first[1][1:]), *others]
    elif joined != data:
        first, *others = pieces
        pieces = [(first[0], data), *((other, b"") for other, _ in others)]
    return [Token(token, piece) for token, piece in pieces]
