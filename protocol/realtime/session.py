"""The session object as a client may write it in `session.update`.

Every field that the Realtime API (GA) has is known here, so that one which this
server does not serve is refused by name and not as unknown.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from protocol.realtime.errors import from_validation, invalid_value, missing_parameter


class FormatPatch(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An audio format."""

    type: str | UnsetType = UNSET
    rate: int | UnsetType = UNSET


class NoiseReductionPatch(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Noise reduction of the input."""

    type: str | UnsetType | None = UNSET
    strength: float | UnsetType | None = UNSET


class TranscriptionPatch(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Transcription of the input."""

    model: str | UnsetType | None = UNSET
    language: str | UnsetType | None = UNSET
    prompt: str | UnsetType | None = UNSET
    languages: list[str] | UnsetType | None = UNSET
    keywords: list[str] | UnsetType | None = UNSET
    delay: str | UnsetType | None = UNSET


class TurnDetectionPatch(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Turn detection; times in ms. `minimum_speech_ms` and `interrupt_on` are additions."""

    type: Literal["server_vad", "semantic_vad"] | UnsetType = UNSET
    threshold: float | UnsetType = UNSET
    prefix_padding_ms: int | UnsetType = UNSET
    silence_duration_ms: int | UnsetType = UNSET
    create_response: bool | UnsetType = UNSET
    interrupt_response: bool | UnsetType = UNSET
    minimum_speech_ms: int | UnsetType | None = UNSET
    interrupt_on: Literal["speech", "words"] | UnsetType = UNSET
    idle_timeout_ms: int | UnsetType | None = UNSET
    eagerness: Literal["low", "medium", "high", "auto"] | UnsetType | None = UNSET


class InputPatch(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`audio.input`."""

    format: FormatPatch | UnsetType = UNSET
    noise_reduction: NoiseReductionPatch | UnsetType | None = UNSET
    transcription: TranscriptionPatch | UnsetType | None = UNSET
    turn_detection: TurnDetectionPatch | UnsetType | None = UNSET


class OutputPatch(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`audio.output`; a voice that is an object names a custom voice."""

    format: FormatPatch | UnsetType = UNSET
    voice: str | dict[str, Any] | UnsetType = UNSET
    speed: float | UnsetType = UNSET


class AudioPatch(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`audio`."""

    input: InputPatch | UnsetType = UNSET
    output: OutputPatch | UnsetType = UNSET


class TracingConfig(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """How a trace of the session is named."""

    workflow_name: str | UnsetType = UNSET
    group_id: str | UnsetType = UNSET
    metadata: Any = UNSET


class SessionPatch(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What one `session.update` says; absent fields are UNSET."""

    type: Literal["realtime"]
    model: str | UnsetType = UNSET
    output_modalities: list[Literal["text", "audio"]] | UnsetType = UNSET
    instructions: str | UnsetType = UNSET
    audio: AudioPatch | UnsetType = UNSET
    tools: list[Any] | UnsetType | None = UNSET
    tool_choice: str | dict[str, Any] | UnsetType | None = UNSET
    max_output_tokens: int | Literal["inf"] | UnsetType = UNSET
    tracing: Literal["auto"] | TracingConfig | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    reasoning: dict[str, Any] | UnsetType | None = UNSET
    truncation: str | dict[str, Any] | UnsetType | None = UNSET
    prompt: dict[str, Any] | UnsetType | None = UNSET
    include: list[str] | UnsetType | None = UNSET


def read_session(raw: dict[str, Any]) -> SessionPatch:
    """The patch that a `session.update` holds.

    Raises MalformedEvent naming the parameter; a transcription session is refused.
    """
    kind = raw.get("type")
    if kind is None:
        raise missing_parameter("session.type")
    if kind == "transcription":
        raise invalid_value("session.type", "transcription sessions are not served here.")
    if kind != "realtime":
        raise invalid_value("session.type", "the supported value is 'realtime'.")
    try:
        return msgspec.convert(raw, SessionPatch)
    except msgspec.ValidationError as error:
        raise from_validation(error, "session") from None
