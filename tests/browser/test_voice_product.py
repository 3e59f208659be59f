"""The voice product as a person meets it: a real browser, a real gateway, real models."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.browser.steps import (
    SILENT,
    NotHeard,
    hear_reply,
    interrupted_question,
    peak,
    question_and_silence,
    speak_and_interrupt,
    state,
    wait_for,
    write,
)
from tests.deployment import Deployment

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

QUESTION = Path("tests/data/speech/questions/bees.wav")
LONG = "Answer in exactly eight long sentences."
# From the end of the question; the answer begins well before it and ends well after it.
SPEAKS_AGAIN_AFTER_S = 8.0


def connect(page: Page) -> None:
    page.get_by_role("button", name="Connect").click()
    wait_for(page, "window.antiphon.state.connection === 'connected'")


def test_a_spoken_turn_is_heard_and_interrupted_by_speaking(
    voice: Deployment, open_page: OpenPage, tmp_path: Path
) -> None:
    sound = interrupted_question(tmp_path / "microphone.wav", QUESTION, SPEAKS_AGAIN_AFTER_S)
    page = open_page(voice.base_url, microphone=sound)
    page.get_by_role("textbox", name="Instructions").fill(LONG)
    seen = speak_and_interrupt(page, screenshot=tmp_path / "answering.png")
    asked, answered = (page.locator(f"#transcript .{who} p").first for who in ("user", "answer"))
    expect(asked).to_contain_text("bees")
    expect(answered).to_contain_text("honey")
    assert 0 <= seen.turn["ttft"] <= seen.turn["ttfp"] <= seen.turn["heard"]
    row = page.locator("#turn-rows tr").last
    figures = [str(seen.turn[name]) for name in ("number", "ttft", "ttfp", "heard", "status")]
    expect(row.locator("th, td")).to_have_text(figures)
    # It was cut off while there was more of it to hear, and the next turn works.
    assert 0 < seen.audio_end_ms < SPEAKS_AGAIN_AFTER_S * 1000
    hear_reply(page, turn=1)
    expect(page.locator("#transcript .user p").nth(1)).to_contain_text("bees")
    assert state(page)["notice"] is None


@contextmanager
def stopped(deployment: Deployment, child: str) -> Iterator[None]:
    """A process that stands still, as one on a wedged device does."""
    pid = deployment.children()[child]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
        deployment.until_ready()


def test_nothing_is_heard_while_the_speech_worker_is_stopped(
    voice: Deployment, open_page: OpenPage, tmp_path: Path
) -> None:
    sound = question_and_silence(tmp_path / "microphone.wav", QUESTION)
    page = open_page(voice.base_url, microphone=sound)
    connect(page)
    with stopped(voice, "speak-0"):
        with pytest.raises(NotHeard, match="failed"):
            speak_and_interrupt(page)
        assert peak(page) < SILENT
        expect(page.get_by_role("alert")).to_contain_text("The answer failed")
        expect(page.get_by_role("alert")).to_contain_text("speak")
        expect(page.locator("#transcript .answer .mark")).to_have_text("failed")
    write(page, "What is the capital of France?")
    hear_reply(page, turn=1)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_gateway_that_was_killed_is_said_in_words_and_met_again(
    voice: Deployment, open_page: OpenPage
) -> None:
    # A request of the page may be on its way when the gateway dies.
    cut_off = ("net::ERR_CONNECTION_RESET", "net::ERR_CONNECTION_CLOSED", "net::ERR_EMPTY_RESPONSE")
    page = open_page(voice.base_url, said=cut_off)
    page.get_by_role("textbox", name="Instructions").fill(LONG)
    write(page, "What do bees make?")
    hear_reply(page)
    voice.kill("gateway")
    expect(page.get_by_role("alert")).to_contain_text("The connection was lost")
    expect(page.get_by_role("alert")).to_contain_text("Reconnect", timeout=20_000)
    expect(page.get_by_role("status")).to_have_text("Disconnected")
    wait_for(page, f"window.antiphon.outputEnergy() < {SILENT}")
    voice.until_ready()
    page.get_by_role("button", name="Reconnect").click()
    wait_for(page, "window.antiphon.state.connection === 'connected'")
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.get_by_role("log")).to_contain_text("A new session")
    turns = len(state(page)["turns"])
    write(page, "What do bees make?")
    hear_reply(page, turn=turns)


@contextmanager
def cuttable(target: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """A way to the gateway that can be cut: its address, and what cuts all that is open."""
    host, port = target.removeprefix("http://").split(":")
    open_now: list[socket.socket] = []

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                open_now.extend((near, far))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=ends, daemon=True).start()

    def cut() -> None:
        while open_now:
            end = open_now.pop()
            # A reset, as from a network that has changed: neither side says goodbye.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", cut
        cut()
        listener.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_is_cut_in_mid_reply_is_taken_up_again(
    voice: Deployment, open_page: OpenPage
) -> None:
    with cuttable(voice.base_url) as (address, cut):
        page = open_page(address)
        page.get_by_role("textbox", name="Instructions").fill(LONG)
        write(page, "What do bees make?")
        hear_reply(page)
        session, response = state(page)["session"], state(page)["response"]
        assert response is not None
        cut()
        wait_for(page, "window.antiphon.state.connection === 'reconnecting'")
        wait_for(page, "window.antiphon.state.connection === 'connected'")
        assert state(page)["session"] == session
        # The reply goes on to its end, and the session still knows what was said.
        wait_for(page, "window.antiphon.state.turns[0].status === 'completed'", 60)
        wait_for(page, "!window.antiphon.state.playing", 60)
        expect(page.get_by_role("alert")).to_be_hidden()
        write(page, "And what else?")
        hear_reply(page, turn=1)
        assert state(page)["session"] == session


@contextmanager
def another_origin() -> Iterator[str]:
    """A page on another port of this machine: to a browser, somebody else's site."""

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>Another site</title>")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


