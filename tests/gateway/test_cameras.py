"""What operators may see of a robot's cameras, and of its steps."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from antiphon_client import AsyncRobotLoop, Gateway
from gateway.cameras import LONGEST_SIDE, Cameras, encoded
from gateway.step_figures import SHOWN, STEPS, StepFigures
from protocol.openpi import to_parts
from protocol.payloads import Payload, PayloadType
from sessions.actions import NotFresh, TurnMeasured
from tests.client.test_robot import PATIENT, options
from tests.gateway.openpi.robot import robot
from tests.gateway.openpi.test_port import ARM
from tests.gateway.real_host import serving_kind
from tests.workers.vla.policies import Counting
from workers.engines.vla import VlaEngine, VlaOptions


def decoded(png: bytes) -> npt.NDArray[Any]:
    """The pixels of a PNG without filters and interlacing, whose checksums are right."""
    stream = io.BytesIO(png)
    assert stream.read(8) == b"\x89PNG\r\n\x1a\n"
    chunks = {}
    while head := stream.read(8):
        length, name = struct.unpack(">I4s", head)
        data = stream.read(length)
        assert struct.unpack(">I", stream.read(4)) == (zlib.crc32(name + data),)
        chunks[name] = data
    width, height, depth, kind, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, rest, chunks[b"IEND"]) == (8, [0, 0, 0], b"")
    channels = {0: 1, 2: 3}[kind]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8)
    rows = rows.reshape(height, 1 + width * channels)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_the_same_in_a_png(channels: int) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (5, 7, channels), np.uint8)
    assert np.array_equal(decoded(encoded(pixels)), pixels)


def observed(**members: Any) -> list[Payload]:
    return to_parts(PayloadType.OBSERVATION, members)


async def test_the_images_of_the_last_observation_are_shown_until_the_session_ends() -> None:
    cameras = Cameras()
    first = np.zeros((4, 6, 3), np.uint8)
    wide = np.arange(600 * 40, dtype=np.uint32).astype(np.uint8).reshape(1, 40, 600)
    cameras.observed("s", observed(image=first))
    cameras.observed(
        "s",
        observed(
            image=first + 7,
            nested={"wrist": wide},
            state=np.zeros(3),
            depth=np.zeros((4, 6, 3), np.float32),
            odd=np.zeros((4, 6, 5), np.uint8),
        ),
    )
    cameras.observed("s", observed(state=np.zeros(3)))
    seen = await cameras.seen("s")
    assert [(one.camera, one.width, one.height) for one in seen.pictures] == [
        ("image", 6, 4),
        ("nested/wrist", 600, 40),
    ]
    image, wrist = (decoded(base64.b64decode(one.png)) for one in seen.pictures)
    assert np.array_equal(image, first + 7)
    assert np.array_equal(wrist[:, :, 0], wide[0, ::3, ::3])
    assert max(wrist.shape) <= LONGEST_SIDE
    assert (await cameras.seen("other")).pictures == []
    cameras.forget("s")
    assert len(cameras) == 0


async def test_what_is_no_array_of_that_shape_is_left_out() -> None:
    cameras = Cameras()
    broken = Payload(PayloadType.OBSERVATION, b"123", "|u1", (4, 6, 3), {"key": "image"})
    cameras.observed("s", [broken])
    assert (await cameras.seen("s")).pictures == []


async def test_operators_see_a_robot_at_work() -> None:
    cameras = Cameras()
    engine = VlaEngine.create(VlaOptions(policy="tests.workers.vla.policies:Counting"))
    async with (
        serving_kind(ARM, lambda _: engine, cameras=cameras) as it,
        httpx.AsyncClient(base_url=it.http) as http,
    ):
        image = np.full((2, 2, 3), 9, np.uint8)
        loop = await AsyncRobotLoop.open(Gateway(it.http), "arm", options(**PATIENT))
        async with loop:
            for _ in range(3):
                await loop.act({"state": np.zeros(1), "image": image})
            one = f"/v1/admin/sessions/{loop.session.id}"
            steps = (await http.get(one)).json()["steps"]
            assert steps["done"] >= 1
            assert steps["recent_ms"]
            assert steps["p50_ms"] <= steps["p99_ms"]
            answer = await http.get(f"{one}/cameras")
            assert answer.headers["cache-control"] == "no-store"
            (picture,) = answer.json()["pictures"]
            assert np.array_equal(decoded(base64.b64decode(picture["png"])), image)
        await it.served.emptied()
        assert len(cameras) == 0


async def test_without_leave_no_camera_is_shown_and_nothing_is_held() -> None:
    engine = VlaEngine.create(VlaOptions(policy="tests.workers.vla.policies:Counting"))
    async with (
        serving_kind(ARM, lambda _: engine) as it,
        httpx.AsyncClient(base_url=it.http) as http,
        robot(f"ws://127.0.0.1:{it.port}/v1/openpi/arm") as arm,
    ):
        await arm.infer(image=np.zeros((2, 2, 3), np.uint8))
        session = arm.metadata["antiphon"]["session"]
        answer = await http.get(f"/v1/admin/sessions/{session}/cameras")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "cameras_not_allowed")
        unknown = await http.get("/v1/admin/sessions/nobody/cameras")
        assert unknown.status_code == 404


async def test_superseded_observations_are_those_of_their_session() -> None:
    engine = VlaEngine.create(VlaOptions(policy="tests.workers.vla.policies:Counting"))
    policy = engine.policy
    assert isinstance(policy, Counting)
    async with (
        serving_kind(ARM, lambda _: engine) as it,
        robot(f"ws://127.0.0.1:{it.port}/v1/openpi/arm") as arm,
    ):
        for prompt in ("wait", "old", "older", "newest"):
            await arm.observe(prompt)
        policy.gate.set()
        for _ in range(4):
            await arm.answer()
        steps = it.host.summary(arm.metadata["antiphon"]["session"], None).steps
        assert steps is not None
        superseded = steps["superseded"]
        assert superseded + steps["done"] == 4
        text = it.metrics.render().decode()
        assert f'antiphon_observations_superseded_total{{pipeline="arm"}} {superseded}.0' in text


def measured(took_ms: float, status: str = "completed") -> TurnMeasured:
    times = {"act": {"received": 1.0, "done": 1.0 + took_ms}} if status == "completed" else {}
    return TurnMeasured(1, "default", status, None, None, None, None, None, 0, None, times)


def test_figures_are_those_of_the_last_steps() -> None:
    figures = StepFigures()
    assert figures.described()["p50_ms"] is None
    for number in range(STEPS + 100):
        figures.ended(measured(float(number)))
    figures.ended(measured(0.0, "failed"))
    figures.not_fresh(NotFresh("late", True, late=True))
    figures.not_fresh(NotFresh("stopped", False))
    figures.superseded(3)
    described = figures.described()
    assert (described["p50_ms"], described["p99_ms"]) == (100 + STEPS / 2, 100 + int(0.99 * STEPS))
    assert len(described["recent_ms"]) == SHOWN
    assert described["recent_ms"][-1] == STEPS + 99
    assert (described["done"], described["failed"]) == (STEPS + 100, 1)
    assert (described["deadlines_missed"], described["superseded"]) == (1, 3)
    assert described["safe"] == {"late": 1, "stopped": 1}
