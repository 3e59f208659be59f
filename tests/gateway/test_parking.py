"""Sessions make room for others, over real links and with real files, and lose no step."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.synthetic_step import StepOptions, SyntheticStep, checksum_after
from protocol.payloads import Payload
from sessions.pipeline import Kind, Limits, Pipeline
from tests.gateway.native_client import Stream, opened, requests, stream
from tests.gateway.real_host import RealGateway, serving_kind
from tests.gateway.test_native_steps import held, step
from workers.snapshots import Draft, SnapshotPlace, SnapshotStore

DEVICE = "synthetic:0"
STATE_BYTES = 1 << 20
WORLD = Pipeline(
    "game", ("world",), (), {"frames": "world"}, kind=Kind.WORLD, limits=Limits(sessions=64)
)


class OnDevice(SyntheticStep):
    """Its state counts as that of a device, so that a budget is one of states alone."""

    def declare(self, settings: dict[str, Any]) -> dict[str, int]:
        return {DEVICE: STATE_BYTES}


def files(directory: Path) -> list[Path]:
    """The files that hold states."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    return [path for path in found if path.stat().st_size >= STATE_BYTES]


def spoil(directory: Path, damage: str) -> None:
    """What may become of a file while nobody looks."""
    (path,) = files(directory)
    if damage == "removed":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(b"?")


@asynccontextmanager
async def serving(
    places: int,
    store_bytes: int = 64 * STATE_BYTES,
    pipeline: Pipeline = WORLD,
    spec: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[RealGateway, Path]]:
    """A gateway whose worker has room for the states of `places` sessions, and its store."""
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory:
        spec = {
            "budget": {DEVICE: places * STATE_BYTES},
            "snapshots": [SnapshotPlace(directory, store_bytes)],
            **(spec or {}),
        }
        options = StepOptions(state_bytes=STATE_BYTES)
        async with serving_kind(pipeline, lambda _: OnDevice(options), spec=spec) as it:
            yield it, Path(directory)
        # Whoever ended has taken along what was parked of it.
        assert await asyncio.to_thread(files, Path(directory)) == []


class Player:
    """A session that is played; every step's checksum is what all steps so far come to."""

    def __init__(self, session: dict[str, Any], connection: Stream) -> None:
        self.id = session["id"]
        self.connection = connection
        self.inputs: list[list[Payload]] = []

    async def step(self) -> None:
        action = held(len(self.inputs), 7)
        self.inputs.append([action])
        await self.connection.say("update", input=step(len(self.inputs), action))
        done = await self.connection.until("step_done")
        (frame,) = done["outputs"]["frames"]
        assert frame["data"][:32].hex() == checksum_after(self.inputs)

    @property
    def residency(self) -> list[str]:
        """What it was told of its state's whereabouts."""
        kinds = ("parking", "parked", "restoring", "restored")
        return [kind for kind in self.connection.kinds if kind in kinds]


class Game:
    """A gateway with its store, and the sessions that are played on it."""

    def __init__(
        self, gateway: RealGateway, store: Path, http: httpx.AsyncClient, stack: AsyncExitStack
    ) -> None:
        self.gateway = gateway
        self.store = store
        self.http = http
        self.players: list[Player] = []
        self._stack = stack

    async def join(self) -> Player:
        session = await opened(self.http)
        connection = await self._stack.enter_async_context(
            stream(
                self.gateway.stream(session["id"]),
                "antiphon.msgpack",
                role="controller",
                secret=session["secret"],
            )
        )
        await connection.until("attached")
        self.players.append(Player(session, connection))
        return self.players[-1]

    async def heartbeat(self) -> None:
        """Wait for the next word of the worker about itself."""
        host = self.gateway.host
        (replica,) = host._placement.all()
        before = replica.status
        while replica.status is before:
            host._changed.clear()
            await host._changed.wait()

    async def where(self, player: Player) -> tuple[list[str], str]:
        """The stages at which it is parked, and its state."""
        entry = (await self.http.get(f"/v1/admin/sessions/{player.id}")).json()
        return entry["parked"], entry["state"]


@asynccontextmanager
async def playing(places: int, **options: Any) -> AsyncIterator[Game]:
    async with (
        serving(places, **options) as (gateway, store),
        requests(gateway.http) as http,
        AsyncExitStack() as stack,
    ):
        yield Game(gateway, store, http, stack)


async def test_f2_a_step_finds_the_state_of_the_one_before_however_often_it_was_away() -> None:
    async with playing(places=2) as game:
        for _ in range(6):
            await (await game.join()).step()
        for _ in range(3):
            for player in game.players:
                await player.step()
        for player in game.players:
            away = player.residency
            assert away.count("parked") >= 3
            assert "restored" in away
        origins = {
            frame["origin"]
            for player in game.players
            for frame in player.connection.frames
            if frame["type"] == "restored"
        }
        assert origins == {"snapshot"}


