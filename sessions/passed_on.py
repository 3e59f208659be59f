"""What a client has passed on to engines as it is: payloads and maps of bounded length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from protocol.errors import InvalidRequest
from protocol.payloads import Payload

MAX_INPUT_BYTES = 16 * 1024 * 1024
"""Of all inputs of one turn: they travel in one message to the worker."""
MAX_PARAMETERS_BYTES = 64 * 1024
"""Of settings and of parameters, as msgpack."""


def check_inputs(inputs: Iterable[Payload]) -> None:
    """Raise InvalidRequest when the inputs of a turn are too long to be passed on."""
    if sum(len(payload.data) for payload in inputs) > MAX_INPUT_BYTES:
        raise InvalidRequest(
            f"the inputs are longer than {MAX_INPUT_BYTES} bytes",
            field="inputs",
            code="payload_too_large",
        )


def check_parameters(parameters: dict[str, Any], field: str) -> None:
    """Raise InvalidRequest naming `field` when the map is too long to be passed on."""
    if parameters and len(msgspec.msgpack.encode(parameters)) > MAX_PARAMETERS_BYTES:
        raise InvalidRequest(f"{field} are longer than {MAX_PARAMETERS_BYTES} bytes", field=field)
