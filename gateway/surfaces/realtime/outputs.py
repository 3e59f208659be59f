"""What a duplex session puts out, as events of the Realtime wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from gateway.http_errors import ERROR_TYPES, error_members
from gateway.surfaces.realtime.settings import describe
from protocol.realtime import server_events as wire
from sessions import client
from sessions.duplex import events as duplex

# The protocol's own words for why a response stopped; clients refuse others.
_REASONS = frozenset({"turn_detected", "client_cancelled", "max_output_tokens", "content_filter"})


def events(output: duplex.ClientOutput) -> list[wire.ServerEvent]:
    """The events that tell a client of `output`, in order.

    Audio deltas, refusals and the end of a session are not among them: they depend
    on the connection.
    """
    return _EVENTS[type(output)](output)


def _content(part: duplex.Part) -> wire.ContentOut:
    match part.kind:
        case duplex.PartKind.INPUT_TEXT:
            return wire.ContentOut("input_text", text=part.text or "")
        case duplex.PartKind.OUTPUT_TEXT:
            return wire.ContentOut("output_text", text=part.text or "")
        case duplex.PartKind.INPUT_AUDIO:
            return wire.ContentOut("input_audio", transcript=part.text)
        case duplex.PartKind.OUTPUT_AUDIO:
            return wire.ContentOut("output_audio", transcript=part.text or "")


def _item_out(item: duplex.Item) -> wire.ItemOut:
    content = [_content(part) for part in item.parts]
    return wire.ItemOut(item.id, item.role.value, item.status.value, content)


def _part_out(part: duplex.Part) -> wire.PartOut:
    if part.kind is duplex.PartKind.OUTPUT_AUDIO:
        return wire.PartOut("audio", transcript=part.text or "")
    return wire.PartOut("text", text=part.text or "")


def _usage_out(usage: duplex.Usage | None) -> wire.UsageOut | None:
    # A cascade reads and writes text only; its audio is not counted in tokens.
    if usage is None:
        return None
    return wire.UsageOut(
        usage.input_tokens + usage.output_tokens,
        usage.input_tokens,
        usage.output_tokens,
        wire.InputTokens(
            usage.input_tokens, usage.cached_tokens, wire.CachedTokens(usage.cached_tokens)
        ),
        wire.OutputTokens(usage.output_tokens),
    )


def _status_details(response: duplex.Response) -> wire.StatusDetails | None:
    kind: Literal["cancelled", "incomplete", "failed"]
    match response.status:
        case duplex.ResponseStatus.CANCELLED:
            kind = "cancelled"
        case duplex.ResponseStatus.INCOMPLETE:
            kind = "incomplete"
        case duplex.ResponseStatus.FAILED:
            kind = "failed"
        case _:
            return None
    reason: str | UnsetType = UNSET
    error: wire.StatusError | UnsetType = UNSET
    if response.error is not None:
        failure = response.error
        error = wire.StatusError(ERROR_TYPES[failure.kind], failure.code, failure.message)
    if response.reason in _REASONS:
        reason = response.reason
    elif response.reason is not None and error is UNSET:
        error = wire.StatusError(
            "server_error", response.reason, f"The response ended: {response.reason}."
        )
    return wire.StatusDetails(kind, reason, error)


def _response_out(response: duplex.Response) -> wire.ResponseOut:
    return wire.ResponseOut(
        response.id,
        response.status.value,
        _status_details(response),
        [_item_out(item) for item in response.output],
        response.conversation,
        response.output_modalities,
        "inf" if response.max_output_tokens is None else response.max_output_tokens,
        wire.ResponseAudio(wire.ResponseOutput(response.voice)),
        _usage_out(response.usage),
        response.metadata,
    )


def _place(output: Any) -> dict[str, Any]:
    return {
        "response_id": output.response_id,
        "item_id": output.item_id,
        "output_index": output.output_index,
        "content_index": output.content_index,
    }


def _text_delta(output: duplex.TextDelta) -> list[wire.ServerEvent]:
    if output.kind is duplex.PartKind.OUTPUT_AUDIO:
        return [wire.TranscriptDelta(**_place(output), delta=output.delta)]
    return [wire.TextDelta(**_place(output), delta=output.delta)]


def _part_done(output: duplex.PartDone) -> list[wire.ServerEvent]:
    place = _place(output)
    part = output.part
    done = wire.ContentPartDone(**place, part=_part_out(part))
    if part.kind is duplex.PartKind.OUTPUT_AUDIO:
        return [
            wire.AudioDone(**place),
            wire.TranscriptDone(**place, transcript=part.text or ""),
            done,
        ]
    return [wire.TextDone(**place, text=part.text or ""), done]


def _session(
    output: client.SessionCreated | client.SettingsUpdated | client.Attached,
) -> dict[str, Any]:
    return describe(output.session, output.model, output.settings, output.expires_at_s)


_EVENTS: dict[type, Callable[[Any], list[wire.ServerEvent]]] = {
    client.SessionCreated: lambda o: [wire.SessionCreated(session=_session(o))],
    client.Attached: lambda o: [wire.SessionCreated(session=_session(o))],
    client.LetGo: lambda o: [],
    client.SettingsUpdated: lambda o: [wire.SessionUpdated(session=_session(o))],
    # The protocol has no words for these; commands with ids come by other surfaces.
    client.Answered: lambda o: [],
    client.Parking: lambda o: [],
    client.Parked: lambda o: [],
    client.Restoring: lambda o: [],
    client.Restored: lambda o: [],
    client.SnapshotFailed: lambda o: [],
    duplex.SpeechStarted: lambda o: [
        wire.SpeechStarted(item_id=o.item_id, audio_start_ms=int(o.audio_start_ms))
    ],
    duplex.SpeechStopped: lambda o: [
        wire.SpeechStopped(item_id=o.item_id, audio_end_ms=int(o.audio_end_ms))
    ],
    duplex.InputCommitted: lambda o: [
        wire.InputCommitted(item_id=o.item_id, previous_item_id=o.previous_item_id)
    ],
    duplex.InputCleared: lambda o: [wire.InputCleared()],
    duplex.InputTranscribed: lambda o: [
        wire.TranscriptionCompleted(
            item_id=o.item_id,
            content_index=o.content_index,
            transcript=o.transcript,
            usage=wire.DurationUsage(o.audio_s),
        )
    ],
    duplex.InputTranscriptionFailed: lambda o: [
        wire.TranscriptionFailed(
            item_id=o.item_id, content_index=o.content_index, error=error_members(o.error)
        )
    ],
    duplex.ItemAdded: lambda o: [
        wire.ItemAdded(item=_item_out(o.item), previous_item_id=o.previous_item_id)
    ],
    duplex.ItemDone: lambda o: [
        wire.ItemDone(item=_item_out(o.item), previous_item_id=o.previous_item_id)
    ],
    duplex.ItemRetrieved: lambda o: [wire.ItemRetrieved(item=_item_out(o.item))],
    duplex.ItemDeleted: lambda o: [wire.ItemDeleted(item_id=o.item_id)],
    duplex.ConversationReset: lambda o: [wire.ItemDeleted(item_id=item) for item in o.item_ids],
    duplex.ItemTruncated: lambda o: [
        wire.ItemTruncated(
            item_id=o.item_id,
            content_index=o.content_index,
            audio_end_ms=int(o.audio_end_ms),
        )
    ],
    duplex.ResponseCreated: lambda o: [wire.ResponseCreated(response=_response_out(o.response))],
    duplex.ResponseDone: lambda o: [wire.ResponseDone(response=_response_out(o.response))],
    duplex.OutputItemAdded: lambda o: [
        wire.OutputItemAdded(
            response_id=o.response_id, output_index=o.output_index, item=_item_out(o.item)
        )
    ],
    duplex.OutputItemDone: lambda o: [
        wire.OutputItemDone(
            response_id=o.response_id, output_index=o.output_index, item=_item_out(o.item)
        )
    ],
    duplex.ContentPartAdded: lambda o: [wire.ContentPartAdded(**_place(o), part=_part_out(o.part))],
    duplex.TextDelta: _text_delta,
    duplex.PartDone: _part_done,
}
