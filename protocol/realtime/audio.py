"""Base64 of PCM16 audio, the one thing on this wire whose cost is felt."""

from __future__ import annotations

import binascii
import itertools

import pybase64

from protocol.realtime.errors import MalformedEvent, invalid_value

SAMPLE_BYTES = 2
RATE_HZ = 24_000
BYTES_PER_MS = RATE_HZ * SAMPLE_BYTES // 1000

MAX_DELTA_MS = 200
MAX_DELTA_BYTES = MAX_DELTA_MS * BYTES_PER_MS


def decode_pcm(text: str | bytes | memoryview, path: str) -> bytes:
    """The PCM16 bytes of a base64 text.

    Raises MalformedEvent naming `path` when it is not base64 or holds half a sample.
    """
    try:
        pcm = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid_value(path, "expected base64-encoded PCM16 audio.") from None
    if len(pcm) % SAMPLE_BYTES:
        raise odd_bytes(path, len(pcm))
    return pcm


def odd_bytes(path: str, length: int) -> MalformedEvent:
    """The error for audio that ends in the middle of a sample."""
    return invalid_value(
        path, f"PCM16 audio has {SAMPLE_BYTES} bytes a sample, got {length} bytes."
    )


def split_pcm(pcm: bytes) -> list[bytes]:
    """`pcm` in pieces of at most MAX_DELTA_MS, equal to within a sample, none empty."""
    size = len(pcm)
    if size <= MAX_DELTA_BYTES:
        return [pcm] if size else []
    count = -(-size // MAX_DELTA_BYTES)
    samples = size // SAMPLE_BYTES
    edges = [samples * index // count * SAMPLE_BYTES for index in range(count)] + [size]
    return [pcm[start:end] for start, end in itertools.pairwise(edges)]
