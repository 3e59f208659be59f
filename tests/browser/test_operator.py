"""The operator's page in a real browser, over a deployment with a synthetic engine."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import OpenPage
from tests.browser.steps import state, wait_for
from tests.browser.test_console import CONTRASTS
from tests.deployment import Deployment

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

MIB = 1 << 20
STATE_BYTES = 8 * MIB
HEADINGS = ["Session", "Pipeline", "State", "Bytes", "Parked", "Idle", "Ends in"]
KEY = "adm-0123456789"
REFUSED = "the server responded with a status of 409"
BROKEN = ("net::ERR_INCOMPLETE_CHUNKED_ENCODING", "net::ERR_CONNECTION_RESET")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A gateway for step loops that take 16 MiB each, since a step makes a second state."""
    config = {
        "gateway": {"admin_keys": [KEY]},
        "stages": {
            "world": {
                "engine": "loadtest.synthetic_step:SyntheticStep",
                "state_bytes": STATE_BYTES,
                "budget": {"cpu": (64 + 120) * MIB + 12 * STATE_BYTES},
            }
        },
        "pipelines": {
            "game": {"kind": "world", "outputs": {"frames": "world"}, "limits": {"sessions": 6}},
            "small": {
                "kind": "world",
                "outputs": {"frames": "world"},
                "limits": {"sessions": 1, "waiting": 2},
            },
        },
    }
    path = tmp_path_factory.mktemp("operator") / "world.yaml"
    path.write_text(yaml.safe_dump(config))
    with Deployment(path, environment={"PYTHONPATH": str(Path.cwd())}, key=KEY) as served:
        yield served


@pytest.fixture
def sessions(deployment: Deployment) -> Iterator[Sessions]:
    """The sessions of a test, which end with it."""
    with httpx.Client(base_url=deployment.base_url, timeout=30) as client:
        opened = Sessions(client)
        yield opened
        for session in opened.ids:
            client.delete(f"/v1/sessions/{session}")
        deployment.until(lambda: not deployment.get("/v1/admin/sessions").json()["sessions"])


