"""The effective settings of a duplex session, and how a patch changes them.

The layout follows the session object of the Realtime API (GA), because every
speech client thinks in it. A setting is honoured or refused by its path, never
accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from protocol.errors import InvalidRequest
from protocol.validation import fault

INPUT_RATE_HZ = 24_000
OUTPUT_RATE_HZ = 24_000
MAX_INSTRUCTIONS_BYTES = 16 * 1024
MAX_TRACING_BYTES = 4 * 1024
"""Of `tracing` as JSON: it is kept, echoed and logged."""


class ServerVad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Turn detection by voice activity and silence. Times in ms.

    Voice of less than `minimum_speech_ms` is none (None: as the stage is configured). With
    `interrupt_on` "speech" a reply ends when the user begins to speak; with "words" it
    waits, ends once words are understood, and goes on if there were none.
    """

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5
    prefix_padding_ms: Annotated[int, msgspec.Meta(ge=0, le=5_000)] = 300
    silence_duration_ms: Annotated[int, msgspec.Meta(ge=64, le=10_000)] = 500
    create_response: bool = True
    interrupt_response: bool = True
    minimum_speech_ms: Annotated[int, msgspec.Meta(ge=0, le=5_000)] | None = None
    interrupt_on: Literal["speech", "words"] = "speech"


class Transcription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whether the client is told what the user said; None fields were not set."""

    model: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    language: Annotated[str, msgspec.Meta(pattern=r"^[a-z]{2,3}(-[A-Za-z]{2,4})?$")] | None = None


class PcmFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PCM16 little-endian, mono."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24_000] = 24_000


class InputAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the user's audio is heard."""

    format: PcmFormat = PcmFormat()
    noise_reduction: None = None
    transcription: Transcription | None = None
    turn_detection: ServerVad | None = ServerVad()


class OutputAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the answer is spoken."""

    format: PcmFormat = PcmFormat()
    voice: str = ""
    speed: Annotated[float, msgspec.Meta(ge=0.25, le=1.5)] = 1.0


class AudioSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both directions of audio."""

    input: InputAudio = InputAudio()
    output: OutputAudio = OutputAudio()


class DuplexSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a client may set on a duplex session.

    `tools` stays empty until an engine can call them. `tracing` is what the client
    calls the session in its own books; surfaces log it beside the session's id.
    """

    output_modalities: tuple[Literal["text", "audio"], ...] = ("audio",)
    instructions: str = ""
    audio: AudioSettings = AudioSettings()
    tools: list[Any] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] | Literal["inf"] = "inf"
    tracing: Literal["auto"] | dict[str, Any] | None = None


def initial(instructions: str, voice: str) -> DuplexSettings:
    """The settings of a session whose client has asked for nothing."""
    output = OutputAudio(voice=voice)
    return DuplexSettings(instructions=instructions, audio=AudioSettings(output=output))


def merge(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """A deep merge: maps merge, everything else (None included) replaces."""
    merged = dict(target)
    for key, value in patch.items():
        current = merged.get(key)
        if isinstance(value, dict) and isinstance(current, dict):
            merged[key] = merge(current, value)
        else:
            merged[key] = value
    return merged


def patched(
    settings: DuplexSettings, patch: dict[str, Any], *, voices: Mapping[str, str], spoken: bool
) -> DuplexSettings:
    """The settings after `patch`; `settings` itself is untouched.

    `voices` holds the names that a client may ask for; `spoken` says that audio has
    been heard already, after which the voice is frozen. Raises InvalidRequest whose
    `field` is the path of the first offending member, which begins with "settings".
    """
    merged = merge(msgspec.to_builtins(settings), patch)
    try:
        candidate = msgspec.convert(merged, DuplexSettings)
    except msgspec.ValidationError as error:
        found = fault(error, "settings")
        raise InvalidRequest(found.reason, field=found.path, code=found.code) from None
    if len(candidate.output_modalities) != 1:
        raise InvalidRequest(
            'output_modalities is ["audio"] or ["text"]', field="settings.output_modalities"
        )
    if candidate.tools:
        raise InvalidRequest(
            "no engine of this pipeline calls tools",
            field="settings.tools",
            code="unsupported_parameter",
        )
    check_instructions(candidate.instructions, "settings.instructions")
    if len(msgspec.json.encode(candidate.tracing)) > MAX_TRACING_BYTES:
        raise InvalidRequest(
            f"tracing is longer than {MAX_TRACING_BYTES} bytes of JSON", field="settings.tracing"
        )
    try:
        # Whoever looks at the session has to be told of it, on every wire.
        msgspec.msgpack.encode(candidate.tracing)
    except (OverflowError, TypeError, ValueError):
        raise InvalidRequest(
            "tracing holds more than JSON and 64 bits can say", field="settings.tracing"
        ) from None
    voice = candidate.audio.output.voice
    check_voice(voice, voices, "settings.audio.output.voice")
    if spoken and voice != settings.audio.output.voice:
        raise InvalidRequest(
            "the voice cannot change once audio has been heard",
            field="settings.audio.output.voice",
            code="cannot_update_voice",
        )
    return candidate


def check_instructions(instructions: str, field: str) -> None:
    """Raise InvalidRequest naming `field` when the instructions are too long."""
    if len(instructions.encode()) > MAX_INSTRUCTIONS_BYTES:
        raise InvalidRequest(
            f"instructions are longer than {MAX_INSTRUCTIONS_BYTES} bytes",
            field=field,
            code="string_above_max_length",
        )


def check_voice(voice: str, voices: Mapping[str, str], field: str) -> None:
    """Raise InvalidRequest naming `field` when the pipeline has no such voice."""
    if voice not in voices:
        raise InvalidRequest(
            f"no voice {voice!r}; this pipeline has {', '.join(sorted(voices))}", field=field
        )
