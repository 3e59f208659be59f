"""The arena: payloads between processes of one host, written once and read in place."""

from protocol.arena.arena import Arena, ArenaUse
from protocol.arena.attaching import attach
from protocol.arena.attachment import Arrival, Attachment
from protocol.arena.memory import unavailable
from protocol.arena.producer import ArenaLimits, Flow
from protocol.connectors import ShmDescriptor

__all__ = [
    "Arena",
    "ArenaLimits",
    "ArenaUse",
    "Arrival",
    "Attachment",
    "Flow",
    "ShmDescriptor",
    "attach",
    "unavailable",
]