class Sessions:
    """What clients do beside the page."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.ids: list[str] = []

    def open(self) -> str:
        answer = self.client.post("/v1/sessions", json={"limits": {"grace_s": 25}})
        assert answer.status_code == 201, answer.text
        self.ids.append(answer.json()["id"])
        return self.ids[-1]

    def step(self, session: str, number: int, **parameters: Any) -> None:
        data = base64.b64encode(b"\7\0\0\0").decode()
        action = {"type": "actions", "data": data, "dtype": "<i4", "shape": [1]}
        said = {"type": "step", "step": number, "inputs": [action], "parameters": parameters}
        answer = self.client.post(
            f"/v1/sessions/{session}/update", json={"id": f"step-{number}", "input": said}
        )
        assert answer.status_code == 200, answer.text


def looked(open_page: OpenPage, deployment: Deployment, **options: Any) -> Page:
    """The page, once it has shown what the gateway told it."""
    page = open_page(f"{deployment.base_url}/operator.html", **options)
    page.get_by_label("Admin key of this gateway").fill(KEY)
    page.keyboard.press("Enter")
    wait_for(page, "window.antiphon.state.documents > 0")
    return page


def row(page: Page, session: str) -> Locator:
    return page.get_by_role("row").filter(has_text=session)


def cell(page: Page, session: str, heading: str) -> Locator:
    return row(page, session).locator(f"[data-label={heading}]")


def press(page: Page, action: str, session: str) -> None:
    """Press a button of a session, and again if it wants that."""
    row(page, session).get_by_role("button", name=f"{action} {session}").click()
    if action in ("Evict", "Close"):
        row(page, session).get_by_role("button", name=f"{action} it for sure").click()


def test_a_session_is_parked_restored_and_evicted(
    deployment: Deployment, sessions: Sessions, open_page: OpenPage
) -> None:
    session = sessions.open()
    page = looked(open_page, deployment)
    outcome, timeline = page.locator("#outcome"), page.locator("#timeline li")
    expect(cell(page, session, "Bytes")).to_have_text("16 MiB")
    expect(cell(page, session, "State")).to_have_text("detached")
    expect(page.locator("#workers")).to_contain_text("world-0")
    expect(page.locator("#workers dl")).to_contain_text("sessions16 MiB")
    expect(page.locator("#pipelines")).to_contain_text("1 of 6 places taken")

    page.get_by_role("button", name=session, exact=True).click()
    expect(page.get_by_role("heading", name=session)).to_be_visible()
    expect(timeline.first).to_contain_text("opening")

    press(page, "Park", session)
    expect(outcome).to_have_text(f"{session} is put away: world.")
    expect(cell(page, session, "Parked")).to_have_text("world")
    expect(cell(page, session, "Bytes")).to_have_text("0 B")
    expect(page.locator("#workers dl")).to_contain_text("sessions0 B")
    expect(timeline.last).to_contain_text("parked")

    press(page, "Restore", session)
    expect(outcome).to_have_text(f"{session} is brought back: world (snapshot).")
    expect(cell(page, session, "Bytes")).to_have_text("16 MiB")
    expect(cell(page, session, "Parked")).to_have_text("")
    expect(timeline.last).to_contain_text("restoredstage world, origin snapshot")

    press(page, "Evict", session)
    expect(row(page, session)).to_have_count(0)
    expect(page.get_by_text("No sessions.")).to_be_visible()
    expect(timeline.nth(-2)).to_contain_text("closingreason evicted")
    expect(timeline.last).to_contain_text("closed")
    expect(page.locator("#facts")).to_contain_text("closed")


def test_who_waits_for_a_place_is_shown(
    deployment: Deployment, sessions: Sessions, open_page: OpenPage
) -> None:
    page = looked(open_page, deployment)
    expect(page.locator("#waiting")).to_be_hidden()
    client = sessions.client
    client.post("/v1/sessions", json={"model": "small"}).raise_for_status()
    events = {"accept": "text/event-stream"}
    with client.stream("POST", "/v1/sessions", json={"model": "small"}, headers=events) as waits:
        waits.raise_for_status()
        row_ = page.locator("#waiting-rows tr")
        expect(row_).to_have_count(1)
        expect(row_).to_contain_text("small")
        expect(page.locator("#pipelines")).to_contain_text("1 of 1 places taken")
    # Who hung up does not wait any more.
    expect(page.locator("#waiting")).to_be_hidden()
    (held,) = deployment.get("/v1/admin/sessions").json()["sessions"]
    sessions.ids.append(held["id"])


def test_a_session_with_a_turn_in_flight_is_not_evicted_but_closed(
    deployment: Deployment, sessions: Sessions, open_page: OpenPage
) -> None:
    session = sessions.open()
    sessions.step(session, 1, stall=True)
    page = looked(open_page, deployment, said=(REFUSED,))
    press(page, "Evict", session)
    expect(page.locator("#outcome.refused")).to_have_text(
        f"{session}: a turn of this session is in flight."
    )
    press(page, "Park", session)
    expect(page.locator("#outcome.refused")).to_contain_text("cannot be parked now: it has work")
    press(page, "Close", session)
    expect(page.locator("#outcome")).to_have_text(f"{session} is closed.")
    expect(row(page, session)).to_have_count(0)


def test_the_heaviest_come_first_until_another_order_is_chosen(
    deployment: Deployment, sessions: Sessions, open_page: OpenPage
) -> None:
    ids = [sessions.open() for _ in range(3)]
    deployment_park = f"{deployment.base_url}/v1/admin/sessions/{ids[0]}/park"
    httpx.post(deployment_park, headers={"authorization": f"Bearer {KEY}"}).raise_for_status()
    page = looked(open_page, deployment)
    names = page.locator("#session-rows th")
    expect(page.locator("[aria-sort=descending]")).to_have_text("Bytes")
    expect(names).to_have_text([*sorted(ids[1:]), ids[0]])
    page.get_by_role("button", name="Session", exact=True).click()
    expect(names).to_have_text(sorted(ids))
    page.get_by_role("button", name="Session", exact=True).click()
    expect(page.locator("[aria-sort=descending]")).to_have_text("Session")
    expect(names).to_have_text(sorted(ids, reverse=True))


def test_the_keyboard_does_all_and_takes_back_what_was_pressed_once(
    deployment: Deployment, sessions: Sessions, open_page: OpenPage
) -> None:
    session = sessions.open()
    page = looked(open_page, deployment)
    expect(row(page, session)).to_be_visible()
    page.locator("body").click(position={"x": 2, "y": 2})
    reached = []
    while (name := page.evaluate("document.activeElement.textContent.trim()")) != "Close":
        page.keyboard.press("Tab")
        reached.append(name)
        assert len(reached) < 30
    assert reached[-11:] == [*HEADINGS, session, "Park", "Restore", "Evict"]
    style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert style == "solid"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "Sure?"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == "Close"
    page.keyboard.press("Enter")
    page.keyboard.press("Shift+Tab")
    expect(row(page, session)).not_to_contain_text("Sure?")
    page.keyboard.press("Tab")
    # The documents that come meanwhile take the focus from nobody.
    seen = state(page)["documents"]
    wait_for(page, f"window.antiphon.state.documents > {seen + 1}")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(row(page, session)).to_have_count(0)


def test_a_key_is_asked_for_until_it_is_right_and_kept_in_the_tab(
    deployment: Deployment, open_page: OpenPage
) -> None:
    page = open_page(f"{deployment.base_url}/operator.html")
    field = page.get_by_label("Admin key of this gateway")
    expect(page.get_by_role("alert")).to_have_text("This gateway needs an admin key.")
    field.fill("adm-wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("This key is not accepted.")
    field.fill("schlüssel")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("This key cannot be sent by a browser.")
    field.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").first).to_have_text("Live")
    expect(field).to_be_hidden()
    expect(page.get_by_role("alert")).to_be_hidden()
    assert page.evaluate("Object.values(sessionStorage)") == [KEY]
    assert page.evaluate("localStorage.length") == 0
    page.reload()
    wait_for(page, "window.antiphon?.state.documents > 0")
    page.get_by_role("link", name="Console").click()
    page.get_by_role("link", name="For operators").click()
    wait_for(page, "window.antiphon?.state.documents > 0")


def test_a_stream_that_breaks_is_said_and_comes_back_by_itself(
    deployment: Deployment, sessions: Sessions, open_page: OpenPage
) -> None:
    page = looked(open_page, deployment, said=BROKEN)
    expect(page.get_by_text("No sessions.")).to_be_visible()
    deployment.kill("gateway")
    expect(page.get_by_role("alert")).to_contain_text("What is shown may be old")
    expect(page.get_by_role("status").first).to_contain_text("reconnecting")
    expect(page.get_by_role("status").first).to_have_text("Live", timeout=60_000)
    expect(page.get_by_role("alert")).to_be_hidden()
    deployment.until_ready()
    expect(row(page, sessions.open())).to_be_visible()


def hide(page: Page, hidden: bool) -> None:
    """The page goes to the background, or comes back."""
    page.evaluate(
        """(hidden) => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def test_a_page_in_the_background_looks_away(
    deployment: Deployment, sessions: Sessions, open_page: OpenPage
) -> None:
    page = looked(open_page, deployment)
    hide(page, True)
    expect(page.get_by_role("status").first).to_have_text("Not looking")
    session = sessions.open()
    assert state(page)["connection"] == "away"
    hide(page, False)
    expect(row(page, session)).to_be_visible()
    expect(page.get_by_role("status").first).to_have_text("Live")