TRY_EVERYTHING = """async ([base, session]) => {
  const address = base.replace("http", "ws") + "/v1/realtime?model=voice";
  const socket = new WebSocket(address, ["realtime"]);
  const opened = await new Promise((resolve) => {
    socket.onmessage = () => resolve(true);
    socket.onclose = () => resolve(false);
  });
  socket.onclose = null;
  socket.close();
  const outcome = (path, how) =>
    fetch(base + path, how).then((response) => response.type, () => "refused");
  return {
    opened,
    posted: await outcome("/v1/models", { method: "POST", body: "{}" }),
    blind: await outcome("/v1/models", { method: "POST", body: "{}", mode: "no-cors" }),
    closed: await outcome(`/v1/admin/sessions/${session}`, { method: "DELETE" }),
    read: await outcome("/v1/admin/sessions"),
  };
}"""


def test_a_page_of_another_origin_can_neither_open_a_socket_nor_post(
    voice: Deployment, open_page: OpenPage
) -> None:
    victim = open_page(voice.base_url)
    connect(victim)
    refused = 'antiphon_opens_refused_total{reason="origin_not_allowed"}'
    before = voice.metrics().get(refused, 0)
    browser = victim.context.browser
    assert browser is not None
    with another_origin() as site:
        stranger = browser.new_page()
        statuses: dict[str, list[int]] = {}
        stranger.on(
            "response",
            lambda response: statuses.setdefault(response.request.method, []).append(
                response.status
            ),
        )
        stranger.goto(site)
        tried = [voice.base_url, state(victim)["session"]]
        assert stranger.evaluate(TRY_EVERYTHING, tried) == {
            "opened": False,
            "posted": "refused",
            "blind": "opaque",
            "closed": "refused",
            "read": "refused",
        }
        # A browser does send the post of a page that has no wish to read the answer.
        assert statuses["POST"] == [403]
    assert voice.metrics()[refused] == before + 1
    # The session that it tried to close goes on. The gateway's own page may do all of it.
    write(victim, "What is the capital of France?")
    hear_reply(victim)
    own = browser.new_page()
    own.goto(voice.base_url)
    assert own.evaluate(TRY_EVERYTHING, tried) == {
        "opened": True,
        "posted": "basic",
        "blind": "basic",
        "closed": "basic",
        "read": "basic",
    }
    expect(victim.get_by_role("status")).to_have_text("Disconnected")
