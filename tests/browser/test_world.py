"""The page of worlds in a real browser: a world is played by keyboard, touch and gamepad."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.browser.steps import state, wait_for
from tests.browser.test_console import CONTRASTS
from tests.deployment import Deployment
from tests.relay import Relay, relay
from training.worlds import arena

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

EXAMPLE = Path("examples/world.yaml")
WINDOW = 16
"""How far the page lets a world run ahead of it."""


def written(folder: Path, rate_hz: float, **options: Any) -> Path:
    config = {
        "stages": {"dream": {"engine": "workers.engines.world:WorldEngine", **options}},
        "pipelines": {
            "world": {
                "kind": "world",
                "required": True,
                "outputs": {"frames": "dream"},
                "play": {"rate_hz": rate_hz},
            }
        },
    }
    path = folder / "world.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A gateway with a world whose weights mean nothing: it is the same to a page."""
    path = written(tmp_path_factory.mktemp("world"), 20, random=1)
    with Deployment(path, environment={"PYTHONPATH": str(Path.cwd())}) as served:
        yield served


@contextmanager
def relayed(port: int) -> Iterator[tuple[Relay, asyncio.AbstractEventLoop]]:
    """A relay, with the loop of its own thread: all that is done to it is done there."""
    loop = asyncio.new_event_loop()
    ready, over = threading.Event(), asyncio.Event()
    found: list[Relay] = []

    async def run() -> None:
        async with relay(port) as it:
            found.append(it)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[run()])
    thread.start()
    ready.wait(30)
    try:
        yield found[0], loop
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def played(open_page: OpenPage, url: str, **options: Any) -> Page:
    """The page, with a world that goes on."""
    page = open_page(f"{url}/world.html", **options)
    page.get_by_role("button", name="Play").click()
    wait_for(page, "window.antiphon.state.frame > 2", 60)
    return page


def frames_later(page: Page, count: int) -> None:
    frame = state(page)["frame"]
    wait_for(page, f"window.antiphon.state.frame >= {frame + count}", 60)


def held(page: Page) -> list[str]:
    keys: list[str] = state(page)["held"]["keys"]
    return keys


def test_a_world_is_played_and_says_what_it_costs(
    deployment: Deployment, open_page: OpenPage
) -> None:
    page = played(open_page, deployment.base_url)
    page.keyboard.down("ArrowUp")
    wait_for(page, "window.antiphon.state.controlMs.length > 0")
    assert held(page) == ["up"]
    expect(page.get_by_role("button", name="up")).to_have_attribute("aria-pressed", "true")
    page.keyboard.up("ArrowUp")
    assert held(page) == []
    expect(page.locator("#control")).to_contain_text(" ms")
    expect(page.locator("#bytes")).to_contain_text("KiB")
    wait_for(page, "document.querySelectorAll('#sheet canvas').length === 16")
    before = page.evaluate("window.antiphon.pixels()")
    assert before[:2] == [16, 16]
    page.keyboard.press("p")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    wait_for(page, "window.antiphon.state.playing === false")
    # One more may have been on its way; then it stands still, and goes on by single frames.
    frame = deployment.get(f"/v1/worlds/{state(page)['session']}").json()["facts"]["committed_step"]
    wait_for(page, f"window.antiphon.state.frame >= {frame}")
    stood = state(page)["frame"]
    page.get_by_role("button", name="Step").click()
    wait_for(page, f"window.antiphon.state.frame === {stood + 1}")
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("button", name="Step").click()
    wait_for(page, "window.antiphon.state.frame === 1")
    page.get_by_role("button", name="Keep").click()
    wait_for(page, "window.antiphon.state.kept.length === 1")
    for frame in (2, 3):
        page.get_by_role("button", name="Step").click()
        wait_for(page, f"window.antiphon.state.frame === {frame}")
    page.get_by_role("button", name="Go back").click()
    wait_for(page, "window.antiphon.state.frame === 0")
    page.get_by_role("button", name="Step").click()
    wait_for(page, "window.antiphon.state.frame === 2")
    page.get_by_label("Scene").select_option("two")
    wait_for(page, "window.antiphon.state.scene === 'two'")
    page.get_by_role("button", name="End").click()
    expect(page.locator("#state")).to_have_text("The world has ended")


def test_a_seed_that_is_none_opens_no_world_and_resets_none(
    deployment: Deployment, open_page: OpenPage
) -> None:
    page = open_page(f"{deployment.base_url}/world.html")
    seed, play = page.get_by_label("Seed"), page.get_by_role("button", name="Play")
    for wrong in ("-5", "1e30", "0.5"):
        seed.fill(wrong)
        play.click()
        expect(seed).to_be_focused()
        assert page.evaluate("window.antiphon.state.connection") == "idle"
    seed.fill("7")
    play.click()
    wait_for(page, "window.antiphon.state.frame > 2", 60)
    world = deployment.get(f"/v1/worlds/{state(page)['session']}").json()
    assert world["settings"] == {"seed": 7}


def test_touch_and_gamepad_hold_keys_and_what_is_held_is_let_go_with_the_page(
    deployment: Deployment, open_page: OpenPage
) -> None:
    page = played(open_page, deployment.base_url)
    button = page.get_by_role("button", name="left")
    button.hover()
    page.mouse.down()
    assert held(page) == ["left"]
    page.mouse.up()
    assert held(page) == []
    page.evaluate(
        """() => {
          const buttons = Array.from({ length: 16 }, () => ({ pressed: false }));
          const pad = { axes: [0.9, 0, -0.5, 0], buttons };
          navigator.getGamepads = () => [pad];
          window.unplug = () => { navigator.getGamepads = () => []; };
          window.dispatchEvent(new Event("gamepadconnected"));
        }"""
    )
    wait_for(page, "window.antiphon.state.held.keys.includes('right')")
    assert state(page)["held"]["axes"] == {"turn": -0.5}
    page.evaluate("window.unplug()")
    wait_for(page, "window.antiphon.state.held.keys.length === 0")
    page.keyboard.down("d")
    assert held(page) == ["right"]
    page.evaluate("window.dispatchEvent(new Event('blur'))")
    assert held(page) == []


