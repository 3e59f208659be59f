"""What a browser test does with the console, whichever server is behind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Page, expect

from antiphon.talk.wav import RATE_HZ, read_wav, write_wav

SILENT = 0.001
LOUD = 0.02


class NotHeard(AssertionError):
    """A reply that nobody can have heard."""


@dataclass(frozen=True)
class Interruption:
    """What the page saw of a reply that the user spoke into."""

    turn: dict[str, Any]
    """Its latencies (ttft, ttfp, heard; ms) and how it ended."""
    audio_end_ms: int
    transcript: str


def wait_for(page: Page, condition: str, timeout_s: float = 30.0) -> None:
    """Wait until a JavaScript condition holds."""
    # A function, not an expression: the page's policy lets no string be evaluated.
    page.wait_for_function(f"() => {condition}", timeout=timeout_s * 1000, polling=20)


def state(page: Page) -> dict[str, Any]:
    """What the page says of itself."""
    result: dict[str, Any] = page.evaluate("window.antiphon.state")
    return result


def energy(page: Page) -> float:
    """RMS (0..1) of the last 85 ms at the page's output node."""
    return float(page.evaluate("window.antiphon.outputEnergy()"))


def write(page: Page, words: str) -> None:
    """Type instead of talking."""
    page.get_by_label("Type instead of talking").fill(words)
    page.keyboard.press("Enter")


def interrupted_question(path: Path, question: Path, pause_s: float) -> Path:
    """A microphone's WAV: a second of silence, the question, a pause, the question again.

    Two more seconds of silence end it: behind its end the browser records nothing at all.
    """
    pcm = read_wav(question)
    silence = [np.zeros(int(seconds * RATE_HZ), np.int16) for seconds in (1, pause_s, 2)]
    pieces = [silence[0], pcm, silence[1], pcm, silence[2]]
    write_wav(path, np.concatenate(pieces).astype("<i2").tobytes())
    return path


def question_and_silence(path: Path, question: Path) -> Path:
    """A microphone's WAV: a second of silence, the question, two seconds of silence."""
    silence = np.zeros(2 * RATE_HZ, np.int16)
    pcm = np.concatenate([silence[:RATE_HZ], read_wav(question), silence])
    write_wav(path, pcm.astype("<i2").tobytes())
    return path


def watch_output(page: Page) -> None:
    """From now on, keep the highest levels at the page's output node."""
    page.evaluate(
        """() => {
          window.peaks = { all: 0, unanswered: 0 };
          const look = () => {
            const { userSpeaking, turns } = window.antiphon.state;
            const level = window.antiphon.outputEnergy();
            const names = ["all"];
            if (userSpeaking || !turns.some((turn) => turn.ttfp !== null)) names.push("unanswered");
            for (const name of names) window.peaks[name] = Math.max(window.peaks[name], level);
            requestAnimationFrame(look);
          };
          look();
        }"""
    )


def peak(page: Page) -> float:
    """The highest level since `watch_output` or the last call of this."""
    return float(page.evaluate("() => { const p = peaks.all; peaks.all = 0; return p; }"))


def unanswered_peak(page: Page) -> float:
    """The same, of the time when the user speaks and of that before the first answer."""
    script = "() => { const p = peaks.unanswered; peaks.unanswered = 0; return p; }"
    return float(page.evaluate(script))


def hear_reply(page: Page, turn: int = 0, timeout_s: float = 60.0) -> None:
    """Wait until the reply of a turn is heard. Raises NotHeard when it ends in silence."""
    outcome = page.wait_for_function(
        """([turn, loud]) => {
          if (window.antiphon.outputEnergy() > loud) return "heard";
          const status = window.antiphon.state.turns[turn]?.status ?? "in progress";
          return status !== "in progress" && !window.antiphon.state.playing ? status : null;
        }""",
        arg=[turn, LOUD],
        timeout=timeout_s * 1000,
        polling=20,
    ).json_value()
    if outcome != "heard":
        raise NotHeard(f"the reply was never heard; it ended: {outcome}")


def speak_and_interrupt(
    page: Page, timeout_s: float = 60.0, screenshot: Path | None = None
) -> Interruption:
    """Talk: silent before the reply, loud during it, silent when the user speaks into it.

    The browser's microphone speaks twice, the second time while the reply is playing.
    Raises NotHeard when there is no sound to speak into.
    """
    watch_output(page)
    page.get_by_role("button", name="Talk").click()
    wait_for(page, "window.antiphon.state.userSpeaking", timeout_s)
    assert state(page)["microphone"] == "on"
    wait_for(page, "!window.antiphon.state.userSpeaking", timeout_s)
    assert unanswered_peak(page) < SILENT
    hear_reply(page, 0, timeout_s)
    if screenshot is not None:
        page.screenshot(path=screenshot)
    # From the interruption on, nothing may sound until the user has stopped speaking.
    wait_for(page, "window.antiphon.state.interruptions === 1", timeout_s)
    wait_for(page, f"window.antiphon.outputEnergy() < {SILENT}", timeout_s)
    assert state(page)["userSpeaking"]
    unanswered_peak(page)
    wait_for(page, "!window.antiphon.state.userSpeaking", timeout_s)
    assert unanswered_peak(page) < SILENT
    wait_for(page, "window.antiphon.state.turns[0].status === 'interrupted'", timeout_s)
    expect(page.get_by_role("log")).to_contain_text("interrupted after")
    seen = state(page)
    return Interruption(
        turn=seen["turns"][0],
        audio_end_ms=seen["lastTruncation"]["audio_end_ms"],
        transcript=page.get_by_role("log").inner_text(),
    )
