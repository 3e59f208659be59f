"""A headless Chromium whose microphone is a WAV file, and a server for its page.

`open_page` takes any address, so that a test may point it at a real gateway.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, sync_playwright
from starlette.routing import Mount

from antiphon.talk.wav import RATE_HZ, write_wav
from gateway.console_files import ConsoleFiles
from tests.browser.steps import wait_for
from tests.deployment import Deployment
from tests.synthetic.realtime_server import Script, serving

CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--autoplay-policy=no-user-gesture-required",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]

MICROPHONE_ALLOWED = (
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
)
MICROPHONE_DENIED = (
    "--use-fake-ui-for-media-stream=deny",
    "--use-fake-device-for-media-stream",
)
NO_MICROPHONE = ("--use-fake-ui-for-media-stream", "--disable-audio-input")

OpenPage = Callable[..., Page]
Serve = Callable[[Script], str]


def chromium_path() -> str:
    """Debian's Chromium; without it the browser tests fail and say what to install."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path is not None, "no chromium here: apt-get install chromium"
    return path


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    """The driver of the browser."""
    with sync_playwright() as started:
        yield started


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    """What is being served; closing it ends that."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(servers: ExitStack) -> Serve:
    """Serve the console beside a synthetic Realtime server; returns the base URL."""

    def start(script: Script) -> str:
        return servers.enter_context(serving(script, [Mount("/", ConsoleFiles())]))

    return start


@pytest.fixture(scope="session")
def voice() -> Iterator[Deployment]:
    """`examples/voice.yaml` as `make run` serves it, on a port of its own."""
    with Deployment() as deployment:
        yield deployment


def launch(playwright: Playwright, arguments: tuple[str, ...]) -> Browser:
    """A Chromium with these arguments beside the usual ones."""
    return playwright.chromium.launch(
        executable_path=chromium_path(), args=[*CHROMIUM_ARGUMENTS, *arguments]
    )


@pytest.fixture(scope="session")
def usual_browser(playwright: Playwright) -> Iterator[Browser]:
    """One browser for all pages that need no microphone of their own."""
    with launch(playwright, MICROPHONE_ALLOWED) as browser:
        yield browser


@pytest.fixture
def open_page(playwright: Playwright, usual_browser: Browser) -> Iterator[OpenPage]:
    """Open a page, nothing shared with any other: `open_page(url, microphone=WAV, width=...)`."""
    opened: list[Browser | BrowserContext] = []

    def start(
        url: str,
        *,
        microphone: Path | None = None,
        width: int = 1280,
        height: int = 800,
        dark: bool = False,
        media: tuple[str, ...] = MICROPHONE_ALLOWED,
        arguments: tuple[str, ...] = (),
        said: tuple[str, ...] = (),
    ) -> Page:
        usual.extend(said)
        extra = (*media, *arguments)
        if microphone is not None:
            extra += (f"--use-file-for-fake-audio-capture={microphone}%noloop",)
        browser = usual_browser
        if extra != MICROPHONE_ALLOWED:
            browser = launch(playwright, extra)
            opened.append(browser)
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
        )
        opened.append(context)
        page = context.new_page()
        page.on("pageerror", lambda problem: problems.append(str(problem)))
        page.on(
            "console",
            lambda message: problems.append(message.text) if message.type == "error" else None,
        )
        page.goto(url)
        wait_for(page, "window.antiphon !== undefined")
        return page

    problems: list[str] = []
    # What the browser says by itself of refused sockets and pages that are not secure, and
    # what a test says that it may.
    usual = [
        "WebSocket connection to",
        "the server responded with a status of 401",
        "net::ERR_CONNECTION_REFUSED",
        "Cross-Origin-Opener-Policy header has been ignored",
    ]
    try:
        yield start
    finally:
        for thing in reversed(opened):
            thing.close()
    unexpected = [words for words in problems if not any(part in words for part in usual)]
    assert unexpected == []


def spoken(seconds: list[tuple[str, float]]) -> bytes:
    """Synthetic speech as PCM: ("speech" | "silence", seconds) one after the other."""
    pieces = []
    for kind, duration in seconds:
        times = np.arange(int(duration * RATE_HZ)) / RATE_HZ
        voice = sum(np.sin(2 * np.pi * 140 * n * times) / n for n in range(1, 12))
        rhythm = 0.55 + 0.45 * np.sin(2 * np.pi * 4 * times)
        wave = voice * rhythm * 4500 if kind == "speech" else np.zeros(len(times))
        pieces.append(wave.astype("<i2"))
    return np.concatenate(pieces).tobytes()


@pytest.fixture
def microphone(tmp_path: Path) -> Callable[[list[tuple[str, float]]], Path]:
    """Write a WAV for the browser's microphone."""

    def write(seconds: list[tuple[str, float]]) -> Path:
        path = tmp_path / "microphone.wav"
        write_wav(path, spoken(seconds))
        return path

    return write
