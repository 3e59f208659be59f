"""Connectors move payloads between processes; a control message carries the descriptor.

The inline connector puts the payload into the message itself. Others (shared
memory, TCP) name bytes that lie elsewhere with a descriptor of tens of bytes.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from protocol.payloads import Payload


class InlineDescriptor(msgspec.Struct, frozen=True, tag="inline"):
    """A descriptor that is the payload."""

    payload: Payload


Descriptor = InlineDescriptor


class Connector(Protocol):
    """One way for payloads to reach another process."""

    def put(self, payload: Payload) -> Descriptor:
        """Make `payload` available to the peer and return what names it."""

    def get(self, descriptor: Descriptor) -> Payload:
        """The payload that `descriptor` names."""

    def release(self, descriptor: Descriptor) -> None:
        """The consumer needs the payload no longer."""


class InlineConnector:
    """Payload bytes travel inside the control message."""

    def put(self, payload: Payload) -> Descriptor:
        """Wrap `payload`; nothing is copied."""
        return InlineDescriptor(payload)

    def get(self, descriptor: Descriptor) -> Payload:
        """Unwrap the payload; nothing is copied."""
        return descriptor.payload

    def release(self, descriptor: Descriptor) -> None:
        """Nothing to do: the message owned the bytes."""
