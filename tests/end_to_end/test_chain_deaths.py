"""Processes that die or stop in the middle of a transfer between workers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.talk.errors import TalkError
from antiphon.talk.realtime_client import RealtimeClient
from tests.deployment import Deployment
from tests.end_to_end.test_chain import CONFIG, reply, serve

ENDS = {("failed", "engine_lost"), ("completed", None), ("cancelled", None)}
"""How a response may end whose worker is killed: with that reason, or as if nothing were."""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Replies of 400 clauses, one second each, sent in real time: always in the middle."""
    config = tmp_path_factory.mktemp("chain") / "chain.yaml"
    long = CONFIG.replace("DELIVERY", "chunk").replace("clauses: 4", "clauses: 400")
    config.write_text(long.replace("lead_ms: 60000", "lead_ms: 500"))
    with Deployment(config, environment={"PYTHONPATH": str(Path.cwd())}) as deployment:
        asyncio.run(in_the_middle(deployment, lambda: None, cancel=True))
        yield deployment


def descriptors(deployment: Deployment) -> dict[str, int]:
    """Open file descriptors of each child."""
    return {
        name: len(list(Path(f"/proc/{pid}/fd").iterdir()))
        for name, pid in deployment.children().items()
    }


async def in_the_middle(deployment: Deployment, act: Any, *, cancel: bool = False) -> Any:
    """Do `act` while a reply is on its way; the `response.done` that follows."""
    async with RealtimeClient.open(deployment.base_url, model="chain") as client:
        await client.receive()
        await client.send({"type": "response.create"})
        acted = False
        while True:
            event = (await client.receive()).event
            if event["type"] == "response.output_audio.delta" and not acted:
                acted = True
                act()
                if cancel:
                    await client.send({"type": "response.cancel"})
            if event["type"] == "response.done":
                return event["response"]


def restarts_of(deployment: Deployment, worker: str) -> float:
    return sum(
        value
        for name, value in deployment.metrics().items()
        if name.startswith("antiphon_worker_restarts_total") and f'worker="{worker}"' in name
    )


def no_more(now: dict[str, int], before: dict[str, int]) -> bool:
    """A connection that was closing when `before` was counted may be gone since."""
    return all(now[name] <= before[name] for name in before)


def works_again(deployment: Deployment, before: dict[str, int]) -> None:
    """Everything is served again, and no process holds more than it did."""
    deployment.until_ready()
    response = asyncio.run(in_the_middle(deployment, lambda: None, cancel=True))
    assert response["status"] == "cancelled"
    deployment.until(lambda: not deployment.get("/v1/admin/sessions").json()["sessions"])
    deployment.until(lambda: no_more(descriptors(deployment), before))


@pytest.mark.parametrize("victim", ["talk-0", "decode-0"])
def test_a_killed_stage_fails_the_turn_and_leaves_nothing(chain: Deployment, victim: str) -> None:
    before = descriptors(chain)
    restarts = restarts_of(chain, victim)
    response = asyncio.run(in_the_middle(chain, lambda: chain.kill(victim)))
    assert response["status"] == "failed"
    assert response["status_details"]["error"]["code"] == "engine_lost"
    chain.until_ready(False)
    works_again(chain, before)
    assert restarts_of(chain, victim) == restarts + 1


async def killed_at(deployment: Deployment, victim: str, moment: str) -> Any:
    """The end of a response whose stage is killed just `before` or `after` it is asked for,
    or when an event comes."""
    async with RealtimeClient.open(deployment.base_url, model="chain") as client:
        await client.receive()
        if moment == "before":
            deployment.kill(victim)
        await client.send({"type": "response.create"})
        if moment == "after":
            deployment.kill(victim)
        cancelled = False
        while True:
            event = (await client.receive()).event
            if event["type"] == moment:
                deployment.kill(victim)
            if event["type"] == "response.output_audio.delta" and not cancelled:
                cancelled = True
                await client.send({"type": "response.cancel"})
            if event["type"] == "response.done":
                return event["response"]


@pytest.mark.parametrize("victim", ["talk-0", "decode-0"])
def test_a_stage_killed_as_a_turn_begins_is_the_reason_of_its_end(
    chain: Deployment, victim: str
) -> None:
    before = descriptors(chain)
    restarts = restarts_of(chain, victim)
    for number, moment in enumerate(["before", "after", "response.created"], start=1):
        response = asyncio.run(killed_at(chain, victim, moment))
        error = (response["status_details"] or {}).get("error") or {}
        assert (response["status"], error.get("code")) in ENDS, (moment, response)
        while restarts_of(chain, victim) < restarts + number:
            chain.until_ready(False)
            chain.until_ready()
    works_again(chain, before)


