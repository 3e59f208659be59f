"""The secret with which a client comes back to its session.

Only digests are kept. Each attachment gets a new secret; the one it came with stays good
until its first message, because the answer that carried the new one may have been lost.
After that whoever presents the old one is refused, and known to present an old one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import deque

from protocol.errors import InvalidRequest

RETIRED = 8
"""Old digests that are remembered, to tell a secret that was used again from a guess."""


class ResumeRefused(InvalidRequest):
    """The secret is not the one of this session's last attachment."""

    code = "resume_refused"


class SecretReused(ResumeRefused):
    """The secret was good once: somebody else may have it."""

    code = "secret_reused"


def digest(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


class ResumeSecret:
    """The digests that are good now."""

    def __init__(self, current: str) -> None:
        self.current = current
        self._previous: str | None = None
        self._retired: deque[str] = deque(maxlen=RETIRED)

    def check(self, presented: str) -> None:
        """Raise ResumeRefused unless this digest is good; SecretReused if it once was."""
        if hmac.compare_digest(presented, self.current):
            return
        if self._previous is not None and hmac.compare_digest(presented, self._previous):
            return
        if any(hmac.compare_digest(presented, retired) for retired in self._retired):
            raise SecretReused("the secret has been used already", field="secret")
        raise ResumeRefused("the secret is not this session's", field="secret")

    def rotate(self, presented: str | None, new: str) -> None:
        """A client has come back with `presented` and is given the secret of digest `new`.

        None: it took over without one, and no earlier secret is good any more.
        """
        for old in (self.current, self._previous):
            if old is not None and old != presented:
                self._retired.append(old)
        self._previous = presented
        self.current = new

    def confirm(self) -> None:
        """The client has spoken: it has the new secret, and the one before is no good."""
        if self._previous is not None:
            self._retired.append(self._previous)
            self._previous = None

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (self.current, self._previous, tuple(self._retired))
