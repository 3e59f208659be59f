"""The cursors of a session's outputs, as clients keep them."""

from __future__ import annotations

import hashlib

from protocol.errors import InvalidRequest


class Cursors:
    """Output numbers of one session, as words that are of no use at another."""

    def __init__(self, session: str) -> None:
        self._mark = hashlib.sha256(session.encode()).hexdigest()[:8]

    def write(self, sequence: int) -> str:
        """The cursor behind output number `sequence`."""
        return f"{self._mark}.{sequence}"

    def read(self, cursor: str) -> int:
        """The number of the last output that its holder has. Raises InvalidRequest."""
        mark, _, number = cursor.partition(".")
        if mark != self._mark or not (number.isascii() and number.isdecimal()):
            raise InvalidRequest("the cursor is none of this session's", field="cursor")
        return int(number)
