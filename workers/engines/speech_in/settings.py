"""What a session may set on the speech-in engine."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from protocol.errors import InvalidRequest


class TurnDetectionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Turns by voice activity; times in ms. None: as the stage is configured."""

    threshold: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5
    prefix_padding_ms: Annotated[int, msgspec.Meta(ge=0, le=5_000)] = 300
    silence_duration_ms: Annotated[int, msgspec.Meta(ge=64, le=10_000)] = 500
    minimum_speech_ms: Annotated[int, msgspec.Meta(ge=0, le=5_000)] | None = None


class SpeechInSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one session.

    `clock_ms` is where the input clock stands at open; later values are not looked
    at, for the clock runs on. Without `turn_detection` the client decides what a turn
    is. Without `language` it is detected in each turn.
    """

    input_rate_hz: Annotated[int, msgspec.Meta(ge=8_000, le=192_000)] = 24_000
    clock_ms: Annotated[int, msgspec.Meta(ge=0)] = 0
    turn_detection: TurnDetectionSettings | None = None
    language: str | None = None


def read_settings(settings: dict[str, Any]) -> SpeechInSettings:
    """The settings in `settings`. Raises InvalidRequest naming the field."""
    try:
        return msgspec.convert(settings, SpeechInSettings)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise InvalidRequest(message, field=path.strip(".`") or None) from error
