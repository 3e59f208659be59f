"""The bytes of a worker process: what it promised is what it takes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.device_bytes import HOST, DeviceBytes
from protocol.exit_status import ExitStatus
from protocol.messages import Close, TurnStatus
from tests.workers.process import Gateway, WorkerProcess
from tests.workers.test_steps import ENGINE, Loop

MIB = 1 << 20
STATE_BYTES = 64 * MIB
ARENA_BYTES = 64 * MIB
MOST_OF_AN_ENGINE_BYTES = 120 * MIB
"""More than an interpreter with its libraries takes, and less than another session."""

BUDGET_BYTES = ARENA_BYTES + MOST_OF_AN_ENGINE_BYTES + 3 * 2 * STATE_BYTES
"""For three sessions: a step makes the state that follows beside the one that is."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


async def held(gateway: Gateway) -> tuple[int, DeviceBytes]:
    """Resident bytes and the account of the host's memory, as of the next heartbeat."""
    while not gateway.statuses.empty():
        gateway.statuses.get_nowait()
    status = await gateway.statuses.get()
    return status.resident_bytes, status.devices[HOST]


async def test_a_worker_with_room_for_three_sessions_takes_three(directory: Path) -> None:
    options = {"state_bytes": STATE_BYTES}
    budget = {HOST: BUDGET_BYTES}
    with WorkerProcess(directory, options, ENGINE, budget) as worker:
        gateway = await Gateway(worker.endpoint).linked()
        try:
            for number in range(6):
                session = f"s{number}"
                if number >= 3:
                    refused = await gateway.open(session)
                    assert refused.error is not None
                    assert refused.error.code == "capacity_exceeded"
                    assert "128 MiB of cpu are needed" in refused.error.message
                    gateway.send(Close(gateway.fence(f"s{number - 3}"), "close", "client"))
                    await gateway.answer("close")
                opened = await gateway.open(session, seed=number)
                assert opened.error is None
                assert opened.result["bytes"] == {HOST: 2 * STATE_BYTES}
                assert (await Loop(gateway, session).step(1)).status is TurnStatus.COMPLETED
                resident, account = await held(gateway)
                assert account.reserved <= BUDGET_BYTES
                assert account.sessions == min(number + 1, 3) * 2 * STATE_BYTES
                assert account.undeclared == 0
                assert resident <= 1.1 * BUDGET_BYTES
        finally:
            gateway.link.close()


async def test_an_engine_that_the_budget_has_no_room_for_is_not_started(directory: Path) -> None:
    with WorkerProcess(directory, {}, ENGINE, {HOST: 80 * MIB}) as worker:
        started = await worker.started()
        assert started is not None
        assert started.error is not None
        assert started.error.startswith("stages.think.budget.cpu: the engine takes ")
        status, _ = await worker.ended()
        assert status == ExitStatus.CONFIG


async def test_a_share_that_nobody_named_grows_with_the_engine(directory: Path) -> None:
    budget = {HOST: 80 * MIB}
    with WorkerProcess(directory, {}, ENGINE, budget, shares_memory=True) as worker:
        gateway = await Gateway(worker.endpoint).linked()
        _, account = await held(gateway)
        gateway.link.close()
        assert account.budget == account.engine + account.arena + 40 * MIB
