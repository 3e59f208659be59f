"""The two encodings of a world's stream.

In MessagePack a picture lies in the frame that tells of it; in JSON it is the binary message
behind its frame.
"""

from __future__ import annotations

from protocol.wires import Grammar, JsonWire, MsgpackWire, Wire
from protocol.worlds.frames import ClientFrame

MAX_CONTROL_BYTES = 256 * 1024
"""What a client says is short; a longer frame is refused unread."""

_WORLDS: Grammar[ClientFrame] = Grammar(ClientFrame, MAX_CONTROL_BYTES)

WIRES: tuple[Wire[ClientFrame], ...] = (JsonWire(_WORLDS), MsgpackWire(_WORLDS))

read_body = _WORLDS.read_body
