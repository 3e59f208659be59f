"""The items of a duplex session, in order, and what an AR engine reads of them."""

from __future__ import annotations

from collections.abc import Callable

from protocol.errors import CapacityExceeded, InvalidRequest
from protocol.payloads import Message
from sessions.duplex.events import FRONT, Item, PartKind

MAX_ITEMS = 512
MAX_TEXT_BYTES = 64 * 1024


class Conversation:
    """Items in order. Bounded by MAX_ITEMS and by MAX_TEXT_BYTES of text."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    def __len__(self) -> int:
        return len(self._items)

    def find(self, item_id: str) -> Item | None:
        """The item, or None."""
        return next((item for item in self._items if item.id == item_id), None)

    def get(self, item_id: str, code: str = "item_not_found", *, field: str = "item_id") -> Item:
        """The item. Raises InvalidRequest with `code` when there is none of that id."""
        item = self.find(item_id)
        if item is None:
            raise InvalidRequest(f"no item {item_id!r} here", field=field, code=code)
        return item

    @property
    def last_id(self) -> str | None:
        """The id of the last item."""
        return self._items[-1].id if self._items else None

    def previous_id(self, item_id: str) -> str | None:
        """The id of the item before; None at the front or for an unknown item."""
        previous = None
        for item in self._items:
            if item.id == item_id:
                return previous
            previous = item.id
        return None

    def check(self, item: Item, after: str | None) -> None:
        """Whether a client may insert `item` after `after`.

        Raises InvalidRequest for a duplicate id or an unknown `after`, and
        CapacityExceeded when the conversation is full.
        """
        if self.find(item.id) is not None:
            raise InvalidRequest(
                f"item {item.id!r} exists already",
                field="item.id",
                code="item_create_duplicate_item_id",
            )
        if after not in (None, FRONT) and self.find(after or "") is None:
            raise InvalidRequest(f"no item {after!r} here", field="previous_item_id")
        if len(self) >= MAX_ITEMS or self.text_bytes() + text_bytes(item) > MAX_TEXT_BYTES:
            raise CapacityExceeded(
                f"a conversation holds at most {MAX_ITEMS} items and {MAX_TEXT_BYTES} bytes of"
                " text; delete some items first",
                field="item",
                code="conversation_full",
            )

    def insert(self, item: Item, after: str | None = None) -> str | None:
        """Insert after `after` (None: at the end; FRONT: first); the id before it."""
        if after is None:
            self._items.append(item)
        elif after == FRONT:
            self._items.insert(0, item)
        else:
            index = next(i for i, there in enumerate(self._items) if there.id == after)
            self._items.insert(index + 1, item)
        return self.previous_id(item.id)

    def remove(self, item_id: str) -> None:
        """Take the item out. Raises InvalidRequest when there is none of that id."""
        self._items.remove(self.get(item_id))

    def shrink(self) -> list[str]:
        """Make room within the bounds by dropping the oldest items; their ids."""
        dropped = []
        while len(self._items) > 1 and (
            len(self._items) > MAX_ITEMS or self.text_bytes() > MAX_TEXT_BYTES
        ):
            dropped.append(self._items.pop(0).id)
        return dropped

    def clear(self) -> list[str]:
        """Drop all items; their ids."""
        dropped = [item.id for item in self._items]
        self._items.clear()
        return dropped

    def text_bytes(self) -> int:
        """Bytes of text in all items."""
        return sum(text_bytes(item) for item in self._items)

    def messages(self, wanted: Callable[[Item], bool] = lambda item: True) -> list[Message]:
        """What an AR engine reads: the items that have text, oldest first."""
        return messages_of([item for item in self._items if wanted(item)])

    def given(self, entries: list[Item | str], field: str) -> list[Item]:
        """The items that a response is to work from; a string is the id of one that is here.

        Raises InvalidRequest, naming `field` when they are above the bounds, and the entry that
        is not here.
        """
        items: list[Item] = []
        if len(entries) <= MAX_ITEMS:
            items = [
                self.get(entry, field=f"{field}[{index}]") if isinstance(entry, str) else entry
                for index, entry in enumerate(entries)
            ]
        if len(entries) > MAX_ITEMS or sum(map(text_bytes, items)) > MAX_TEXT_BYTES:
            raise InvalidRequest(
                f"a response works from at most {MAX_ITEMS} items and {MAX_TEXT_BYTES} bytes"
                " of text",
                field=field,
            )
        if any(_is_unheard(entry) for entry in entries if not isinstance(entry, str)):
            raise InvalidRequest(
                "audio is transcribed in items of the conversation only: create the item first,"
                " or give its transcript",
                field=field,
                code="unsupported_content_type",
            )
        return items

    def copy(self) -> list[Item]:
        """The items as they are now."""
        return [item.copy() for item in self._items]

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return tuple(
            (
                item.id,
                item.role.value,
                item.status.value,
                tuple((p.kind, p.text) for p in item.parts),
            )
            for item in self._items
        )


def messages_of(items: list[Item]) -> list[Message]:
    """The items that have text, as messages."""
    messages = []
    for item in items:
        text = " ".join(part.text.strip() for part in item.parts if part.text)
        if text:
            messages.append(Message(item.role.value, text))
    return messages


def text_bytes(item: Item) -> int:
    """Bytes of text in `item`."""
    return sum(len((part.text or "").encode()) for part in item.parts)


def _is_unheard(item: Item) -> bool:
    return any(part.kind is PartKind.INPUT_AUDIO and part.text is None for part in item.parts)


def is_audio(item: Item) -> bool:
    """Whether the item's first part is spoken output."""
    return bool(item.parts) and item.parts[0].kind is PartKind.OUTPUT_AUDIO
