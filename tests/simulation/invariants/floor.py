"""I2: no client receives content of a turn below the floor it was told of."""

from __future__ import annotations

from gateway.hosted import Hosted
from protocol.messages import Fence, RaiseFloor
from sessions.actions import TurnMeasured
from sessions.duplex import events as said
from sessions.oneshot.events import Piece, RequestDone
from tests.simulation.client import Client
from tests.simulation.engine import AUDIO_TAG
from tests.simulation.gateway import GatewayProcess
from tests.simulation.watch import Invariant
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World
from workers.control_events import (
    Action,
    CommandReceived,
    Event,
    FreeSession,
    SendOutput,
    StartTurn,
)

STOP_MS = 25_000.0
"""After this no engine runs a turn that was given up."""

CONTENT = (
    said.OutputItemAdded,
    said.ContentPartAdded,
    said.TextDelta,
    said.AudioDelta,
    said.PartDone,
    said.OutputItemDone,
)


class I2Floor(Invariant):
    """At the worker: nothing of a turn leaves after its floor was raised. At the client:
    nothing of a response after its end, and each response is made of one run, in order."""

    name = "I2 floor"
    preconditions = (
        "floor raised under a running turn",
        "response ended before its content",
        "speech interrupted a response",
        "responses complete to the last word",
        "given up turns looked for",
        "requests answered to the last word",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._lanes: dict[tuple[str, str], dict[int, str]] = {}
        self._floors: dict[tuple[str, str], dict[str, int]] = {}
        self._runs: dict[tuple[str, str], int] = {}
        self._words: dict[tuple[str, str], int] = {}
        self._run_owners: dict[int, tuple[str, str]] = {}
        self._audio: dict[tuple[str, str], tuple[int, int]] = {}

    # The worker

    def handled(self, worker: WorkerProcess, event: Event, actions: list[Action]) -> None:
        """No output of a turn below a floor leaves."""
        if isinstance(event, CommandReceived) and isinstance(event.command, RaiseFloor):
            self._raised(worker, event.gateway, event.command)
        for action in actions:
            match action:
                case StartTurn():
                    key = (worker.incarnation, action.session)
                    self._lanes.setdefault(key, {})[action.turn] = action.lane
                    floor = self._floors.get(key, {}).get(action.lane, 0)
                    self.check(action.turn >= floor, f"turn {action.turn} starts below {floor}")
                case SendOutput():
                    key = (worker.incarnation, action.session)
                    lane = self._lanes.get(key, {}).get(action.turn, "")
                    floor = self._floors.get(key, {}).get(lane, 0)
                    self.check(
                        action.turn >= floor,
                        f"{worker.place} sends output of turn {action.turn} of lane {lane} in"
                        f" {action.session}, below its floor {floor}",
                    )
                case FreeSession():
                    self._lanes.pop((worker.incarnation, action.session), None)
                    self._floors.pop((worker.incarnation, action.session), None)

    def _raised(self, worker: WorkerProcess, gateway: str, command: RaiseFloor) -> None:
        session = command.fence.session
        engine_session = worker.engine.sessions.get(session)
        if engine_session is None:
            return
        may = Fence(session, engine_session.epoch, engine_session.owner)
        if command.fence != may or gateway != may.owner:
            return
        floors = self._floors.setdefault((worker.incarnation, session), {})
        floors[command.lane] = max(command.floor, floors.get(command.lane, 0))
        if any(
            key[0] == session and key[1] < command.floor and turn.action.lane == command.lane
            for key, turn in worker.engine.turns.items()
        ):
            self.count("floor raised under a running turn")

    # The client

    def told(self, client: Client, sequence: int, output: said.ClientOutput) -> None:
        """Content belongs to a response in progress, and comes from its own turn."""
        if isinstance(output, CONTENT):
            response_id = output.response_id
            self.check(
                response_id in client.view.open,
                f"{client.session} is sent {output} after the end of that response",
            )
            key = (client.session, response_id)
            if isinstance(output, said.TextDelta):
                self._text(key, output.delta)
            elif isinstance(output, said.AudioDelta):
                self._heard(key, output.pcm)
        elif isinstance(output, Piece):
            self._piece(client, output)
        elif isinstance(output, RequestDone):
            self.count("requests answered to the last word")
            self._whole((client.session, "request"), "speak" in output.usage)
        elif isinstance(output, said.ResponseDone):
            response = output.response
            if response.status is said.ResponseStatus.COMPLETED:
                self._whole((client.session, response.id), "audio" in response.output_modalities)
            elif response.status is said.ResponseStatus.CANCELLED:
                view = client.view.responses.get(response.id)
                if view is not None and view.item_id is None:
                    self.count("response ended before its content")
                if response.reason == "turn_detected":
                    self.count("speech interrupted a response")

    def _piece(self, client: Client, piece: Piece) -> None:
        """A piece of the answer to a request that is under way."""
        self.check(bool(client.pending()), f"{client.session} is sent {piece} after the end")
        key = (client.session, "request")
        if piece.port == "text":
            self._text(key, bytes(piece.payload.data).decode())
        else:
            self._heard(key, piece.payload.data)

    def _text(self, key: tuple[str, str], delta: str) -> None:
        for word in delta.split():
            run, number = (int(part) for part in word[1:].rstrip(",.!").split("_"))
            self._belongs(key, run)
            last = self._words.get(key, 0)
            following = number == last + 1 or number == (last // 10 + 1) * 10
            self.check(following, f"word {word} follows number {last} in {key}")
            self._words[key] = number

    def _heard(self, key: tuple[str, str], pcm: bytes | memoryview) -> None:
        run, clause, piece = AUDIO_TAG.unpack_from(pcm)
        self._belongs(key, run)
        before = self._audio.get(key)
        if before is not None:
            follows = (clause, piece) in ((before[0], before[1] + 1), (before[0] + 1, 0))
            self.check(follows, f"audio {clause}/{piece} follows {before} in {key}")
        else:
            self.check((clause, piece) == (0, 0), f"{key} begins with audio {clause}/{piece}")
        self._audio[key] = (clause, piece)

    def _whole(self, key: tuple[str, str], spoken: bool) -> None:
        """A response that is complete holds all that its run has made."""
        run = self._runs.get(key)
        self.check(run is not None, f"{key} is complete without any content")
        assert run is not None
        self.count("responses complete to the last word")
        made, told = self.deployment.runs[run], self._words[key]
        self.check(made == told, f"{key} is complete with word {told} of {made}")
        if spoken:
            last, heard = self.deployment.spoken[run], self._audio.get(key)
            self.check(last == heard, f"{key} is complete with audio {heard} of {last}")

    def measured(self, gateway: GatewayProcess, hosted: Hosted, turn: TurnMeasured) -> None:
        """What was given up stops at the workers."""
        if turn.turn and turn.status != said.ResponseStatus.COMPLETED.value:
            session = hosted.id
            self.world.after(STOP_MS, lambda: self._stopped(session, turn.turn))

    def _stopped(self, session: str, turn: int) -> None:
        for worker in self.deployment.workers.values():
            if worker is None or worker.paused:
                continue
            if self.world.now_ms - worker.disturbed_ms < STOP_MS:
                continue
            self.count("given up turns looked for")
            self.check(
                (session, turn) not in worker.engine.turns,
                f"{worker.place} runs turn {turn} of {session} {STOP_MS} ms after its end",
            )

    def _belongs(self, key: tuple[str, str], run: int) -> None:
        owner = self._run_owners.setdefault(run, key)
        self.check(owner == key, f"content of {owner} is sent in {key}")
        own = self._runs.setdefault(key, run)
        self.check(own == run, f"{key} has content of runs {own} and {run}")
