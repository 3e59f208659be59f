"""The speech-in engine: voice activity, ends of turns and transcription."""

from workers.engines.speech_in.engine import SpeechInEngine

__all__ = ["SpeechInEngine"]
