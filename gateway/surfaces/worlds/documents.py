"""The world surface described for machines."""

from __future__ import annotations

from typing import get_args

from gateway.surfaces.documents import Documents
from protocol.native import QueuedBody
from protocol.worlds import (
    WIRES,
    BatchAnswers,
    BatchBody,
    ChangeAnswer,
    ClientFrame,
    EmptyBody,
    OpenWorldBody,
    ResetBody,
    RewindBody,
    ServerFrame,
    StepAnswer,
    StepBody,
    WorldBody,
)

DOCUMENTS = Documents(
    title="Antiphon worlds",
    address="/v1/worlds/{session}/stream",
    bodies_at="/v1/worlds",
    subprotocols=tuple(wire.subprotocol for wire in WIRES),
    client_frames=get_args(ClientFrame),
    server_frames=get_args(ServerFrame),
    bodies=(
        OpenWorldBody,
        QueuedBody,
        WorldBody,
        StepBody,
        StepAnswer,
        BatchBody,
        BatchAnswers,
        ResetBody,
        EmptyBody,
        RewindBody,
        ChangeAnswer,
    ),
)
