"""What a consumer makes of the descriptions in an arena: each is read once."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.arena import content
from protocol.connectors import Traffic
from protocol.payloads import PayloadType

_MOST_KEPT = 4096
"""Descriptions that are kept decoded; the payloads of a flow have few."""

_LONGEST_KEPT_BYTES = 1024
"""A longer description is decoded anew each time."""


class Described(msgspec.Struct, eq=False):
    """What payloads are and where they belong, as one consumer sees it."""

    type: PayloadType
    dtype: str
    shape: tuple[int, ...]
    attributes: dict[str, Any]
    edge: str
    session: str
    turn: int
    traffic: Traffic


class Descriptions(dict[bytes, Described]):
    """By its encoded form, what each description says to the consumer `name`.

    Looking one up raises DescriptorRefused when it cannot be read. `traffic` is that of
    each edge.
    """

    def __init__(self, name: str, traffic: dict[str, Traffic]) -> None:
        super().__init__()
        self._name = name
        self._traffic = traffic

    def __missing__(self, encoded: bytes) -> Described:
        description, belongs = content.read_description(encoded)
        edge = belongs.edges.get(self._name, "")
        described = Described(
            description.type,
            description.dtype,
            description.shape,
            description.attributes,
            edge,
            belongs.session,
            belongs.turn,
            self._traffic.setdefault(edge, Traffic()),
        )
        if len(encoded) <= _LONGEST_KEPT_BYTES:
            if len(self) >= _MOST_KEPT:
                self.clear()
            self[encoded] = described
        return described
