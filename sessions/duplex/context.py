"""What the parts of the duplex machine share: one session's conversation and its means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sessions.actions import TurnMeasured
from sessions.bindings import Binding
from sessions.duplex.conversation import Conversation
from sessions.duplex.events import ClientOutput
from sessions.duplex.settings import DuplexSettings
from sessions.orchestrator import Orchestrator
from sessions.pipeline import DuplexRoles, Pipeline


@dataclass
class DuplexContext:
    """One owner, the machine; `now_ms` is the time of the event being handled."""

    pipeline: Pipeline
    roles: DuplexRoles
    bindings: Mapping[str, Binding]
    orchestrator: Orchestrator
    conversation: Conversation
    conversation_id: str
    settings: DuplexSettings
    emit: Callable[[ClientOutput], None]
    measured: Callable[[TurnMeasured], None]
    progress: Callable[[], None]
    new_id: Callable[[str], str]
    now_ms: float = 0.0
