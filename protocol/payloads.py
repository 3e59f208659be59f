"""Typed bytes that travel on the edges of a pipeline."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class PayloadType(StrEnum):
    """What an edge carries. Both ends of an edge must name the same type."""

    TEXT = "text"
    TOKENS = "tokens"
    HIDDEN_STATES = "hidden_states"
    CODEC_CODES = "codec_codes"
    LATENTS = "latents"
    KV_PAGES = "kv_pages"
    AUDIO = "audio"
    FRAMES = "frames"
    ACTIONS = "actions"
    OBSERVATION = "observation"


class Payload(msgspec.Struct, frozen=True):
    """One piece of typed data.

    `data` of each type:

    - text: UTF-8. With `attributes["schema"] == "conversation"` it is the JSON of
      `list[Message]` (below).
    - audio: mono PCM, `attributes["rate_hz"]` samples a second, dtype `<i2`.
    - arrays: C-contiguous, with `dtype` (numpy's `dtype.str`) and `shape`.
    - observation, and actions beside their array: see `protocol.openpi.parts`.

    `attributes` holds small scalars only: what an engine says about the piece.
    """

    type: PayloadType
    data: bytes
    dtype: str = ""
    shape: tuple[int, ...] = ()
    attributes: dict[str, Any] = {}


class Message(msgspec.Struct, frozen=True):
    """One entry of a conversation as an AR engine reads it: who said what."""

    role: str
    text: str


_messages = msgspec.json.Decoder(list[Message])
_encoder = msgspec.json.Encoder()


def text_payload(text: str, **attributes: Any) -> Payload:
    """A text payload of `text`."""
    return Payload(PayloadType.TEXT, text.encode(), attributes=attributes)


def conversation_payload(messages: list[Message]) -> Payload:
    """A text payload that holds a whole conversation, oldest message first."""
    return Payload(
        PayloadType.TEXT, _encoder.encode(messages), attributes={"schema": "conversation"}
    )


def read_conversation(payload: Payload) -> list[Message]:
    """The messages of a conversation payload.

    Raises msgspec.ValidationError when the payload holds something else.
    """
    return _messages.decode(payload.data)


def audio_payload(pcm: bytes, rate_hz: int, **attributes: Any) -> Payload:
    """A mono PCM16 little-endian payload of `len(pcm) // 2` samples."""
    return Payload(
        PayloadType.AUDIO, pcm, "<i2", (len(pcm) // 2,), {"rate_hz": rate_hz, **attributes}
    )
