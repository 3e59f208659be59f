"""Worlds that are played: frames that come, and how soon a key shows in them.

    PYTHONPATH=clients/python python -m loadtest.worlds [--seconds 60] [--check]

`antiphon serve` with the trained world, all on this machine's cores. First a headless browser
plays one on its page, pressing keys, and a WebSocket client looks on: `browser`. Then so many
clients play one each: `sessions`. Of each:

- `frames_per_second`: distinct ones (by their bytes) at a client; the worst of all clients.
- `control_ms`: from a hold until the first picture came in which it took effect.
- `engine_ms`: of a step at its worker, waiting for others included; `overhead_ms` is what the
  step took beside that, as the gateway saw it, with encoding and the picture's wait to be sent.
- `calls_per_frame`: of the denoiser; `denoising_steps` of a frame, which are fewer where there
  is no time for more.

Prints one JSON object. With --check the exit status is 1 when a target is missed: 10 distinct
frames a second at the WebSocket client and in the browser, and at 16 sessions no more than an
eighth of the calls a frame of one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from playwright.async_api import Page, async_playwright
from websockets.asyncio.client import connect

from antiphon_client import Gateway, Picture, World
from loadtest.machine import Disturbance, description
from tests.browser.conftest import CHROMIUM_ARGUMENTS, chromium_path
from tests.deployment import Deployment

WEIGHTS = Path("training/worlds/arena.safetensors")
KEYS = ("ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown")
WARM_S = 2.0
LEAST_HZ = 10.0
COUNTERS = ("calls", "denoising_steps", "frames")


@dataclass
class Seen:
    """What came to one client."""

    pictures: set[bytes] = field(default_factory=set)
    control_ms: list[float] = field(default_factory=list)
    engine_ms: list[float] = field(default_factory=list)
    overhead_ms: list[float] = field(default_factory=list)

    def add(self, data: bytes, told: dict[str, Any]) -> None:
        """A picture has come."""
        self.pictures.add(data)
        if "engine_ms" in told:
            self.engine_ms.append(told["engine_ms"])
            if "step_ms" in told:
                beside = told["step_ms"] - told["engine_ms"]
                self.overhead_ms.append(beside + told["age_ms"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge. `arguments` are those of the command line."""
    parser = argparse.ArgumentParser(
        "loadtest.worlds", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sessions", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--rate-hz", type=float, default=12.0)
    parser.add_argument("--threads", type=int, default=1, help="of the engine, for one call")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    disturbance = Disturbance()
    result: dict[str, Any] = {"machine": description(), "rate_hz": options.rate_hz}
    with tempfile.TemporaryDirectory(prefix="antiphon-worlds-") as folder:
        config = Path(folder) / "world.yaml"
        config.write_text(yaml.safe_dump(_config(options.rate_hz, options.threads)))
        with Deployment(config) as deployment:
            result["browser"] = asyncio.run(_browser(deployment, options.seconds))
            result["sessions"] = {
                count: asyncio.run(_clients(deployment, count, options.seconds))
                for count in options.sessions
            }
    result["disturbance"] = disturbance.result()
    result["missed"] = _missed(result)
    print(json.dumps(result, indent=2))
    return 1 if options.check and result["missed"] else 0


def _config(rate_hz: float, threads: int) -> dict[str, Any]:
    stage = {"engine": "world", "weights": str(WEIGHTS.absolute()), "threads": threads}
    world = {
        "kind": "world",
        "required": True,
        "outputs": {"frames": "dream"},
        "play": {"rate_hz": rate_hz},
        "limits": {"sessions": 32},
    }
    return {"stages": {"dream": {**stage, "blocks": 512}}, "pipelines": {"world": world}}


def _missed(result: dict[str, Any]) -> list[str]:
    browser, sessions = result["browser"], result["sessions"]
    missed = [
        name
        for name, seen in (
            ("frames a second at the WebSocket client", browser["frames_per_second"]),
            ("frames a second in the browser", browser["browser_frames_per_second"]),
        )
        if seen < LEAST_HZ
    ]
    if 1 in sessions and 16 in sessions:
        alone, together = (sessions[count]["calls_per_frame"] for count in (1, 16))
        if together > alone / 8:
            missed.append("calls a frame at 16 sessions")
    return missed