def test_a_gateway_that_falls_silent_is_given_up(
    deployment: Deployment, open_page: OpenPage
) -> None:
    page = looked(open_page, deployment)
    hide(page, True)
    page.clock.install()
    page.route("**/v1/admin/live", lambda route: None)
    with page.expect_request("**/v1/admin/live"):
        hide(page, False)
    page.clock.fast_forward(9_000)
    expect(page.get_by_role("alert")).to_be_hidden()
    page.clock.fast_forward(1_000)
    expect(page.get_by_role("alert")).to_contain_text("The connection was lost")
    page.unroute("**/v1/admin/live")
    page.clock.fast_forward(500)
    expect(page.get_by_role("status").first).to_have_text("Live")


def test_what_comes_from_others_is_text_and_who_waits_is_listed(
    deployment: Deployment, open_page: OpenPage
) -> None:
    page = looked(open_page, deployment)
    page.evaluate(
        """async () => {
          const { showWaiting, showPipelines } = await import("./ledger-view.js");
          const { showFacts, showTimeline } = await import("./timeline-view.js");
          const evil = "<img src=x onerror=alert(1)>";
          showWaiting([{ tenant: evil, waited_s: 75, position: 1 }]);
          showPipelines({ [evil]: { sessions: 0, session_limit: 1, stages: { [evil]: evil } } });
          const entries = [{ at_ms: 1, event: evil, [evil]: evil }];
          showFacts({ id: evil, state: evil, bytes: {} });
          showTimeline({ dropped: 2, entries });
          document.querySelector("#chosen").hidden = false;
        }"""
    )
    assert page.locator("main img").count() == 0
    assert page.locator("main").inner_text().count("<img") >= 6
    waiting = page.get_by_role("table", name="Waiting for a place")
    expect(waiting.get_by_role("columnheader")).to_have_text(["tenant", "waited", "position"])
    expect(waiting.get_by_role("cell").nth(1)).to_have_text("1 min 15 s")


