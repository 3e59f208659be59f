"""Audio that is longer than one message to a worker should be."""

from __future__ import annotations

from collections.abc import Iterator

from sessions.client import Verb
from sessions.duplex.events import AppendAudio

APPEND_BYTES = 64 * 1024
"""A longer append is handed to the session in pieces of this size, each when it has room."""


def in_pieces(verb: Verb) -> Iterator[Verb]:
    """`verb`, or the pieces of an append that is longer than APPEND_BYTES, in order."""
    if not isinstance(verb, AppendAudio) or len(verb.pcm) <= APPEND_BYTES:
        yield verb
        return
    for start in range(0, len(verb.pcm), APPEND_BYTES):
        yield AppendAudio(verb.pcm[start : start + APPEND_BYTES], verb.ref)
