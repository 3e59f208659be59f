"""Kinds of fields that many messages of the native surface have, each with its bound."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Id = Annotated[str, Meta(min_length=1, max_length=128)]
"""The id of an item or a response."""

CommandId = Annotated[str, Meta(pattern=r"^[!-~]{1,128}$")]
"""A client's name for a command: visible ASCII. The session knows the last 256."""

Ref = Annotated[str, Meta(max_length=512)]
"""What a client wants echoed when a frame without an id is refused."""

Secret = Annotated[str, Meta(min_length=1, max_length=256)]

Cursor = Annotated[str, Meta(min_length=1, max_length=64)]
"""How far a client has read, as a server frame said it. It has no other meaning."""

Text = Annotated[str, Meta(max_length=65_536)]

Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
