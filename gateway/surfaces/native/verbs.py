"""What a client says on the native surface, as the verbs of its session's kind."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import msgspec

from gateway.surfaces.long_audio import APPEND_BYTES, in_pieces
from protocol.errors import ErrorInfo, InvalidRequest
from protocol.native import (
    AudioInput,
    Cancel,
    Checkpoint,
    Clear,
    Commit,
    Delete,
    EmergencyStop,
    Interrupt,
    ItemInput,
    NewItem,
    NewPart,
    NewPayload,
    ReleaseActions,
    ReleaseStop,
    RequestInput,
    Reset,
    Respond,
    Restore,
    Retrieve,
    Rewind,
    SettingsInput,
    StepInput,
    Truncate,
)
from protocol.native.frames import Input
from protocol.payloads import Payload
from sessions.client import Verb
from sessions.duplex import events as duplex
from sessions.oneshot import events as oneshot
from sessions.pipeline import Kind
from sessions.steps import events as steps

_SAMPLE_BYTES = 2

_PARTS_OF_ROLE = {
    "system": ("input_text",),
    "user": ("input_text", "input_audio"),
    "assistant": ("output_text", "output_audio"),
}

Build = Callable[[Any, str | None], Verb]
"""Makes a verb of what was said and its `ref`. Raises InvalidRequest."""


def verbs(kind: str, said: Any, command: str | None, ref: str | None) -> Iterator[Verb]:
    """The verbs that carry out what was `said` to a session of this kind, in order.

    Raises InvalidRequest that names the field as the client wrote it.
    """
    build = VERBS[Kind(kind)].get(type(said))
    if build is None:
        place = "input.type" if isinstance(said, get_args(Input)) else "signal.type"
        tag = said.__struct_config__.tag
        raise InvalidRequest(
            f"a session of kind {kind} takes no {tag!r}", field=place, code="unsupported"
        )
    verb = build(said, ref)
    if (
        command is not None
        and isinstance(verb, duplex.AppendAudio)
        and len(verb.pcm) > APPEND_BYTES
    ):
        # A command is carried out once, and whole.
        raise InvalidRequest(
            f"audio with an id has at most {APPEND_BYTES} bytes", field="input.pcm"
        )
    return in_pieces(verb)


def as_written(error: ErrorInfo) -> ErrorInfo:
    """A refusal of the session core, its field named as this surface's clients wrote it."""
    field = error.field
    if field is None:
        return error
    for prefix, written in _WRITTEN.items():
        rest = field.removeprefix(prefix)
        if field.startswith(prefix) and rest[:1] in ("", ".", "["):
            return msgspec.structs.replace(error, field=written + rest)
    return error


def _append(said: AudioInput, ref: str | None) -> Verb:
    _check_samples(said.pcm, "input.pcm")
    return duplex.AppendAudio(said.pcm, ref)


def _create_item(said: ItemInput, ref: str | None) -> Verb:
    return duplex.CreateItem(_item(said.item, "input.item"), said.after, ref)


def _respond(said: Respond, ref: str | None) -> Verb:
    given = None
    if said.input is not None:
        given = [
            entry if isinstance(entry, str) else _item(entry, f"signal.input[{index}]")
            for index, entry in enumerate(said.input)
        ]
    return duplex.CreateResponse(
        conversation=said.conversation,
        input=given,
        instructions=said.instructions,
        output_modalities=said.output_modalities,
        voice=said.voice,
        max_output_tokens=said.max_output_tokens,
        metadata=said.metadata,
        ref=ref,
    )


def _begin_anew(said: Reset, ref: str | None) -> Verb:
    if said.parameters:
        raise InvalidRequest(
            "a conversation begins anew without any",
            field="signal.parameters",
            code="unsupported_parameter",
        )
    return duplex.Reset(ref)


def _cancel_request(said: Cancel, ref: str | None) -> Verb:
    if said.response_id is not None:
        raise InvalidRequest(
            "this session has one answer, without an id",
            field="signal.response_id",
            code="unsupported_parameter",
        )
    return oneshot.CancelRequest(ref)


def _payload(payload: NewPayload) -> Payload:
    return Payload(
        payload.type, payload.data, payload.dtype, tuple(payload.shape), payload.attributes
    )


def _item(item: NewItem, path: str) -> duplex.Item:
    return duplex.Item(
        item.id or f"item_{secrets.token_hex(12)}",
        duplex.Role(item.role),
        duplex.ItemStatus(item.status),
        [_part(part, item.role, f"{path}.parts[{i}]") for i, part in enumerate(item.parts)],
    )


