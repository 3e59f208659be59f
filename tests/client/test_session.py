"""A session of the client against a gateway: nothing is lost on the way, and nothing hidden."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from antiphon_client import (
    ControlLost,
    Gateway,
    NotReachable,
    OutputsLost,
    Refused,
    Session,
    SessionEnded,
    session,
)
from antiphon_client.limits import MAX_BODY_BYTES, MAX_FRAME_BYTES
from antiphon_client.stream import Attached
from protocol.config import GatewayConfig
from tests.gateway.native_client import stream
from tests.gateway.real_host import SENTENCES, RealGateway, real_gateway, spoken_as
from tests.gateway.serving import WAIT_S
from tests.relay import relay

KEY = "sk-0123456789"
ALL_AUDIO = b"".join(map(spoken_as, SENTENCES))


def question(text: str = "How are you?") -> dict[str, Any]:
    item = {"role": "user", "parts": [{"kind": "input_text", "text": text}]}
    return {"type": "item", "item": item}


async def asked(talk: Session) -> None:
    await talk.update(question())
    await talk.signal({"type": "respond"})


async def heard(talk: Session) -> tuple[str, bytes]:
    """All of a response."""
    text, pcm = "", b""
    async with asyncio.timeout(WAIT_S):
        async for output in talk:
            match output.type:
                case "text_delta":
                    text += output["delta"]
                case "audio_delta":
                    pcm += output["pcm"]
                case "response_done":
                    return text, pcm
    raise AssertionError("the session ended")


@pytest.mark.parametrize("after_bytes", [1, 500, 2_000, 10_000, 30_000])
async def test_a_connection_that_breaks_loses_and_repeats_nothing(after_bytes: int) -> None:
    async with real_gateway(GatewayConfig(keys=(KEY,))) as it, relay(it.port) as line:
        line.break_after_bytes = after_bytes
        async with await Gateway(line.url, key=KEY).open() as talk:
            await asked(talk)
            assert await heard(talk) == ("".join(SENTENCES), ALL_AUDIO)
            assert line.streams == 2
        await it.served.emptied()


async def test_a_command_that_was_under_way_is_carried_out_once() -> None:
    async with real_gateway() as it, relay(it.port) as line:
        talk = await Gateway(line.url).open()
        async with talk:
            line.partition()
            answers = [
                await talk.submit({"type": "settings", "settings": {"instructions": text}})
                for text in ("one", "two")
            ]
            line.drop()
            line.heal()
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*answers)
                changes = [await told(talk, "settings_updated") for _ in range(2)]
            assert [change["settings"]["instructions"] for change in changes] == ["one", "two"]
            await talk.signal({"type": "reset"})
            assert (await talk.next()).type == "conversation_reset"


async def told(talk: Session, kind: str) -> Any:
    """The next output of a type."""
    async with asyncio.timeout(WAIT_S):
        while (output := await talk.next()).type != kind:
            pass
    return output


async def test_another_process_comes_back_and_is_told_what_was_not_read() -> None:
    async with real_gateway() as it:
        gateway = Gateway(it.http)
        first = await gateway.open()
        it.think.may_go_on.clear()
        await asked(first)
        await told(first, "response_created")
        unread = await first.next()  # And so those before it count as read.
        await first.detach()
        it.think.may_go_on.set()
        async with await gateway.resume(first.token) as second:
            assert (await second.next()).sequence == unread.sequence
            assert await heard(second) == ("".join(SENTENCES), ALL_AUDIO)
            await second.update(question())
            with pytest.raises(ControlLost) as reused:
                await gateway.resume(first.token)
            assert reused.value.code == "secret_reused"


async def test_a_slow_reader_paces_the_gateway_and_gets_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "QUEUE_OUTPUTS", 4)
    async with real_gateway() as it, await Gateway(it.http).open() as talk:
        async with stream(it.stream(talk.id), role="observer") as observer:
            await observer.until("attached")
            asking = asyncio.create_task(asked(talk))
            await observer.until("response_done")
        assert talk.unread == 4
        assert await heard(talk) == ("".join(SENTENCES), ALL_AUDIO)
        await asking


async def test_what_the_gateway_could_not_keep_is_raised_and_the_session_goes_on() -> None:
    async with real_gateway(replay_bytes=4_096) as it, relay(it.port) as line:
        talk = await Gateway(line.url).open()
        async with talk:
            it.think.may_go_on.clear()
            await asked(talk)
            await told(talk, "text_delta")
            async with stream(it.stream(talk.id), role="observer") as observer:
                await observer.until("attached")
                line.partition()
                it.think.may_go_on.set()
                await observer.until("response_done")
            line.drop()
            line.heal()
            with pytest.raises(OutputsLost) as lost:
                await heard(talk)
            assert 0 < lost.value.first <= lost.value.last
            assert (await talk.next()).sequence == lost.value.last + 1
            await told(talk, "response_done")
            await asked(talk)
            assert await heard(talk) == ("".join(SENTENCES), ALL_AUDIO)


async def test_who_is_replaced_is_told_so() -> None:
    async with real_gateway() as it:
        gateway = Gateway(it.http)
        first = await gateway.open()
        second = await gateway.resume(first.token)
        with pytest.raises(ControlLost):
            await asyncio.wait_for(told(first, "never"), WAIT_S)
        with pytest.raises(ControlLost):
            await first.update(question())
        await asked(second)
        await second.close()


async def test_a_refusal_says_what_was_wrong_and_changes_nothing() -> None:
    async with real_gateway() as it:
        async with await Gateway(it.http).open() as talk:
            with pytest.raises(Refused) as refused:
                await talk.update({"type": "item", "item": {"role": "nobody", "parts": []}})
            assert refused.value.field == "input.item.role"
            await asked(talk)
        with pytest.raises(Refused) as unknown:
            await Gateway(it.http).open("nothing-of-that-name")
        assert unknown.value.code == "model_not_found"


async def test_what_is_longer_than_a_frame_is_refused_and_the_session_goes_on() -> None:
    async with real_gateway() as it:
        async with await Gateway(it.http).open() as talk:
            with pytest.raises(Refused, match=str(MAX_FRAME_BYTES)) as refused:
                await talk.update({"type": "audio", "pcm": bytes(MAX_FRAME_BYTES)})
            assert refused.value.code == "payload_too_large"
            await asked(talk)
            assert await heard(talk) == ("".join(SENTENCES), ALL_AUDIO)
            assert talk.connections == 1
        with pytest.raises(Refused, match=str(MAX_BODY_BYTES)) as long:
            await Gateway(it.http).open(settings={"instructions": "x" * MAX_BODY_BYTES})
        assert long.value.code == "body_too_large"
        await it.served.emptied()


async def test_a_session_has_one_reader() -> None:
    async with real_gateway() as it, await Gateway(it.http).open() as talk:
        assert isinstance(await talk.next_event(), Attached)
        reading = asyncio.create_task(talk.next())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="has a reader already"):
            await talk.next()
        await talk.signal({"type": "reset"})
        async with asyncio.timeout(WAIT_S):
            assert (await reading).type == "conversation_reset"


async def test_a_session_that_ends_ends_its_outputs_and_its_commands() -> None:
    async with real_gateway() as it:
        talk = await Gateway(it.http).open()
        it.host.close_session(talk.id, "local")
        async with asyncio.timeout(WAIT_S):
            assert [output.type async for output in talk] == []
        with pytest.raises(SessionEnded):
            await talk.update(question())
        await talk.close()


async def test_nobody_there_is_said_so() -> None:
    with pytest.raises(NotReachable):
        await Gateway("http://127.0.0.1:1").open()


async def test_an_open_that_is_given_up_leaves_no_session() -> None:
    async with real_gateway(sessions=1, waiting=1) as it:
        async with await Gateway(it.http).open():
            waiting = asyncio.create_task(Gateway(it.http).open())
            await until_waiting(it, 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until_waiting(it, 0)
        await it.served.emptied()


async def until_waiting(it: RealGateway, count: int) -> None:
    """Wait until so many opens wait for a place."""
    async with asyncio.timeout(WAIT_S):
        while len(it.host.waiting()) != count:
            await asyncio.to_thread(time.sleep, 0.001)
