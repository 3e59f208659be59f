"""The VLA engine: what robots sense in, chunks of actions out, many robots to one inference."""

from workers.engines.vla.engine import VlaEngine, VlaOptions
from workers.engines.vla.policy import Batch, Inferred, Policy

__all__ = ["Batch", "Inferred", "Policy", "VlaEngine", "VlaOptions"]
