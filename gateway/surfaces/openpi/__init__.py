"""OpenPI: robots' observations in, chunks of actions out, over a WebSocket."""

from gateway.surfaces.openpi.port import PolicyPort
from gateway.surfaces.openpi.socket import OpenPiSocket

__all__ = ["OpenPiSocket", "PolicyPort"]
