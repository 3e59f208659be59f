"""The world engine: what players hold down in, frames out, denoised for many at once."""

from workers.engines.world.engine import WorldEngine
from workers.engines.world.settings import WorldOptions

__all__ = ["WorldEngine", "WorldOptions"]
