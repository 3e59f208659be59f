"""The console in a real browser: heard at the page's output node, seen on screenshots."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import MICROPHONE_DENIED, NO_MICROPHONE, OpenPage, Serve
from tests.browser.steps import (
    LOUD,
    SILENT,
    NotHeard,
    hear_reply,
    peak,
    speak_and_interrupt,
    state,
    wait_for,
    write,
)
from tests.synthetic.realtime_server import HEARD, Script

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

Microphone = Callable[[list[tuple[str, float]]], Path]


def sent(script: Script, kind: str) -> list[dict[str, Any]]:
    return [event for event in script.received if event["type"] == kind]


def test_a_spoken_turn_is_heard_and_interrupted_by_speaking(
    serve: Serve, open_page: OpenPage, microphone: Microphone, tmp_path: Path
) -> None:
    script = Script(reply_ms=(60_000, 300))
    sound = microphone(
        [("silence", 1), ("speech", 1), ("silence", 3), ("speech", 1), ("silence", 2)]
    )
    page = open_page(serve(script), microphone=sound)
    seen = speak_and_interrupt(page, screenshot=tmp_path / "answering.png")
    assert HEARD in seen.transcript
    assert "word 0." in seen.transcript
    (truncate,) = sent(script, "conversation.item.truncate")
    assert truncate["audio_end_ms"] == seen.audio_end_ms
    # The user spoke again about 2.5 s after the answer began; the rest is latency.
    assert 1_000 < seen.audio_end_ms < 20_000
    assert 0 <= seen.turn["ttft"] <= seen.turn["ttfp"] <= seen.turn["heard"]
    assert page.locator("#turn-rows tr").count() >= 1


def test_a_silent_answer_is_not_heard(
    serve: Serve, open_page: OpenPage, microphone: Microphone
) -> None:
    script = Script(reply_ms=(800,), amplitude=0.0)
    sound = microphone([("silence", 1), ("speech", 1), ("silence", 2)])
    page = open_page(serve(script), microphone=sound)
    with pytest.raises(NotHeard, match="completed"):
        speak_and_interrupt(page)
    assert peak(page) < SILENT
    assert state(page)["turns"][0]["heard"] is None
    expect(page.get_by_role("alert")).to_have_text("The answer made no sound.")
    script.amplitude = 0.3
    write(page, "And now?")
    hear_reply(page, turn=1)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_an_answer_is_played_without_gaps_and_counted_to_the_sample(
    serve: Serve, open_page: OpenPage
) -> None:
    script = Script(reply_ms=(1_500,))
    page = open_page(serve(script))
    result = page.evaluate(
        """async () => {
          const { Speaker } = await import("./audio.js");
          const played = [];
          const ended = new Promise((resolve) => {
            window.speaker = new Speaker({
              onHeard() {},
              onPlayed(item, samples, waiting) { played.push([item, samples, waiting]); },
              onEmpty: resolve,
            });
          });
          await window.speaker.start();
          for (const [item, length] of [["a", 4801], ["a", 4800], ["b", 2399]]) {
            window.speaker.play(item, new Int16Array(length).fill(9000).buffer);
          }
          await ended;
          const idle = await window.speaker.flush();
          window.speaker.play("c", new Int16Array(240_000).fill(9000).buffer);
          await new Promise((resolve) => {
            window.speaker.onPlayed = (item, samples) => samples > 2400 && resolve();
          });
          const cut = await window.speaker.flush();
          return { played, idle, cut, rate: window.speaker.context.sampleRate };
        }"""
    )
    assert result["rate"] == 24_000
    last = {item: samples for item, samples, _ in result["played"]}
    assert last == {"a": 9_601, "b": 2_399}
    assert not result["idle"]["waiting"]
    assert result["cut"]["item"] == "c"
    assert 2_400 < result["cut"]["played"] < 120_000


@pytest.mark.parametrize("rate_hz", [44_100, 48_000, 16_000])
def test_recorded_sound_is_resampled_without_folding_back(
    serve: Serve, open_page: OpenPage, rate_hz: int
) -> None:
    page = open_page(serve(Script()))
    result = page.evaluate(
        """async (rate) => {
          const { Resampler } = await import("./resampler.js");
          const level = (frequency) => {
            const resampler = new Resampler(rate, 24000);
            const output = [];
            for (let block = 0; block < rate / 128; block += 1) {
              const input = Float32Array.from({ length: 128 }, (_, i) =>
                Math.sin((2 * Math.PI * frequency * (block * 128 + i)) / rate));
              output.push(...resampler.push(input));
            }
            const steady = output.slice(2000, -2000);
            const rms = Math.sqrt(steady.reduce((sum, x) => sum + x * x, 0) / steady.length);
            return [rms * Math.SQRT2, output.length];
          };
          return { low: level(1000), speech: level(6000), high: level(rate / 2 - 1500) };
        }""",
        rate_hz,
    )
    assert result["low"][0] == pytest.approx(1.0, abs=0.01)
    assert result["speech"][0] == pytest.approx(1.0, abs=0.02)
    assert result["low"][1] == pytest.approx(24_000, abs=120)
    if rate_hz > 30_000:
        assert result["high"][0] < 0.003


def test_text_and_the_escape_key(serve: Serve, open_page: OpenPage) -> None:
    script = Script(reply_ms=(60_000, 400))
    page = open_page(serve(script))
    page.get_by_role("button", name="Connect").click()
    wait_for(page, "window.antiphon.state.connection === 'connected'")
    page.get_by_label("Type instead of talking").fill("What is the time?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("log")).to_contain_text("What is the time?")
    wait_for(page, f"window.antiphon.outputEnergy() > {LOUD}")
    page.keyboard.press("Escape")
    wait_for(page, "window.antiphon.state.turns[0].status === 'stopped'")
    wait_for(page, f"window.antiphon.outputEnergy() < {SILENT}")
    assert len(sent(script, "response.cancel")) == 1
    assert len(sent(script, "conversation.item.truncate")) == 1
    page.get_by_label("Type instead of talking").fill("And now?")
    page.get_by_role("button", name="Send").click()
    wait_for(page, "window.antiphon.state.turns[1]?.status === 'completed'")


def test_typing_into_an_answer_stops_it_and_gets_the_next(
    serve: Serve, open_page: OpenPage
) -> None:
    script = Script(reply_ms=(60_000, 400))
    page = open_page(serve(script))
    for words in ("First", "Second"):
        page.get_by_label("Type instead of talking").fill(words)
        page.keyboard.press("Enter")
        wait_for(page, f"window.antiphon.outputEnergy() > {LOUD}")
    wait_for(page, "window.antiphon.state.turns[1]?.status === 'completed'")
    assert state(page)["turns"][0]["status"] == "stopped"
    assert state(page)["notice"] is None


def test_space_talks_m_mutes_and_talking_can_be_stopped(
    serve: Serve, open_page: OpenPage, microphone: Microphone
) -> None:
    script = Script()
    page = open_page(serve(script), microphone=microphone([("silence", 20)]))
    page.keyboard.press("Space")
    wait_for(page, "window.antiphon.state.microphone === 'on'")
    page.keyboard.press("m")
    wait_for(page, "window.antiphon.state.microphone === 'muted'")
    expect(page.get_by_role("status")).to_contain_text("muted")
    page.keyboard.press("m")
    page.keyboard.press("Space")
    wait_for(page, "window.antiphon.state.microphone === 'off'")
    expect(page.get_by_role("button", name="Talk")).to_have_attribute("aria-pressed", "false")


@pytest.mark.parametrize("closes", [False, True])
def test_a_key_is_asked_for_and_kept_in_the_tab(
    serve: Serve, open_page: OpenPage, closes: bool
) -> None:
    script = Script(key="sesame", close_1008_without_key=closes)
    page = open_page(serve(script))
    page.get_by_role("button", name="Connect").click()
    field = page.get_by_label("Key of this gateway")
    expect(field).to_be_visible()
    field.fill("sesame")
    page.keyboard.press("Enter")
    wait_for(page, "window.antiphon.state.connection === 'connected'")
    expect(field).to_be_hidden()
    assert "openai-insecure-api-key.sesame" in script.protocols
    assert page.evaluate("sessionStorage.length") == 1
    assert page.evaluate("localStorage.length") == 0


def test_hanging_up_and_calling_again_is_a_new_session(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(Script(reply_ms=(200,))))
    page.get_by_role("button", name="Connect").click()
    wait_for(page, "window.antiphon.state.connection === 'connected'")
    page.get_by_label("Type instead of talking").fill("Hello")
    page.keyboard.press("Enter")
    wait_for(page, "window.antiphon.state.turns[0]?.status === 'completed'")
    session = state(page)["session"]
    page.get_by_role("button", name="Disconnect").click()
    expect(page.get_by_role("status")).to_contain_text("Not connected")
    page.get_by_role("button", name="Connect").click()
    wait_for(page, "window.antiphon.state.connection === 'connected'")
    assert state(page)["session"] != session
    expect(page.get_by_role("log")).to_contain_text("A new session")


def test_the_servers_fault_is_said_in_words(
    serve: Serve, open_page: OpenPage, microphone: Microphone
) -> None:
    script = Script(breaks_off=True)
    sound = microphone([("speech", 1), ("silence", 5)])
    page = open_page(serve(script), microphone=sound)
    page.get_by_role("button", name="Talk").click()
    expect(page.get_by_role("alert")).to_contain_text("fault", timeout=30_000)
    expect(page.get_by_role("status")).to_contain_text("Disconnected")
    script.breaks_off = False
    page.get_by_role("button", name="Reconnect").click()
    wait_for(page, "window.antiphon.state.connection === 'connected'")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_failed_answer_is_said_in_words(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(Script(fails=True)))
    page.get_by_role("button", name="Connect").click()
    wait_for(page, "window.antiphon.state.connection === 'connected'")
    page.get_by_label("Type instead of talking").fill("Hello")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("worker died")


def test_no_microphone_outside_a_secure_context(serve: Serve, open_page: OpenPage) -> None:
    url = serve(Script())
    port = url.rpartition(":")[2]
    rule = "--host-resolver-rules=MAP insecure.test 127.0.0.1"
    page = open_page(f"http://insecure.test:{port}", arguments=(rule,))
    assert not page.evaluate("window.isSecureContext")
    expect(page.get_by_role("alert")).to_contain_text("not secure")
    page.get_by_role("button", name="Talk").click()
    assert state(page)["microphone"] == "unavailable"
    write(page, "Hello")
    wait_for(page, "window.antiphon.state.turns[0]?.status === 'completed'")
    expect(page.locator("#transcript .answer")).to_contain_text("word 0.")
    assert state(page)["name"] == "connected"
    expect(page.get_by_role("alert")).to_contain_text("read the answers")


def test_a_server_that_is_gone_is_said_each_time_it_is_tried(
    serve: Serve, open_page: OpenPage, servers: ExitStack
) -> None:
    page = open_page(serve(Script(reply_ms=(200,))))
    write(page, "Hello")
    hear_reply(page)
    servers.close()
    expect(page.get_by_role("alert")).to_contain_text("Reconnect for a new session")
    page.get_by_role("button", name="Reconnect").click()
    expect(page.get_by_role("alert")).to_have_text("The server does not answer.")
    expect(page.locator("#transcript .note")).to_have_count(0)


@pytest.mark.parametrize(
    ("media", "words"),
    [(MICROPHONE_DENIED, "The microphone is blocked"), (NO_MICROPHONE, "No microphone was found")],
)
def test_without_a_microphone_the_page_says_why_and_typing_works(
    serve: Serve, open_page: OpenPage, media: tuple[str, ...], words: str
) -> None:
    page = open_page(serve(Script(reply_ms=(300,))), media=media)
    page.get_by_role("button", name="Talk").click()
    expect(page.get_by_role("alert")).to_contain_text(words)
    assert state(page)["microphone"] == "unavailable"
    expect(page.get_by_role("button", name="Talk")).to_have_attribute("aria-pressed", "false")
    write(page, "Hello")
    hear_reply(page)


def test_the_keyboard_reaches_everything_in_the_order_of_the_page(
    serve: Serve, open_page: OpenPage
) -> None:
    page = open_page(serve(Script()))
    order = []
    for _ in range(11):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    parts = ["connect", "scroll", "talk", "mute", "interrupt", "message", "BUTTON"]
    assert order == [*parts, "instructions", "shortcuts", "operator", "BODY"]


def test_whoever_has_focused_a_control_sees_it(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(Script()))
    for _ in range(10):
        page.keyboard.press("Tab")
        style = page.evaluate(
            """() => {
              const style = getComputedStyle(document.activeElement);
              return [style.outlineStyle, parseFloat(style.outlineWidth)];
            }"""
        )
        assert style == ["solid", 3]


def test_the_keys_work_beside_a_button_and_can_be_switched_off(
    serve: Serve, open_page: OpenPage, microphone: Microphone
) -> None:
    page = open_page(serve(Script()), microphone=microphone([("silence", 30)]))
    page.get_by_role("button", name="Talk").click()
    wait_for(page, "window.antiphon.state.microphone === 'on'")
    page.keyboard.press("m")
    wait_for(page, "window.antiphon.state.microphone === 'muted'")
    page.keyboard.press("m")
    wait_for(page, "window.antiphon.state.microphone === 'on'")
    page.get_by_role("checkbox", name="Use these keys").uncheck()
    page.keyboard.press("m")
    page.get_by_label("Type instead of talking").fill("m")
    assert state(page)["microphone"] == "on"
    page.get_by_role("button", name="Stop talking").press("Space")
    wait_for(page, "window.antiphon.state.microphone === 'off'")


def test_an_interrupted_listener_keeps_the_place_of_the_keyboard(
    serve: Serve, open_page: OpenPage
) -> None:
    page = open_page(serve(Script(reply_ms=(60_000,))))
    write(page, "Hello")
    hear_reply(page)
    page.get_by_role("button", name="Interrupt").press("Enter")
    wait_for(page, "window.antiphon.state.turns[0].status === 'stopped'")
    button = page.get_by_role("button", name="Interrupt")
    expect(button).to_be_focused()
    expect(button).to_have_attribute("aria-disabled", "true")


def test_a_screen_reader_is_told_of_the_connection_and_of_whole_lines_only(
    serve: Serve, open_page: OpenPage
) -> None:
    page = open_page(serve(Script(reply_ms=(1_000,), lead_ms=100)))
    page.evaluate(
        """() => {
          window.told = [];
          const node = document.querySelector("[role=status]");
          new MutationObserver(() => window.told.push(node.textContent))
            .observe(node, { childList: true, characterData: true, subtree: true });
        }"""
    )
    write(page, "Hello")
    expect(page.locator("#transcript .answer[aria-busy=true]")).to_contain_text("word 0.")
    wait_for(page, "window.antiphon.state.turns[0].status === 'completed'")
    expect(page.locator("#transcript .answer")).not_to_have_attribute("aria-busy", "true")
    assert page.evaluate("window.told") == ["Connecting", "Connected"]


def test_instructions_are_the_sessions_own_until_others_are_given(
    serve: Serve, open_page: OpenPage
) -> None:
    script = Script(instructions="Be brief.")
    page = open_page(serve(script))
    field = page.get_by_role("textbox", name="Instructions")
    page.get_by_role("button", name="Connect").click()
    expect(field).to_have_attribute("placeholder", "Be brief.")
    for words in ("Answer in rhymes.", ""):
        field.fill(words)
        field.blur()
    write(page, "Hello")
    hear_reply(page)
    given = [event["session"]["instructions"] for event in sent(script, "session.update")]
    assert given == ["Be brief.", "Answer in rhymes.", "Be brief."]


def test_still_pictures_for_those_who_want_no_motion(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve(Script(reply_ms=(60_000,))))
    animation = "getComputedStyle(document.querySelector('.dot')).animationName"
    write(page, "Hello")
    hear_reply(page)
    assert page.evaluate(animation) == "ring"
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(animation) == "none"


CONTRASTS = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (element) => {
    for (let node = element; node; node = node.parentElement) {
      const color = channels(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const ratio = (one, other) => {
    const [high, low] = [luminance(one), luminance(other)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    if (!element.checkVisibility() || element.closest("[aria-disabled=true]")) continue;
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const style = getComputedStyle(element);
    const field = element.matches("input:not([type=checkbox]), textarea");
    if (own) {
      const text = element.textContent.trim();
      found.push([text, ratio(channels(style.color), ground(element)), 4.5]);
    }
    if (field) {
      const hint = getComputedStyle(element, "::placeholder").color;
      found.push([`hint of ${element.id}`, ratio(channels(hint), ground(element)), 4.5]);
    }
    if (field || element.matches("button")) {
      const edge = ratio(channels(style.borderColor), ground(element.parentElement));
      found.push([`edge of ${element.id || element.textContent.trim()}`, edge, 3]);
    }
  }
  return found;
}"""