async def test_room_is_made_in_the_order_of_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    parked: list[str] = []
    begin = SnapshotStore.begin

    def noted(store: SnapshotStore, session: str, stage: str, size_bytes: int) -> Draft:
        parked.append(session)
        return begin(store, session, stage, size_bytes)

    monkeypatch.setattr(SnapshotStore, "begin", noted)
    async with playing(places=3) as game:
        resident: OrderedDict[str, None] = OrderedDict()
        expected: list[str] = []

        def used(player: Player) -> None:
            if player.id not in resident and len(resident) == 3:
                expected.append(resident.popitem(last=False)[0])
            resident[player.id] = None
            resident.move_to_end(player.id)

        for _ in range(8):
            player = await game.join()
            used(player)
            await player.step()
            used(player)
        for _ in range(40):
            player = rng.choice(game.players)
            await player.step()
            used(player)
        assert parked == expected


async def test_it_is_parked_and_restored_by_the_operator() -> None:
    async with playing(places=2) as game:
        player = await game.join()
        await player.step()
        address = f"/v1/admin/sessions/{player.id}"
        answer = await game.http.post(f"{address}/park")
        assert answer.status_code == 200
        assert answer.json() == {"id": player.id, "parked": ["world"], "kept": {}}
        assert files(game.store)
        await player.connection.until("parked")
        assert (await game.http.post(f"{address}/park")).json()["parked"] == ["world"]
        assert await game.where(player) == (["world"], "active")
        answer = await game.http.post(f"{address}/restore")
        assert (answer.status_code, answer.json()["restored"]) == (200, {"world": "snapshot"})
        assert (await player.connection.until("restored"))["origin"] == "snapshot"
        assert await game.where(player) == ([], "active")
        await player.step()


async def test_the_operator_is_told_that_what_was_stored_is_lost() -> None:
    async with playing(places=2) as game:
        player = await game.join()
        await player.step()
        address = f"/v1/admin/sessions/{player.id}"
        await game.http.post(f"{address}/park")
        for file in game.store.iterdir():
            file.write_bytes(b"damaged")
        answer = await game.http.post(f"{address}/restore")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "session_state_lost")
        told = await player.connection.until("restored")
        assert (told["origin"], told["error"]["code"]) == ("nothing", "session_state_lost")
        entries = game.gateway.host.history(player.id).timeline["entries"]
        lost, restored = entries[-2:]
        assert (lost["event"], lost["committed_step"]) == ("state_lost", 1)
        assert lost["reason"] == restored["reason"] == error["message"]
        assert (restored["event"], restored["origin"]) == ("restored", "nothing")
        assert await game.where(player) == ([], "active")


async def test_a_full_gateway_says_so_until_something_changes() -> None:
    rooms = f"/readyz?pipeline={WORLD.name}&capacity=1"
    async with playing(places=2, pipeline=replace(WORLD, parks=False)) as game:
        players = [await game.join(), await game.join()]
        assert (await game.http.get(rooms)).status_code == 200
        assert (await game.http.post("/v1/sessions", json={})).status_code == 503
        assert (await game.http.get(rooms)).status_code == 503
        await game.heartbeat()
        await game.heartbeat()
        assert (await game.http.get(rooms)).status_code == 503
        assert (await game.http.delete(f"/v1/admin/sessions/{players[0].id}")).status_code == 202
        await players[0].connection.until("session_ended")
        await game.heartbeat()
        assert (await game.http.get(rooms)).status_code == 200


async def test_a_worker_knows_what_the_one_before_it_has_stored() -> None:
    async with playing(places=2) as game:
        player = await game.join()
        await player.step()
        await game.gateway.host.park_session(player.id)
        served = game.gateway.served
        await served.replace("world")
        await served.ready()
        stored = served.workers["world"]._control._parked[player.id]
        assert stored.owner == game.gateway.host.incarnation
        await player.step()


async def test_the_operator_is_told_that_the_store_is_full() -> None:
    async with playing(places=2, store_bytes=1) as game:
        player = await game.join()
        await player.step()
        answer = await game.http.post(f"/v1/admin/sessions/{player.id}/park")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "capacity_exceeded")
        assert "no room for the state in the snapshot store" in error["message"]
        kept = await player.connection.until("restored")
        assert (kept["origin"], kept["error"]["message"]) == ("kept", error["message"])
        entries = game.gateway.host.history(player.id).timeline["entries"]
        assert entries[-1]["reason"] == error["message"]
        assert await game.where(player) == ([], "active")
        await player.step()


