"""Realtime events to the verbs of a duplex session, and its outputs to events.

Free of I/O and of conversation state: what one thing means to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.http_errors import ERROR_TYPES
from gateway.surfaces.farewell import farewell
from gateway.surfaces.realtime.outputs import events
from gateway.surfaces.realtime.settings import (
    check_format,
    check_voice_name,
    refuse_tools,
    settings_patch,
)
from protocol.errors import AntiphonError, ErrorInfo
from protocol.realtime import (
    Content,
    InputAudioAppend,
    InputAudioClear,
    InputAudioCommit,
    ItemCreate,
    ItemDelete,
    ItemReference,
    ItemRetrieve,
    ItemTruncate,
    MalformedEvent,
    MessageItem,
    OutputAudioClear,
    ResponseCancel,
    ResponseCreate,
    SessionPatch,
    SessionUpdate,
    invalid_value,
    parse,
    unsupported_parameter,
)
from protocol.realtime import server_events as wire
from sessions import client
from sessions.duplex import events as duplex

_PARTS = {
    "input_text": duplex.PartKind.INPUT_TEXT,
    "input_audio": duplex.PartKind.INPUT_AUDIO,
    "output_text": duplex.PartKind.OUTPUT_TEXT,
    "output_audio": duplex.PartKind.OUTPUT_AUDIO,
}


class Translation:
    """The two directions of one Realtime connection.

    `new_id` makes ids of items that a client leaves unnamed; `event_prefix` makes
    this connection's event ids differ from all others'; `is_model` knows the names of
    the pipeline called `model`, which a client may repeat in its settings.
    """

    def __init__(
        self,
        model: str,
        *,
        event_prefix: str,
        new_id: Callable[[str], str],
        is_model: Callable[[str], bool],
    ) -> None:
        self._model = model
        self._new_id = new_id
        self._is_model = is_model
        self._writer = wire.EventWriter(event_prefix)

    # Client to session

    def read(self, frame: str | bytes) -> duplex.ClientVerb:
        """The verb that a frame asks for. Raises MalformedEvent when it asks for none."""
        event = parse(frame)
        if type(event) is InputAudioAppend:
            return duplex.AppendAudio(event.pcm, event.event_id)
        try:
            return self._verb(event)
        except MalformedEvent as error:
            error.event_id = event.event_id
            raise

    def _verb(self, event: Any) -> duplex.ClientVerb:
        ref = event.event_id
        match event:
            case SessionUpdate():
                return duplex.PatchSettings(self._patch(event.session), ref)
            case InputAudioCommit():
                return duplex.CommitInput(ref)
            case InputAudioClear():
                return duplex.ClearInput(ref)
            case ItemCreate():
                return duplex.CreateItem(self._item(event.item), event.previous_item_id, ref)
            case ItemRetrieve():
                return duplex.RetrieveItem(event.item_id, ref)
            case ItemDelete():
                return duplex.DeleteItem(event.item_id, ref)
            case ItemTruncate():
                return duplex.TruncateItem(
                    event.item_id, event.content_index, event.audio_end_ms, ref
                )
            case ResponseCreate():
                return self._create_response(event)
            case ResponseCancel():
                return duplex.CancelResponse(event.response_id, ref)
            case OutputAudioClear():
                raise MalformedEvent(
                    "'output_audio_buffer.clear' is for WebRTC; over WebSocket the client plays.",
                    code="unsupported_event",
                    field="type",
                )
        raise AssertionError(f"no verb for {type(event).__name__}")

    def _patch(self, session: SessionPatch) -> dict[str, Any]:
        if isinstance(session.model, str) and not self._is_model(session.model):
            raise invalid_value(
                "session.model", f"the model of a session is fixed ('{self._model}')."
            )
        return settings_patch(session)

    def _create_response(self, event: ResponseCreate) -> duplex.CreateResponse:
        refuse_tools("response", event.tools, event.tool_choice)
        for name, value in (
            ("prompt", event.prompt),
            ("reasoning", event.reasoning),
            ("parallel_tool_calls", event.parallel_tool_calls),
        ):
            if value is not None:
                raise unsupported_parameter(f"response.{name}", "this pipeline has no use for it.")
        check_format(event.format, "response.audio.output.format")
        check_voice_name(event.voice, "response.audio.output.voice")
        given = None
        if event.input is not None:
            given = [
                entry.id if isinstance(entry, ItemReference) else self._item(entry)
                for entry in event.input
            ]
        return duplex.CreateResponse(
            conversation=event.conversation == "auto",
            input=given,
            instructions=event.instructions,
            output_modalities=event.output_modalities,
            voice=event.voice if isinstance(event.voice, str) else None,
            max_output_tokens=event.max_output_tokens,
            metadata=event.metadata,
            ref=event.event_id,
        )

    def _item(self, item: MessageItem) -> duplex.Item:
        return duplex.Item(
            item.id or self._new_id("item"),
            duplex.Role(item.role),
            duplex.ItemStatus(item.status or "completed"),
            [_part(content) for content in item.content],
        )

    # Session to client

    def refusal(self, error: AntiphonError) -> str:
        """The error event of something that never reached the session."""
        event_id = error.event_id if isinstance(error, MalformedEvent) else None
        info = error.info()
        return self._error(info, info.field, event_id)

    def _refused(self, refused: client.Refused) -> str:
        param = refused.error.field
        if param is not None and param.split(".", 1)[0] == "settings":
            param = f"session{param.removeprefix('settings')}"
        return self._error(refused.error, param, refused.ref)

    def _error(self, error: ErrorInfo, param: str | None, event_id: str | None) -> str:
        kind = ERROR_TYPES[error.kind]
        return self._writer.write(
            wire.ErrorEvent(error=wire.ErrorOut(kind, error.code, error.message, param, event_id))
        )

    def write(self, output: duplex.ClientOutput) -> list[str]:
        """The frames that tell a client of `output`, in order."""
        if type(output) is duplex.AudioDelta:
            return self._writer.write_audio(
                output.response_id,
                output.item_id,
                output.output_index,
                output.content_index,
                output.pcm,
            )
        if isinstance(output, client.Refused):
            return [self._refused(output)]
        if isinstance(output, client.SessionEnded):
            error = farewell(output.reason, output.error).error
            return [] if error is None else [self._error(error, error.field, None)]
        return [self._writer.write(event) for event in events(output)]


def _part(content: Content) -> duplex.Part:
    return duplex.Part(_PARTS[content.type], content.text, audio=content.pcm)
