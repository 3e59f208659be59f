"""The codec engine: speech from text, clause by clause."""

from workers.engines.codec.engine import CodecEngine, CodecOptions

__all__ = ["CodecEngine", "CodecOptions"]
