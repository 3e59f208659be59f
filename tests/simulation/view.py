"""What a client was told of its session: its conversation and its responses."""

from __future__ import annotations

from dataclasses import dataclass, field

from sessions.client import SessionCreated, SessionEnded
from sessions.duplex import events as said


@dataclass
class ViewedItem:
    """An item as it was told. `text` is None while it has none, or none was told."""

    id: str
    role: str
    text: str | None
    audio_ms: int = 0
    spoken: bool = False
    truncated: bool = False
    unheard: bool = False
    """Whether it is the user's audio, whose transcript may be known to the session alone."""


@dataclass
class ViewedResponse:
    """A response as it was told."""

    id: str
    in_conversation: bool
    text: str = ""
    item_id: str | None = None
    audio: list[tuple[int, int, int]] = field(default_factory=list)
    """Run, clause and piece number of each piece of audio."""
    done: said.Response | None = None


class ClientView:
    """Keeps what the outputs say; the checks on it are the invariants' business."""

    def __init__(self) -> None:
        self.created = False
        self.ended: SessionEnded | None = None
        self.items: list[ViewedItem] = []
        self.responses: dict[str, ViewedResponse] = {}
        self.open: dict[str, ViewedResponse] = {}
        self.truncatable: list[str] = []

    def item(self, item_id: str) -> ViewedItem | None:
        """The item, or None."""
        return next((item for item in self.items if item.id == item_id), None)

    def told(self, output: said.ClientOutput) -> None:
        """Take an output in."""
        match output:
            case SessionCreated():
                self.created = True
            case SessionEnded():
                self.ended = output
            case said.ItemAdded(item=item, previous_item_id=previous):
                self._added(item, previous)
            case said.ConversationReset():
                self.items = []
            case said.ItemDeleted():
                self.items = [item for item in self.items if item.id != output.item_id]
            case said.InputTranscribed():
                if (there := self.item(output.item_id)) is not None:
                    there.text = output.transcript
                    there.unheard = False
            case said.InputTranscriptionFailed():
                if (there := self.item(output.item_id)) is not None:
                    there.unheard = False
            case said.ItemTruncated():
                if (there := self.item(output.item_id)) is not None:
                    there.truncated = True
                    there.audio_ms = output.audio_end_ms
            case said.ResponseCreated(response=response):
                view = ViewedResponse(response.id, response.conversation is not None)
                self.responses[response.id] = self.open[response.id] = view
            case said.OutputItemAdded():
                self.responses[output.response_id].item_id = output.item.id
            case said.TextDelta():
                self.responses[output.response_id].text += output.delta
                if (there := self.item(output.item_id)) is not None:
                    there.text = (there.text or "") + output.delta
            case said.PartDone():
                if (there := self.item(output.item_id)) is not None:
                    there.audio_ms = output.part.audio_ms
            case said.ResponseDone(response=response):
                self.responses[response.id].done = response
                self.open.pop(response.id, None)

    def _added(self, item: said.Item, previous: str | None) -> None:
        texts = [part.text.strip() for part in item.parts if part.text]
        audio = any(part.kind is said.PartKind.INPUT_AUDIO for part in item.parts)
        seen = ViewedItem(item.id, item.role.value, " ".join(texts) or None)
        seen.unheard = audio and any(part.text is None for part in item.parts)
        seen.spoken = item.role is said.Role.ASSISTANT
        if previous is None:
            self.items.insert(0, seen)
        else:
            places = [index for index, there in enumerate(self.items) if there.id == previous]
            self.items.insert(places[0] + 1 if places else len(self.items), seen)