def _part(part: NewPart, role: str, path: str) -> duplex.Part:
    allowed = _PARTS_OF_ROLE[role]
    if part.kind not in allowed:
        raise InvalidRequest(
            f"a {role} message holds {' or '.join(allowed)}, got {part.kind!r}",
            field=f"{path}.kind",
        )
    if part.kind.endswith("_text"):
        if part.audio is not None:
            raise InvalidRequest(f"has no meaning in {part.kind!r}", field=f"{path}.audio")
        if part.text is None:
            raise _missing(f"{path}.text")
    elif part.audio is not None:
        _check_samples(part.audio, f"{path}.audio")
    elif part.text is None:
        raise _missing(f"{path}.audio")
    return duplex.Part(duplex.PartKind(part.kind), part.text, audio=part.audio)


def _missing(path: str) -> InvalidRequest:
    return InvalidRequest(f"{path!r} is missing", field=path, code="missing_required_parameter")


def _check_samples(pcm: bytes, path: str) -> None:
    if len(pcm) % _SAMPLE_BYTES:
        raise InvalidRequest(
            f"PCM16 audio has {_SAMPLE_BYTES} bytes a sample, got {len(pcm)} bytes", field=path
        )


_DUPLEX: dict[type, Build] = {
    AudioInput: _append,
    SettingsInput: lambda said, ref: duplex.PatchSettings(said.settings, ref),
    ItemInput: _create_item,
    Commit: lambda said, ref: duplex.CommitInput(ref),
    Clear: lambda said, ref: duplex.ClearInput(ref),
    Respond: _respond,
    Cancel: lambda said, ref: duplex.CancelResponse(said.response_id, ref),
    Truncate: lambda said, ref: duplex.TruncateItem(
        said.item_id, said.content_index, said.audio_end_ms, ref
    ),
    Delete: lambda said, ref: duplex.DeleteItem(said.item_id, ref),
    Retrieve: lambda said, ref: duplex.RetrieveItem(said.item_id, ref),
    Reset: _begin_anew,
}

_STEPS: dict[type, Build] = {
    StepInput: lambda said, ref: steps.Step(
        said.step, list(map(_payload, said.inputs)), said.parameters, ref
    ),
    Interrupt: lambda said, ref: steps.Interrupt(ref),
    Reset: lambda said, ref: steps.Reset(said.parameters, ref),
    Restore: lambda said, ref: steps.Restore(ref),
    Checkpoint: lambda said, ref: steps.Checkpoint(ref),
    Rewind: lambda said, ref: steps.Rewind(said.step, ref),
    ReleaseActions: lambda said, ref: steps.ReleaseActions(ref),
}

_ROBOT: dict[type, Build] = {
    **_STEPS,
    EmergencyStop: lambda said, ref: steps.EmergencyStop(steps.StoppedBy.CLIENT, ref),
    ReleaseStop: lambda said, ref: steps.ReleaseStop(steps.StoppedBy.CLIENT, ref),
}

_ONE_SHOT: dict[type, Build] = {
    RequestInput: lambda said, ref: oneshot.Request(
        list(map(_payload, said.inputs)),
        said.parameters,
        None if said.ports is None else frozenset(said.ports),
        ref,
    ),
    Cancel: _cancel_request,
}

VERBS: Mapping[Kind, Mapping[type, Build]] = {
    Kind.DUPLEX: _DUPLEX,
    Kind.WORLD: _STEPS,
    Kind.ROBOT: _ROBOT,
    Kind.ONE_SHOT: _ONE_SHOT,
}
"""What the sessions of each kind take."""

# The session core names a field by its path in the verb, which for what is a signal here
# begins with the verb's name where the field alone does not tell.
_WRITTEN = {
    "item.content": "input.item.parts",
    "item.id": "input.item.id",
    "item": "input.item",
    "previous_item_id": "input.after",
    "response.audio.output.voice": "signal.voice",
    "response": "signal",
    "item_id": "signal.item_id",
    "content_index": "signal.content_index",
    "audio_end_ms": "signal.audio_end_ms",
    "reset": "signal",
    "rewind": "signal",
    "settings": "input.settings",
    "parameters": "input.parameters",
    "step": "input.step",
    "inputs": "input.inputs",
    "ports": "input.ports",
}