def test_after_a_cut_of_the_network_the_same_world_goes_on(
    deployment: Deployment, open_page: OpenPage
) -> None:
    with relayed(deployment.port) as (network, loop):
        page = played(open_page, network.url)
        before = state(page)
        loop.call_soon_threadsafe(network.partition)
        # Nobody closes the connection: the page finds out by the silence, of 3 s.
        wait_for(page, "window.antiphon.state.connection === 'disconnected'")
        cut = state(page)
        path = f"/v1/worlds/{before['session']}"
        committed = deployment.get(path).json()["facts"]["committed_step"]
        # It did not run away from its player.
        assert committed <= cut["step"] + WINDOW + 1
        loop.call_soon_threadsafe(network.heal)
        loop.call_soon_threadsafe(network.drop)
        wait_for(page, "window.antiphon.state.connection === 'connected'", 60)
        frames_later(page, 3)
        after = state(page)
        assert after["session"] == before["session"]
        assert after["frame"] > cut["frame"]
        assert after["connections"] > before["connections"]
        assert after["playing"]


def test_a_page_that_is_loaded_again_is_in_the_same_world(
    deployment: Deployment, open_page: OpenPage
) -> None:
    page = played(open_page, deployment.base_url)
    page.keyboard.press("p")
    wait_for(page, "window.antiphon.state.playing === false")
    page.get_by_role("button", name="Keep").click()
    wait_for(page, "window.antiphon.state.kept.length === 1")
    before = state(page)
    page.reload()
    wait_for(page, "window.antiphon?.state.connection === 'connected'")
    assert state(page)["session"] == before["session"]
    assert state(page)["step"] >= before["step"]
    # It can still go back to what was kept.
    assert state(page)["kept"] == before["kept"]
    page.get_by_role("button", name="Step").click()
    wait_for(page, "window.antiphon.state.frame > 0")
    page.get_by_role("button", name="Go back").click()
    wait_for(page, "window.antiphon.state.frame === 0")
    page.get_by_role("button", name="End").click()
    expect(page.locator("#state")).to_have_text("The world has ended")


def test_a_world_is_forked_into_a_page_of_its_own(
    deployment: Deployment, open_page: OpenPage
) -> None:
    page = played(open_page, deployment.base_url)
    page.keyboard.press("p")
    wait_for(page, "window.antiphon.state.playing === false")
    with page.context.expect_page() as opening:
        page.get_by_role("button", name="Fork").click()
    fork = opening.value
    wait_for(fork, "window.antiphon?.state.connection === 'connected'")
    source = state(page)
    assert state(fork)["session"] != source["session"]
    assert state(fork)["step"] == source["step"]
    fork.get_by_role("button", name="Step").click()
    wait_for(fork, f"window.antiphon.state.step === {source['step'] + 1}")
    assert state(page)["step"] == source["step"]
    fork.reload()
    wait_for(fork, "window.antiphon?.state.connection === 'connected'")
    assert state(fork)["session"] != source["session"]


@pytest.mark.parametrize(
    ("width", "height", "dark"), [(1280, 800, False), (390, 844, True), (320, 600, False)]
)
def test_the_page_fits_and_can_be_read(
    deployment: Deployment,
    open_page: OpenPage,
    tmp_path: Path,
    width: int,
    height: int,
    dark: bool,
) -> None:
    page = played(open_page, deployment.base_url, width=width, height=height, dark=dark)
    page.screenshot(path=tmp_path / f"world-{width}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("Pause", "Step", "Reset", "End", "up", "down", "left", "right"):
        box = page.get_by_role("button", name=name, exact=True).bounding_box()
        assert box is not None
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width
        assert box["height"] >= 44
    seen = page.evaluate(CONTRASTS)
    assert {"Pause", "Reset"} <= {text for text, *_ in seen}
    assert [entry for entry in seen if entry[1] < entry[2]] == []
    page.get_by_role("button", name="End").click()
    expect(page.locator("#state")).to_have_text("The world has ended")


@pytest.mark.slow
def test_opposite_keys_move_the_square_opposite_ways(open_page: OpenPage) -> None:
    with Deployment(EXAMPLE, environment={"PYTHONPATH": str(Path.cwd())}) as deployment:
        page = played(open_page, deployment.base_url)

        def place() -> Any:
            width, height, *dots = page.evaluate("window.antiphon.pixels()")
            pixels = np.array(dots, np.uint8).reshape(height, width, 4)[..., :3]
            (at,), (found,) = arena.find_player(pixels[None])
            assert found
            return at

        for axis, (low, high) in enumerate((("ArrowUp", "ArrowDown"), ("ArrowLeft", "ArrowRight"))):
            # To the one wall first, so that there is room the other way.
            for key, way in ((low, 0), (high, 1), (low, -1)):
                before = place()
                page.keyboard.down(key)
                frames_later(page, 15)
                page.keyboard.up(key)
                frames_later(page, 2)
                moved = (place() - before)[axis]
                assert way == 0 or way * moved >= 2 * arena.STEP, (key, moved)
