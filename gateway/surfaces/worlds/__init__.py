"""Worlds to play in: a stream of pictures over a WebSocket, and single steps over HTTP."""

from gateway.surfaces.worlds.stream import WorldStream
from gateway.surfaces.worlds.worlds import Worlds

__all__ = ["WorldStream", "Worlds"]
