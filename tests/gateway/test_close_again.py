"""A session that its engine fails to close holds its bytes until that has succeeded."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from loadtest import synthetic_step
from protocol.errors import EngineFailed
from tests.gateway.test_parking import WORLD, playing


async def test_a_session_that_cannot_be_closed_at_once_is_closed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close = synthetic_step._SyntheticLoop.close
    failures = 2
    failed, closed = asyncio.Event(), asyncio.Event()

    def closes(self: synthetic_step._SyntheticLoop) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            failed.set()
            raise EngineFailed("the device is busy")
        close(self)
        closed.set()

    async with playing(places=1, pipeline=WORLD) as game:
        monkeypatch.setattr(synthetic_step._SyntheticLoop, "close", closes)
        player = await game.join()
        await player.step()
        with capture_logs() as logs:
            assert (await game.http.delete(f"/v1/sessions/{player.id}")).status_code == 204
            await failed.wait()
            refused = await game.http.post("/v1/sessions", json={})
            assert refused.json()["error"]["code"] == "capacity_exceeded"
            await closed.wait()
        told = [entry for entry in logs if entry["event"] == "engine_failed"]
        assert [entry["operation"] for entry in told] == ["close"] * 2
        await (await game.join()).step()
