"""The robots' page in a real browser, over a deployment with a robot that runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from playwright.sync_api import Locator, Page, expect

from antiphon_client import Action, RobotLoop
from tests.browser.conftest import OpenPage
from tests.browser.steps import wait_for
from tests.browser.test_console import CONTRASTS
from tests.deployment import Deployment

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

KEY = "adm-0123456789"
WAIT_S = 30
SAFE = [-1.0, -1.0]
HEIGHT, WIDTH = 48, 64
OBSERVATION: dict[str, Any] = {
    "observation/image": np.full((HEIGHT, WIDTH, 3), (200, 30, 40), np.uint8),
    "observation/wrist": np.full((3, 8, 8), 90, np.uint8),
    "state": np.zeros(1),
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A gateway that serves robots and shows their cameras."""
    config = {
        "gateway": {"admin_keys": [KEY], "cameras": True},
        "stages": {"act": {"engine": "vla", "policy": "tests.workers.vla.policies:Counting"}},
        "pipelines": {
            "arm": {
                "kind": "robot",
                "required": True,
                "outputs": {"actions": "act"},
                "control": {"safe_action": "zero"},
            }
        },
    }
    path = tmp_path_factory.mktemp("robots") / "robots.yaml"
    path.write_text(yaml.safe_dump(config))
    with Deployment(path, environment={"PYTHONPATH": str(Path.cwd())}, key=KEY) as served:
        yield served


class Running:
    """A robot that acts until its test ends."""

    def __init__(self, deployment: Deployment) -> None:
        self._loop = RobotLoop.open(
            deployment.base_url,
            "arm",
            rate_hz=50,
            deadline_ms=20,
            max_age_ms=10_000,
            safe_action=SAFE,
        )
        self._over = threading.Event()
        self._acted = threading.Condition()
        self._last: Action | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def id(self) -> str:
        return self._loop.token.session

    def _run(self) -> None:
        while not self._over.is_set():
            action = self._loop.act(OBSERVATION)
            with self._acted:
                self._last = action
                self._acted.notify_all()
            self._loop.pace()

    def until(self, holds: Callable[[Action], bool]) -> None:
        """Wait for an action like this."""
        with self._acted:
            seen = self._acted.wait_for(
                lambda: self._last is not None and holds(self._last), WAIT_S
            )
        assert seen, self._last

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._loop.close()


@pytest.fixture
def robots(deployment: Deployment) -> Iterator[Callable[[], Running]]:
    """Start a robot, which ends with the test."""
    started: list[Running] = []

    def start() -> Running:
        started.append(Running(deployment))
        started[-1].until(lambda action: action.fresh)
        return started[-1]

    yield start
    for robot in started:
        robot.close()
    deployment.until(lambda: not deployment.get("/v1/admin/sessions").json()["sessions"])


def looked(open_page: OpenPage, deployment: Deployment, **options: Any) -> Page:
    """The page, once it has shown what the gateway told it."""
    page = open_page(f"{deployment.base_url}/robots.html", **options)
    page.get_by_label("Admin key of this gateway").fill(KEY)
    page.keyboard.press("Enter")
    wait_for(page, "window.antiphon.state.documents > 0")
    return page


def card(page: Page, robot: Running) -> Locator:
    return page.locator("#robots > li").filter(has_text=robot.id)


def fact(page: Page, robot: Running, name: str) -> Locator:
    terms = card(page, robot).locator(".facts > div")
    return terms.filter(has=page.get_by_text(name, exact=True)).locator("dd")


def is_stopped(action: Action) -> bool:
    return action.reason == "stopped" and action.values.tolist() == SAFE


def test_a_robot_is_seen_with_its_steps(
    deployment: Deployment, robots: Callable[[], Running], open_page: OpenPage
) -> None:
    page = looked(open_page, deployment)
    expect(page.locator("#no-robots")).to_be_visible()
    robot = robots()
    expect(card(page, robot)).to_contain_text("arm")
    expect(fact(page, robot, "Session")).to_have_text("active")
    wait_for(page, "Number(document.querySelectorAll('.facts dd')[2].textContent) > 5")
    for name in ("p50", "p99"):
        assert (fact(page, robot, name).text_content() or "").endswith(" ms")
    expect(page.get_by_role("img", name="The last")).to_be_visible()
    robot.close()
    expect(card(page, robot)).to_have_count(0)


