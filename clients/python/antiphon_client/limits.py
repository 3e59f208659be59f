"""What the gateway takes at once, so that more is refused before it is sent."""

from __future__ import annotations

MAX_FRAME_BYTES = 15 * 1024 * 1024
"""A longer frame is refused unread, or breaks the connection."""
MAX_BODY_BYTES = 1024 * 1024
"""Of the body of a request."""
MAX_ID_CHARS = 128
"""Of the id of a command: visible ASCII."""