@pytest.mark.parametrize(
    ("pipeline", "spec", "why"),
    [
        (replace(WORLD, parks=False), {}, "'durability: none'"),
        (WORLD, {"snapshots": []}, "parking.memory is 0, and no parking.disk"),
    ],
)
async def test_the_operator_is_told_what_can_never_be_parked(
    pipeline: Pipeline, spec: dict[str, Any], why: str
) -> None:
    async with playing(places=2, pipeline=pipeline, spec=spec) as game:
        player = await game.join()
        answer = await game.http.post(f"/v1/admin/sessions/{player.id}/park")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported")
        assert "stage world" in error["message"]
        assert why in error["message"]
        assert await game.where(player) == ([], "active")


async def test_its_timeline_says_what_became_of_it() -> None:
    async with playing(places=2) as game:
        player = await game.join()
        await player.step()
        address = f"/v1/admin/sessions/{player.id}"
        await game.http.post(f"{address}/park")
        await player.connection.until("parked")
        await player.step()
        await player.connection.socket.close()
        await game.http.delete(address)
        await game.gateway.host.drained()
        history = (await game.http.get(address)).json()
    assert (history["state"], history["turns"]) == ("closed", 2)
    entries = history["timeline"]["entries"]
    assert history["noted"] == len(entries)
    ages = [entry["at_ms"] for entry in entries]
    assert ages == sorted(ages)
    told = [{n: v for n, v in entry.items() if n != "at_ms"} for entry in entries]
    for entry in told:
        assert entry.pop("ttft_ms", 0.0) >= 0.0
    assert [entry for entry in told if entry["event"] != "detached"] == [
        {"event": "opening"},
        {"event": "opened"},
        {"event": "attached", "role": "controller"},
        {"event": "turn_ended", "turn": 1, "status": "completed"},
        {"event": "parking", "stage": "world", "reason": "requested"},
        {"event": "parked", "stage": "world"},
        {"event": "restoring", "stage": "world"},
        {"event": "restored", "stage": "world", "origin": "snapshot"},
        {"event": "turn_ended", "turn": 2, "status": "completed"},
        {"event": "closing", "reason": "admin"},
        {"event": "closed"},
    ]


async def test_its_timeline_says_who_came_and_who_was_not_let_in() -> None:
    async with playing(places=1) as game:
        player = await game.join()
        url = game.gateway.stream(player.id)
        async with stream(url, role="controller", secret="another") as refused:
            await refused.closed()
        async with stream(url, role="observer") as observer:
            await observer.until("attached")
        async with stream(url, role="controller", takeover=True) as other:
            await other.until("attached")
            await player.connection.closed()
            address = f"/v1/admin/sessions/{player.id}"
            history = (await game.http.get(address)).json()
        told = [(e["event"], *e.values()) for e in history["timeline"]["entries"][4:]]
        assert [(event, *values[2:]) for event, *values in told] == [
            ("attach_refused", "resume_refused"),
            ("attached", "observer"),
            ("let_go", "replaced"),
            ("attached", "controller"),
        ]


async def test_its_clocks_are_told() -> None:
    limits = Limits(sessions=4, idle_ms=100_000, max_age_ms=300_000, grace_ms=20_000)
    async with playing(places=2, pipeline=replace(WORLD, limits=limits)) as game:
        session = await opened(game.http)
        (entry,) = (await game.http.get("/v1/admin/sessions")).json()["sessions"]
        assert 0 < entry["grace_left_s"] <= 20 < entry["idle_left_s"] <= 100
        assert 100 < entry["age_left_s"] <= 300
        url = game.gateway.stream(session["id"])
        async with stream(url, role="controller", secret=session["secret"]) as connection:
            await connection.until("attached")
            (entry,) = (await game.http.get("/v1/admin/sessions")).json()["sessions"]
            assert entry["grace_left_s"] is None
            assert entry["idle_left_s"] <= 100


async def test_the_operator_evicts_it_but_not_from_a_turn() -> None:
    async with playing(places=1) as game:
        player = await game.join()
        action = held(0, 7)
        stalled = {**step(1, action), "parameters": {"stall": True}}
        await player.connection.say("update", id="c1", input=stalled)
        await player.connection.until("answer")
        address = f"/v1/admin/sessions/{player.id}"
        refused = await game.http.post(f"{address}/evict")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_busy")
        await player.connection.say("signal", signal={"type": "interrupt"})
        await player.connection.until("step_failed")
        answer = await game.http.post(f"{address}/evict")
        assert (answer.status_code, answer.json()) == (202, {"id": player.id, "closing": True})
        assert (await player.connection.until("session_ended"))["reason"] == "evicted"
        assert await player.connection.closed() == (1000, "evicted")
        assert (await game.http.post(f"{address}/evict")).status_code == 404
        # There is room for another.
        await (await game.join()).step()
        history = (await game.http.get(address)).json()
        assert {"event": "closing", "reason": "evicted"}.items() <= (
            history["timeline"]["entries"][-2].items()
        )
        assert (await game.http.get("/v1/admin/sessions/sess_0")).status_code == 404


