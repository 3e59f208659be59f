"""What a session puts out in whole turns, for tests of what becomes of it."""

from __future__ import annotations

from sessions.duplex.events import (
    AudioDelta,
    ClientOutput,
    ContentPartAdded,
    InputCommitted,
    InputTranscribed,
    Item,
    ItemAdded,
    ItemDone,
    ItemStatus,
    OutputItemAdded,
    OutputItemDone,
    Part,
    PartDone,
    PartKind,
    Response,
    ResponseCreated,
    ResponseDone,
    ResponseStatus,
    Role,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    Usage,
)

IDS = ("resp_1", "item_a", 0, 0)
METADATA = {"topic": "health"}


def _response(status: ResponseStatus, modality: str) -> Response:
    return Response("resp_1", status, "conv_1", (modality,), "joe", 256, METADATA)


def _item(status: ItemStatus, kind: PartKind, text: str | None) -> Item:
    parts = [] if text is None else [Part(kind, text)]
    return Item("item_a", Role.ASSISTANT, status, parts)


def _begun(kind: PartKind, modality: str) -> list[ClientOutput]:
    empty = _item(ItemStatus.IN_PROGRESS, kind, None)
    return [
        ResponseCreated(_response(ResponseStatus.IN_PROGRESS, modality)),
        OutputItemAdded("resp_1", 0, empty),
        ItemAdded(empty, "item_u"),
        ContentPartAdded(*IDS, Part(kind, "")),
    ]


def _ended(
    kind: PartKind, text: str, item_status: ItemStatus, response: Response
) -> list[ClientOutput]:
    item = _item(item_status, kind, text)
    response.output = [item]
    return [
        PartDone(*IDS, Part(kind, text)),
        OutputItemDone("resp_1", 0, item),
        ItemDone(item, "item_u"),
        ResponseDone(response),
    ]


def voice_turn() -> list[ClientOutput]:
    """The user says something and is answered by voice."""
    kind = PartKind.OUTPUT_AUDIO
    user = Item("item_u", Role.USER, ItemStatus.COMPLETED, [Part(PartKind.INPUT_AUDIO)])
    response = _response(ResponseStatus.COMPLETED, "audio")
    response.usage = Usage(40, 30, 7)
    return [
        SpeechStarted("item_u", 800),
        SpeechStopped("item_u", 2050),
        InputCommitted("item_u", None),
        ItemAdded(user, None),
        ItemDone(user, None),
        InputTranscribed("item_u", 0, "How are you?", 1.25),
        *_begun(kind, "audio"),
        TextDelta(*IDS, kind, "I am well."),
        AudioDelta(*IDS, bytes(range(256)) * 50),
        TextDelta(*IDS, kind, " Thank you."),
        AudioDelta(*IDS, b"\x01\x02" * 480),
        *_ended(kind, "I am well. Thank you.", ItemStatus.COMPLETED, response),
    ]


def text_turn() -> list[ClientOutput]:
    """An answer by text."""
    kind = PartKind.OUTPUT_TEXT
    response = _response(ResponseStatus.COMPLETED, "text")
    response.usage = Usage(4, 0, 1)
    return [
        *_begun(kind, "text"),
        TextDelta(*IDS, kind, "Well."),
        *_ended(kind, "Well.", ItemStatus.COMPLETED, response),
    ]


def cancelled_turn() -> list[ClientOutput]:
    """An answer by voice that the user spoke into."""
    kind = PartKind.OUTPUT_AUDIO
    response = _response(ResponseStatus.CANCELLED, "audio")
    response.reason = "turn_detected"
    return [
        *_begun(kind, "audio"),
        TextDelta(*IDS, kind, "I am"),
        AudioDelta(*IDS, b"\x01\x02" * 480),
        SpeechStarted("item_v", 4000),
        *_ended(kind, "I am", ItemStatus.INCOMPLETE, response),
    ]
