"""What a Realtime client is told when its session outlives its connection.

The first event says with which secret it may come back, and the last event of what the session
puts out at once carries its number.
"""

from __future__ import annotations

import msgspec

from sessions.client import Attached


def numbered(frames: list[str], sequence: int) -> list[str]:
    """The frames of one output, the last of which says its number."""
    if frames:
        frames[-1] = f'{frames[-1][:-1]},"sequence":{sequence}}}'
    return frames


def with_secret(frame: str, secret: str | None, attached: Attached | None) -> str:
    """The event `session.created` with what the client needs to come back."""
    said = msgspec.json.encode(
        {
            "secret": secret,
            "resumed": attached is not None,
            "lost": None if attached is None else attached.lost,
        }
    )
    return f'{frame[:-1]},"antiphon":{said.decode()}}}'