async def test_with_the_store_full_nobody_is_parked_and_the_next_is_refused() -> None:
    async with playing(places=2, store_bytes=STATE_BYTES // 2) as game:
        for _ in range(2):
            await (await game.join()).step()
        answer = await game.http.post("/v1/sessions", json={})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "capacity_exceeded"
        for player in game.players:
            await player.step()
        assert {o for player in game.players for o in player.residency} <= {
            "parking",
            "restored",
        }


async def test_a_pipeline_that_wants_no_parking_is_left_alone() -> None:
    async with playing(places=2, pipeline=replace(WORLD, parks=False)) as game:
        for _ in range(2):
            await (await game.join()).step()
        answer = await game.http.post("/v1/sessions", json={})
        assert answer.json()["error"]["code"] == "capacity_exceeded"


async def test_a_parked_session_that_ends_leaves_no_file() -> None:
    async with playing(places=1) as game:
        first = await game.join()
        await first.step()
        await (await game.join()).step()
        await first.connection.until("parked")
        assert (await game.http.delete(f"/v1/sessions/{first.id}")).status_code == 204


async def test_many_at_once_are_all_served_in_the_end() -> None:
    async with playing(places=3) as game:
        players = [await game.join() for _ in range(9)]

        async def play(player: Player) -> None:
            for _ in range(5):
                await player.step()

        async with asyncio.TaskGroup() as tasks:
            for player in players:
                tasks.create_task(play(player))


async def test_a_worker_that_dies_loses_no_state_that_is_parked() -> None:
    async with playing(places=1) as game:
        first = await game.join()
        await first.step()
        second = await game.join()
        await second.step()
        await first.connection.until("parked")
        await game.gateway.served.replace("world")
        await first.step()
        await second.connection.say("update", input=step(2, held(1, 7)))
        failed = await second.connection.until("step_failed")
        assert failed["error"]["code"] == "session_state_lost"


@pytest.mark.parametrize("damage", ["content", "removed"])
async def test_what_does_not_come_back_whole_is_told_as_lost(damage: str) -> None:
    async with playing(places=1) as game:
        player = await game.join()
        await player.step()
        await game.http.post(f"/v1/admin/sessions/{player.id}/park")
        await player.connection.until("parked")
        await asyncio.to_thread(spoil, game.store, damage)
        await player.connection.say("update", input=step(2, held(1, 7)))
        failed = await player.connection.until("step_failed")
        assert failed["error"]["code"] == "session_state_lost"
        reason = {"content": "its checksum is wrong", "removed": "cannot be read"}[damage]
        assert reason in failed["error"]["message"]
        assert reason in (await player.connection.until("state_lost"))["reason"]


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_f1_a_thousand_that_vanish_leave_room_for_the_next() -> None:
    # A server kept each finished session's memory, until every request failed for good.
    async with playing(places=3) as game:
        for number in range(1000):
            session = await opened(game.http)
            url = game.gateway.stream(session["id"])
            async with stream(
                url, "antiphon.msgpack", role="controller", secret=session["secret"]
            ) as connection:
                await connection.until("attached")
                await connection.say("update", input=step(1, held(number, 7)))
                await connection.until("step_done")
                if number % 3:
                    await game.http.delete(f"/v1/sessions/{session['id']}")
                else:
                    connection.socket.transport.abort()
            if number % 100 == 0:
                ready = await game.http.get("/readyz?pipeline=game&capacity=1")
                assert ready.status_code == 200
        for _ in range(5):
            await (await game.join()).step()


@pytest.mark.parametrize("waiting", [0, 2])
async def test_strict_readiness_is_full_only_while_the_next_open_would_be_refused(
    waiting: int,
) -> None:
    limits = replace(WORLD.limits, waiting=waiting, wait_ms=300)
    async with playing(places=1, pipeline=replace(WORLD, parks=False, limits=limits)) as game:
        player = await game.join()
        refused = await game.http.post("/v1/sessions", json={})
        assert refused.json()["error"]["code"] == "capacity_exceeded"
        await game.http.delete(f"/v1/sessions/{player.id}")
        async with asyncio.timeout(20):
            while (await strictly_ready(game)).status_code != 200:
                pass
        assert (await game.http.post("/v1/sessions", json={})).status_code == 201


async def strictly_ready(game: Game) -> httpx.Response:
    """Whether one more would be let in."""
    return await game.http.get("/readyz", params={"pipeline": WORLD.name, "capacity": "1"})
