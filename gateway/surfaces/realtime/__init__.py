"""The OpenAI Realtime API (GA) over WebSocket."""

from gateway.surfaces.realtime.socket import RealtimeSocket
from gateway.surfaces.realtime.translation import Translation

__all__ = ["RealtimeSocket", "Translation"]
