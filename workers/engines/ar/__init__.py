"""The AR engine: the text of a reply from the conversation so far."""

from workers.engines.ar.engine import ArEngine
from workers.engines.ar.options import ArOptions

__all__ = ["ArEngine", "ArOptions"]
