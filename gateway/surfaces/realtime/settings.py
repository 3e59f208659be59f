"""The Realtime session object: what a client may ask for, and what it is told.

A setting is honoured or refused by its path, never accepted and ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from protocol.realtime import (
    FormatPatch,
    SessionPatch,
    invalid_value,
    unsupported_parameter,
    unsupported_value,
)
from protocol.realtime.session import InputPatch, OutputPatch, TranscriptionPatch
from sessions.duplex.settings import INPUT_RATE_HZ, DuplexSettings

SETTINGS_FIELDS = frozenset(field.name for field in msgspec.structs.fields(DuplexSettings))

_ADDITIONS = {"minimum_speech_ms": None, "interrupt_on": "speech"}
"""Of turn detection, with their defaults."""

_TOOLS = "no engine of this pipeline calls tools"


def describe(
    session: str, model: str, settings: DuplexSettings, expires_at_s: int
) -> dict[str, Any]:
    """The session object that a server sends: all effective settings, nothing else.

    Additions to the protocol are in it once a client has set them: some clients refuse
    what they do not know.
    """
    described: dict[str, Any] = {
        "type": "realtime",
        "object": "realtime.session",
        "id": session,
        "model": model,
        "expires_at": expires_at_s,
        "truncation": "auto",
    }
    described.update(msgspec.to_builtins(settings))
    detection = described["audio"]["input"]["turn_detection"]
    if detection is not None:
        for name, default in _ADDITIONS.items():
            if detection[name] == default:
                del detection[name]
    return described


def settings_patch(patch: SessionPatch) -> dict[str, Any]:
    """The `DuplexSettings` patch that a `session.update` asks for; its `model` is not looked at.

    Raises MalformedEvent naming the first thing that is not served.
    """
    _refuse_not_served(patch)
    if patch.audio is not UNSET:
        if patch.audio.input is not UNSET:
            _check_input(patch.audio.input)
        if patch.audio.output is not UNSET:
            _check_output(patch.audio.output)
    asked: dict[str, Any] = msgspec.to_builtins(patch)
    settings = {name: value for name, value in asked.items() if name in SETTINGS_FIELDS}
    for name in ("tools", "tool_choice"):
        if settings.get(name, UNSET) is None:
            del settings[name]
    heard = settings.get("audio", {}).get("input", {})
    for section, names in (
        ("turn_detection", ("idle_timeout_ms", "eagerness")),
        ("transcription", ("prompt", "languages", "keywords", "delay")),
    ):
        if isinstance(heard.get(section), dict):
            for name in names:
                heard[section].pop(name, None)
    return settings


def refuse_tools(
    prefix: str,
    tools: list[Any] | UnsetType | None,
    tool_choice: str | dict[str, Any] | UnsetType | None,
) -> None:
    """Raise MalformedEvent when a client hands in tools or insists on one."""
    if tools:
        raise unsupported_parameter(f"{prefix}.tools", f"{_TOOLS}.")
    if isinstance(tool_choice, dict) or tool_choice == "required":
        raise unsupported_value(f"{prefix}.tool_choice", f"{_TOOLS}.")


def check_format(format: FormatPatch | UnsetType | None, path: str) -> None:
    """Raise MalformedEvent for any audio but PCM16 at 24 kHz."""
    if not isinstance(format, FormatPatch):
        return
    if format.type in ("audio/pcmu", "audio/pcma"):
        raise unsupported_value(f"{path}.type", "G.711 is not served; use 'audio/pcm'.")
    if format.type is not UNSET and format.type != "audio/pcm":
        raise invalid_value(f"{path}.type", "the supported value is 'audio/pcm'.")
    if format.rate is not UNSET and format.rate != INPUT_RATE_HZ:
        raise invalid_value(
            f"{path}.rate", f"the supported value is {INPUT_RATE_HZ}, got {format.rate}."
        )


def check_voice_name(voice: str | dict[str, Any] | UnsetType | None, path: str) -> None:
    """Raise MalformedEvent for a custom voice, which is an object."""
    if isinstance(voice, dict):
        raise unsupported_value(path, "custom voices are not served; name a voice.")


def _refuse_not_served(patch: SessionPatch) -> None:
    refuse_tools("session", patch.tools, patch.tool_choice)
    for name, value in (
        ("prompt", patch.prompt),
        ("reasoning", patch.reasoning),
        ("parallel_tool_calls", patch.parallel_tool_calls),
    ):
        if value is not UNSET and value is not None:
            raise unsupported_parameter(f"session.{name}", "this pipeline has no use for it.")
    if patch.include is not UNSET and patch.include:
        raise unsupported_parameter("session.include", "there are no log probabilities.")
    if patch.truncation not in (UNSET, None, "auto"):
        raise unsupported_value("session.truncation", "the supported value is 'auto'.")


def _check_input(heard: InputPatch) -> None:
    path = "session.audio.input"
    check_format(heard.format, f"{path}.format")
    if heard.noise_reduction is not UNSET and heard.noise_reduction is not None:
        raise unsupported_parameter(f"{path}.noise_reduction", "there is none; leave it null.")
    detection = heard.turn_detection
    if detection is not UNSET and detection is not None:
        if detection.type == "semantic_vad":
            raise unsupported_value(
                f"{path}.turn_detection.type", "the supported value is 'server_vad'."
            )
        for name, value in (
            ("eagerness", detection.eagerness),
            ("idle_timeout_ms", detection.idle_timeout_ms),
        ):
            if value is not UNSET and value is not None:
                raise unsupported_parameter(
                    f"{path}.turn_detection.{name}", "'server_vad' here has no such setting."
                )
    if isinstance(heard.transcription, TranscriptionPatch):
        transcription = heard.transcription
        for name, given in (
            ("prompt", transcription.prompt),
            ("languages", transcription.languages),
            ("keywords", transcription.keywords),
            ("delay", transcription.delay),
        ):
            if given is not UNSET and given is not None:
                raise unsupported_parameter(
                    f"{path}.transcription.{name}", "the transcriber has no such setting."
                )


def _check_output(spoken: OutputPatch) -> None:
    path = "session.audio.output"
    check_format(spoken.format, f"{path}.format")
    check_voice_name(spoken.voice, f"{path}.voice")