def test_the_stop_button_stops_one_robot_until_it_is_released(
    deployment: Deployment, robots: Callable[[], Running], open_page: OpenPage
) -> None:
    robot, other = robots(), robots()
    page = looked(open_page, deployment)
    page.get_by_role("button", name=f"Stop {robot.id}").click()
    expect(page.locator("#outcome")).to_have_text(f"{robot.id} stands still.")
    robot.until(is_stopped)
    expect(card(page, robot).get_by_text("stopped", exact=True)).to_be_visible()
    expect(card(page, other).get_by_text("stopped", exact=True)).to_be_hidden()
    other.until(lambda action: action.fresh)
    page.get_by_role("button", name=f"Release {robot.id}").click()
    robot.until(lambda action: action.fresh)
    expect(card(page, robot).get_by_text("stopped", exact=True)).to_be_hidden()
    expect(fact(page, robot, "Not fresh")).to_contain_text("stopped")


def test_all_robots_are_stopped_and_those_that_come_later(
    deployment: Deployment, robots: Callable[[], Running], open_page: OpenPage
) -> None:
    robot = robots()
    page = looked(open_page, deployment)
    page.get_by_role("button", name="Stop all robots").click()
    robot.until(is_stopped)
    expect(page.locator("#held")).to_have_text(
        "All robots of arm stand still, those that come later too."
    )
    later = Running(deployment)
    try:
        later.until(is_stopped)
        page.get_by_role("button", name="Release all").click()
        for each in (robot, later):
            each.until(lambda action: action.fresh)
        expect(page.locator("#held")).to_be_hidden()
    finally:
        later.close()


def test_an_operator_looks_through_the_cameras(
    deployment: Deployment, robots: Callable[[], Running], open_page: OpenPage
) -> None:
    robot = robots()
    page = looked(open_page, deployment)
    page.get_by_role("button", name=f"Look through the cameras of {robot.id}").click()
    image = page.get_by_role("img", name="What observation/image saw")
    expect(image).to_be_visible()
    expect(page.get_by_role("img", name="What observation/wrist saw")).to_be_visible()
    wait_for(page, "document.querySelector('.cameras img').naturalWidth > 0")
    pixel = image.evaluate(
        """(image) => {
          const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
          const context = canvas.getContext("2d");
          context.drawImage(image, 0, 0, 1, 1);
          const { naturalWidth, naturalHeight } = image;
          return [naturalWidth, naturalHeight, ...context.getImageData(0, 0, 1, 1).data];
        }"""
    )
    assert pixel == [WIDTH, HEIGHT, 200, 30, 40, 255]
    expect(card(page, robot)).to_contain_text(f"observation/image, {WIDTH} × {HEIGHT}")


def test_a_gateway_that_does_not_answer_is_said_so(
    deployment: Deployment, robots: Callable[[], Running], open_page: OpenPage
) -> None:
    robot = robots()
    page = looked(open_page, deployment, said=("net::ERR_FAILED",))
    page.route("**/v1/admin/sessions/**", lambda route: route.abort())
    page.get_by_role("button", name=f"Stop {robot.id}").click()
    expect(page.locator("#outcome.refused")).to_have_text(
        f"{robot.id}: the gateway does not answer."
    )


@pytest.mark.parametrize(
    ("width", "height", "dark"), [(1280, 800, False), (390, 844, True), (320, 600, False)]
)
def test_the_page_fits_and_can_be_read(
    deployment: Deployment,
    robots: Callable[[], Running],
    open_page: OpenPage,
    tmp_path: Path,
    width: int,
    height: int,
    dark: bool,
) -> None:
    robot = robots()
    page = looked(open_page, deployment, width=width, height=height, dark=dark)
    page.get_by_role("button", name=f"Look through the cameras of {robot.id}").click()
    expect(page.get_by_role("img", name="What observation/image saw")).to_be_visible()
    page.get_by_role("button", name=f"Stop {robot.id}").click()
    expect(card(page, robot).get_by_text("stopped", exact=True)).to_be_visible()
    page.screenshot(path=tmp_path / f"robots-{width}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in (f"Stop {robot.id}", f"Release {robot.id}", "Stop all robots"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box is not None
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width
        assert width > 800 or box["height"] >= 44
    seen = page.evaluate(CONTRASTS)
    assert {"Stop", "Look", "stopped"} <= {text for text, *_ in seen}
    assert [entry for entry in seen if entry[1] < entry[2]] == []
