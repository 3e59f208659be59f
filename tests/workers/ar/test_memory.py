"""What the real model's sessions are said to take is what the process grows by."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from protocol.device_bytes import HOST
from tests.workers.process import Gateway, WorkerProcess

pytestmark = pytest.mark.slow


async def taken(sessions: int) -> tuple[int, int]:
    """Bytes reserved by `sessions` open sessions, and those resident."""
    options = {"backend": "llamacpp", "model": "gemma-3-270m", "sessions": sessions}
    with (
        tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory,
        WorkerProcess(Path(directory), options, "ar") as worker,
    ):
        gateway = await Gateway(worker.endpoint).linked()
        for number in range(sessions):
            opened = await gateway.open(f"s{number}")
            assert opened.error is None
            assert opened.result["bytes"][HOST] > 0
        while (status := await gateway.statuses.get()).devices[HOST].sessions == 0:
            pass
        gateway.link.close()
        account = status.devices[HOST]
        assert account.undeclared == 0
        assert account.pool == account.sessions
        return account.sessions, status.resident_bytes


async def test_eight_sessions_grow_the_process_by_what_was_declared() -> None:
    one, resident_with_one = await taken(1)
    for sessions in (4, 8):
        reserved, resident = await taken(sessions)
        grown = resident - resident_with_one
        print(f"{sessions} sessions: {(reserved - one) >> 20} MiB declared, {grown >> 20} grown")
        assert reserved - one == pytest.approx(grown, rel=0.2)
