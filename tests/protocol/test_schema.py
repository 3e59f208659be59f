"""Edges whose ends disagree are found before anything runs; payloads when they come."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.arrays import array_payload
from protocol.errors import ConfigError, InvalidRequest
from protocol.payloads import Payload, PayloadType, text_payload
from protocol.schema import PayloadSchema, check_edge, check_payload

FRAMES = PayloadSchema(PayloadType.FRAMES, "|u1", (None, 224, 224, 3))


@pytest.mark.parametrize(
    "taken",
    [
        PayloadSchema(PayloadType.FRAMES),
        PayloadSchema(PayloadType.FRAMES, "uint8"),
        PayloadSchema(PayloadType.FRAMES, "", (1, 224, 224, 3)),
        FRAMES,
    ],
)
def test_ends_that_agree(taken: PayloadSchema) -> None:
    check_edge("camera-policy", FRAMES, taken)
    check_edge("camera-policy", taken, FRAMES)


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        (PayloadSchema(PayloadType.LATENTS), "carries frames, and its consumer takes latents"),
        (PayloadSchema(PayloadType.FRAMES, "<f4"), r"dtype \|u1, and its consumer takes <f4"),
        (
            PayloadSchema(PayloadType.FRAMES, "", (None, 256, 256, 3)),
            r"shape \(any, 224, 224, 3\), and its consumer takes \(any, 256, 256, 3\)",
        ),
        (PayloadSchema(PayloadType.FRAMES, "", (224, 224, 3)), "shape"),
        (
            PayloadSchema(PayloadType.FRAMES, attributes=frozenset({"camera"})),
            "does not say camera",
        ),
    ],
)
def test_ends_that_disagree(taken: PayloadSchema, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        check_edge("camera-policy", FRAMES, taken)
    assert raised.value.field == "camera-policy"


def test_brain_floats_agree_with_themselves_alone() -> None:
    brain = PayloadSchema(PayloadType.HIDDEN_STATES, "bfloat16")
    check_edge("e", brain, brain)
    with pytest.raises(ConfigError, match="bfloat16"):
        check_edge("e", brain, PayloadSchema(PayloadType.HIDDEN_STATES, "<i2"))


def test_a_payload_of_the_schema_passes() -> None:
    values = np.zeros((2, 224, 224, 3), np.uint8)
    check_payload(array_payload(PayloadType.FRAMES, values), FRAMES)
    check_payload(text_payload("words"), PayloadSchema(PayloadType.TEXT))


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (text_payload("words"), "text where frames"),
        (Payload(PayloadType.FRAMES, bytes(4), "<f4", (1,)), "dtype '<f4'"),
        (Payload(PayloadType.FRAMES, b"", "nonsense", (0, 224, 224, 3)), "dtype"),
        (Payload(PayloadType.FRAMES, b"", "|u1", (0, 224, 3)), "shape"),
        (Payload(PayloadType.FRAMES, b"", "|u1", (1, 224, 224, 3)), "0 bytes are no array"),
        (Payload(PayloadType.FRAMES, b"", "|u1", (-1, 224, 224, 3)), "are no array"),
    ],
)
def test_a_payload_against_the_schema_is_refused(payload: Payload, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check_payload(payload, FRAMES)
