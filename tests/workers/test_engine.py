"""The engine interface: what an engine need not implement is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocol.errors import InvalidRequest
from protocol.payloads import text_payload
from workers.engine import EngineSession, Turn, TurnResult


class Bare(EngineSession):
    """No more than a session must have."""

    async def run(self, turn: Turn) -> TurnResult:
        return TurnResult()

    def close(self) -> None: ...


@pytest.mark.parametrize(
    "verb",
    [
        lambda session: session.update(text_payload("x")),
        lambda session: session.configure({}),
        lambda session: session.signal("clear", {}),
    ],
)
def test_a_verb_that_an_engine_lacks_is_unsupported(
    verb: Callable[[EngineSession], object],
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        verb(Bare())
    assert refused.value.code == "unsupported"