def text_passed_on(deployment: Deployment) -> float:
    """Bytes that talk was given to say."""
    crossed = 'antiphon_edge_bytes_total{connector="inline",edge="think->talk"}'
    return deployment.metrics().get(crossed, 0.0)


def test_a_reader_killed_before_it_has_attached_is_the_reason_of_the_turns_end(
    chain: Deployment,
) -> None:
    before = descriptors(chain)
    # A new one has not read from talk yet.
    chain.kill("decode-0")
    chain.until_ready(False)
    chain.until_ready()
    passed_on = text_passed_on(chain)

    def kill_once_talk_has_begun() -> None:
        chain.until(lambda: text_passed_on(chain) > passed_on)
        chain.kill("decode-0")

    async def killed_unattached() -> Any:
        async with RealtimeClient.open(chain.base_url, model="chain") as client:
            await client.receive()
            os.kill(chain.children()["decode-0"], signal.SIGSTOP)
            await client.send({"type": "response.create"})
            await asyncio.to_thread(kill_once_talk_has_begun)
            while (event := (await client.receive()).event)["type"] != "response.done":
                pass
            return event["response"]

    response = asyncio.run(killed_unattached())
    assert response["status"] == "failed"
    error = response["status_details"]["error"]
    assert (error["code"], error["message"]) == (
        "engine_lost",
        "the worker of stage decode was lost",
    )
    chain.until_ready(False)
    works_again(chain, before)


def test_a_response_asked_for_while_a_stage_is_down_completes_once_it_is_back(
    tmp_path: Path,
) -> None:
    with serve(tmp_path, "chunk") as deployment:

        async def ask_while_it_is_down() -> Any:
            async with RealtimeClient.open(deployment.base_url, model="chain") as client:
                await client.receive()
                # Nobody starts the stage again until the supervisor goes on.
                os.kill(deployment.process.pid, signal.SIGSTOP)
                try:
                    deployment.kill("decode-0")
                    await asyncio.to_thread(deployment.until_ready, False)
                    await client.send({"type": "response.create"})
                    while (await client.receive()).event["type"] != "response.created":
                        pass
                finally:
                    os.kill(deployment.process.pid, signal.SIGCONT)
                while (event := (await client.receive()).event)["type"] != "response.done":
                    pass
                return event["response"]

        assert asyncio.run(ask_while_it_is_down())["status"] == "completed"
        # The workers that were well were left alone.
        assert not [line for line in deployment.log if '"command_not_sent"' in line]


@pytest.mark.parametrize("victim", ["talk-0", "decode-0"])
def test_a_stopped_stage_is_given_up_and_comes_back(chain: Deployment, victim: str) -> None:
    before = descriptors(chain)
    restarts = restarts_of(chain, victim)
    pid = chain.children()[victim]
    try:
        response = asyncio.run(in_the_middle(chain, lambda: os.kill(pid, signal.SIGSTOP)))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert response["status"] == "failed"
    assert response["status_details"]["error"]["code"] == "engine_lost"
    works_again(chain, before)
    assert restarts_of(chain, victim) == restarts


def test_a_killed_gateway_leaves_nothing_in_the_workers(chain: Deployment) -> None:
    before = descriptors(chain)
    with pytest.raises(TalkError):
        asyncio.run(in_the_middle(chain, lambda: chain.kill("gateway")))
    chain.until_ready(False)
    works_again(chain, before)


def test_a_stopped_gateway_finds_its_turns_ended_and_serves_again(chain: Deployment) -> None:
    before = descriptors(chain)
    pid = chain.children()["gateway"]

    def given_up() -> int:
        return sum('"gateway_lost"' in line for line in list(chain.log))

    def stop_until_it_is_given_up() -> None:
        seen = given_up()
        os.kill(pid, signal.SIGSTOP)
        try:
            # Every worker of the pipeline gives a gateway up that says nothing.
            chain.until(lambda: given_up() == seen + 4)
        finally:
            os.kill(pid, signal.SIGCONT)

    children = chain.children()
    response = asyncio.run(in_the_middle(chain, stop_until_it_is_given_up))
    assert response["status"] == "failed"
    assert response["status_details"]["error"]["code"] == "engine_lost"
    chain.until_ready()
    for name, child in children.items():
        assert Path(f"/proc/{child}").exists(), name
    response = asyncio.run(in_the_middle(chain, lambda: None, cancel=True))
    assert response["status"] == "cancelled"
    chain.until(lambda: not chain.get("/v1/admin/sessions").json()["sessions"])
    chain.until(lambda: no_more(descriptors(chain), before))


def test_a_whole_reply_arrives_after_all_of_that(tmp_path: Path, chain: Deployment) -> None:
    assert asyncio.run(reply(chain.base_url, "text"))[0] == "completed"