@pytest.mark.parametrize("dark", [False, True])
def test_what_is_written_can_be_read_on_its_ground(
    serve: Serve, open_page: OpenPage, microphone: Microphone, dark: bool
) -> None:
    """WCAG 2.2 level AA: 1.4.3 for text, 1.4.11 for the edges of controls."""
    script = Script(reply_ms=(60_000,), fails=True)
    sound = microphone([("silence", 30)])
    page = open_page(serve(script), dark=dark, microphone=sound)
    seen = page.evaluate(CONTRASTS)
    write(page, "Hello")
    expect(page.get_by_role("alert")).to_be_visible()
    seen += page.evaluate(CONTRASTS)
    script.fails = False
    page.get_by_role("button", name="Talk").click()
    wait_for(page, "window.antiphon.state.microphone === 'on'")
    page.keyboard.press("m")
    write(page, "Hello")
    hear_reply(page, turn=1)
    seen += page.evaluate(CONTRASTS)
    page.get_by_role("button", name="Disconnect").click()
    seen += page.evaluate(CONTRASTS)
    assert {"Talk", "Stop talking", "Unmute", "Interrupt", "failed"} <= {text for text, *_ in seen}
    assert [entry for entry in seen if entry[1] < entry[2]] == []


@pytest.mark.parametrize(
    ("width", "height", "dark"), [(1280, 800, False), (390, 844, True), (320, 600, False)]
)
def test_the_page_fits(
    serve: Serve,
    open_page: OpenPage,
    microphone: Microphone,
    tmp_path: Path,
    width: int,
    height: int,
    dark: bool,
) -> None:
    script = Script(reply_ms=(900, 60_000))
    sound = microphone([("silence", 30)])
    page = open_page(serve(script), width=width, height=height, dark=dark, microphone=sound)
    page.screenshot(path=tmp_path / f"empty-{width}.png")
    page.get_by_role("button", name="Talk").click()
    wait_for(page, "window.antiphon.state.microphone === 'on'")
    page.get_by_role("button", name="Mute").click()
    for turn, words in enumerate(("What is the weather like in Paris?", "And tomorrow?")):
        write(page, words)
        hear_reply(page, turn)
        if turn == 0:
            wait_for(page, "window.antiphon.state.name === 'muted'")
    page.screenshot(path=tmp_path / f"answering-{width}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = {}
    for name in ("Disconnect", "Stop talking", "Unmute", "Interrupt", "Send"):
        box = page.get_by_role("button", name=name, exact=True).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["height"] >= 44
        boxes[name] = box
    overflowing = "button => button.scrollWidth > button.clientWidth"
    for button in page.get_by_role("button").all():
        assert not button.evaluate(overflowing)
    assert boxes["Unmute"]["y"] == boxes["Interrupt"]["y"]
    if width > 320:
        assert boxes["Stop talking"]["y"] == boxes["Unmute"]["y"]
    # A thumb reaches all of it without scrolling.
    assert boxes["Send"]["y"] + boxes["Send"]["height"] <= height
