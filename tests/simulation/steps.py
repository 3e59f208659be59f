"""The state of a simulated step loop: a checksum over all that was ever put in.

A step that was lost, done twice, or done on another state than it should have been shows
in the checksum of every step after it.
"""

from __future__ import annotations

import hashlib

from protocol.payloads import Payload, PayloadType
from sessions.passed_on import MAX_INPUT_BYTES

HUGE_INPUTS = [Payload(PayloadType.ACTIONS, bytes(MAX_INPUT_BYTES + 1), "|u1", (1,))]
"""More than may be passed on."""


def begun(seed: int) -> bytes:
    """The checksum before the first step."""
    return hashlib.sha256(str(seed).encode()).digest()


def folded(checksum: bytes, data: bytes) -> bytes:
    """The checksum after a step with this input."""
    return hashlib.sha256(checksum + data).digest()


def frame(checksum: bytes, piece: int, extra_bytes: int) -> Payload:
    """A piece of a step's output, which tells the checksum."""
    data = checksum + bytes(extra_bytes)
    return Payload(PayloadType.FRAMES, data, "|u1", (1, len(data)), {"piece": piece})


def actions(number: int) -> Payload:
    """The input of a step."""
    data = number.to_bytes(4, "little")
    return Payload(PayloadType.ACTIONS, data, "|u1", (1, 4))


def latents(data: bytes) -> Payload:
    """An input as the stage before the world hands it on."""
    return Payload(PayloadType.LATENTS, data, "|u1", (1, len(data)))


def checksum_of(output: Payload) -> bytes:
    """What a piece of output tells."""
    return bytes(output.data[:32])