@pytest.mark.parametrize(
    ("width", "height", "dark"),
    [(1280, 800, False), (1280, 800, True), (390, 844, True), (360, 740, False)],
)
def test_the_page_fits_and_can_be_read(
    deployment: Deployment,
    sessions: Sessions,
    open_page: OpenPage,
    tmp_path: Path,
    width: int,
    height: int,
    dark: bool,
) -> None:
    ids = [sessions.open() for _ in range(3)]
    for number in (1, 2):
        sessions.step(ids[0], number)
        status = f"/v1/sessions/{ids[0]}"
        # Without a client that is attached nobody is told of a step's end.
        deployment.until(
            lambda: sessions.client.get(status).json()["facts"]["committed_step"] == number  # noqa: B023
        )
    page = looked(open_page, deployment, width=width, height=height, dark=dark)
    for action in ("Park", "Restore"):
        press(page, action, ids[0])
    press(page, "Park", ids[1])
    expect(cell(page, ids[1], "Parked")).to_have_text("world")
    page.get_by_role("button", name=ids[0], exact=True).click()
    expect(page.locator("#timeline li").last).to_contain_text("snapshot")
    page.screenshot(path=tmp_path / f"operator-{width}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("Park", "Restore", "Evict", "Close"):
        button = page.get_by_role("button", name=f"{name} {ids[0]}")
        button.scroll_into_view_if_needed()
        box = button.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert not button.evaluate("button => button.scrollWidth > button.clientWidth")
        assert width > 800 or box["height"] >= 44
    row(page, ids[0]).get_by_role("button", name="Evict").click()
    seen = page.evaluate(CONTRASTS)
    assert {"Sure?", "Park", "snapshot"} <= {
        word for text, *_ in seen for word in (text, *text.split())
    }
    # Headings and ids are buttons that look like text.
    without_edge = {f"edge of {name}" for name in (*HEADINGS, *ids)}
    seen = [entry for entry in seen if entry[0] not in without_edge]
    assert [entry for entry in seen if entry[1] < entry[2]] == []