async def _browser(deployment: Deployment, seconds: float) -> dict[str, Any]:
    """A browser plays, and a client looks on."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium_path(), args=list(CHROMIUM_ARGUMENTS)
        )
        page = await browser.new_page()
        await page.goto(f"{deployment.base_url}/world.html")
        await page.get_by_role("button", name="Play").click()
        await page.wait_for_function("() => window.antiphon.state.frame > 10")
        state = await page.evaluate("() => window.antiphon.state")
        looking = asyncio.create_task(_look_on(deployment, state["session"], seconds))
        before = await _counted(deployment)
        received, begun_s = state["received"], time.monotonic()
        pressing = asyncio.create_task(_press(page))
        seen = await looking
        elapsed_s = time.monotonic() - begun_s
        pressing.cancel()
        await asyncio.gather(pressing, return_exceptions=True)
        after = await page.evaluate("() => window.antiphon.state")
        counted = await _counted(deployment)
        await page.get_by_role("button", name="End").click()
        await page.wait_for_function("() => window.antiphon.state.connection === 'ended'")
        await browser.close()
    seen.control_ms = after["controlMs"]
    return {
        **_figures([seen], seconds, before, counted),
        "browser_frames_per_second": round((after["received"] - received) / elapsed_s, 2),
    }


async def _press(page: Page) -> None:
    """Keys, one after the other, each for a third of a second."""
    while True:
        for key in KEYS:
            await page.keyboard.down(key)
            await asyncio.sleep(0.33)
            await page.keyboard.up(key)
            await asyncio.sleep(0.17)


async def _look_on(deployment: Deployment, session: str, seconds: float) -> Seen:
    """What a WebSocket client is shown of a world that another plays."""
    seen = Seen()
    url = f"{deployment.ws_url}/v1/worlds/{session}/stream"
    async with connect(url, compression=None, max_size=None) as socket:
        await socket.send(json.dumps({"type": "attach", "role": "observer"}))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    told = json.loads(await socket.recv())
                    if told["type"] == "frame":
                        data = await socket.recv()
                        assert isinstance(data, bytes)
                        seen.add(data, told)
    return seen


async def _clients(deployment: Deployment, count: int, seconds: float) -> dict[str, Any]:
    """So many clients play a world each."""
    gateway = Gateway(deployment.base_url)
    async with contextlib.AsyncExitStack() as worlds:
        played = [
            await worlds.enter_async_context(await World.open(gateway, settings={"seed": seed}))
            for seed in range(count)
        ]
        for world in played:
            await world.play()
        await asyncio.gather(*(_play(world, WARM_S) for world in played))
        before = await _counted(deployment)
        seen = await asyncio.gather(*(_play(world, seconds) for world in played))
        counted = await _counted(deployment)
    return _figures(seen, seconds, before, counted)


async def _play(world: World, seconds: float) -> Seen:
    """Hold one key after the other, each until it has shown."""
    seen, loop = Seen(), asyncio.get_running_loop()
    keys, place = list(world.world["keys"]), 0
    until_s = loop.time() + seconds
    held_s, sequence = loop.time(), await world.hold(keys[0])
    while loop.time() < until_s:
        picture: Picture = await world.next_picture()
        seen.add(picture.data, dict(picture.told))
        if picture.action_sequence >= sequence:
            seen.control_ms.append((loop.time() - held_s) * 1000)
            # Anywhere between two frames, as people press keys.
            await asyncio.sleep(0.013 * (len(seen.control_ms) % 7))
            place = (place + 1) % len(keys)
            held_s, sequence = loop.time(), await world.hold(keys[place])
    return seen


async def _counted(deployment: Deployment) -> dict[str, float]:
    """What the engine has done, as of its worker's last heartbeat."""
    metrics = await asyncio.to_thread(deployment.metrics)
    return {
        name: metrics[f'antiphon_engine_total{{counter="{name}",stage="dream",worker="dream-0"}}']
        for name in COUNTERS
    }


def _figures(
    seen: Sequence[Seen], seconds: float, before: dict[str, float], after: dict[str, float]
) -> dict[str, Any]:
    done = {name: after[name] - before[name] for name in COUNTERS}
    control = [taken for one in seen for taken in one.control_ms]
    engine = [taken for one in seen for taken in one.engine_ms]
    overhead = [taken for one in seen for taken in one.overhead_ms]
    rates = [len(one.pictures) / seconds for one in seen]
    return {
        "frames_per_second": round(min(rates), 2),
        "frames_per_second_of_all": round(sum(rates), 2),
        "control_ms": _spread(control),
        "engine_ms": _spread(engine),
        "overhead_ms": _spread(overhead),
        "calls_per_frame": round(done["calls"] / done["frames"], 3),
        "denoising_steps": round(done["denoising_steps"] / done["frames"], 3),
    }


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 1),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
