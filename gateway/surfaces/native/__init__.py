"""Antiphon's own surface: the four verbs as they are, over HTTP and WebSocket."""

from gateway.surfaces.native.sessions import NativeSessions
from gateway.surfaces.native.stream import NativeStream

__all__ = ["NativeSessions", "NativeStream"]
