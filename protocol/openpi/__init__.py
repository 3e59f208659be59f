"""OpenPI's wire: maps of arrays as msgpack, and how a session carries them."""

from protocol.openpi.msgpack_numpy import MAX_DEPTH, MAX_TEXT_BYTES, MAX_VALUES, pack, unpack
from protocol.openpi.parts import Joined, from_parts, to_parts

__all__ = [
    "MAX_DEPTH",
    "MAX_TEXT_BYTES",
    "MAX_VALUES",
    "Joined",
    "from_parts",
    "pack",
    "to_parts",
    "unpack",
]
