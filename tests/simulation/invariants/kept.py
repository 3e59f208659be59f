"""I7 at the worker: what a new owner of a session is told again is what was made."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from protocol.messages import RESET, Answer, Replay, Run, TurnEnded, TurnStatus
from tests.simulation.watch import Invariant
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World
from workers.control_events import (
    Action,
    CommandReceived,
    Event,
    FreeSession,
    RepeatTurn,
    SendOutput,
    SendReport,
    SignalSession,
    StartTurn,
)


@dataclass
class _Made:
    """What a worker has made for one session."""

    pieces: defaultdict[int, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    """Output by turn and number, as far as it was sent."""
    ends: dict[int, TurnEnded] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    """The step that a turn takes."""
    answers: dict[int, int] = field(default_factory=dict)
    """The turn that is the answer to a committed step."""
    replays: set[str] = field(default_factory=set)


class I7Kept(Invariant):
    """What is sent again is what was sent, from the cursor on without a gap that is not stated.
    A committed step that is asked for again has its first answer, or is refused."""

    name = "I7 kept"
    preconditions = (
        "outputs sent again",
        "gaps stated",
        "last words said again",
        "replays asked for again",
        "committed steps answered again",
        "steps refused: step_committed",
        "steps refused: step_out_of_order",
        "steps refused: session_state_lost",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._made: defaultdict[tuple[str, str], _Made] = defaultdict(_Made)

    def handled(self, worker: WorkerProcess, event: Event, actions: list[Action]) -> None:
        """Keep what is made; hold what is told again against it."""
        if isinstance(event, CommandReceived):
            made = self._made[worker.incarnation, event.command.fence.session]
            if isinstance(event.command, Replay):
                self._replayed(made, event.command, actions)
            elif isinstance(event.command, Run) and event.command.step is not None:
                self._asked(made, event.command, actions)
        for action in actions:
            match action:
                case SendOutput():
                    pieces = self._made[worker.incarnation, action.session].pieces[action.turn]
                    data = bytes(action.payload.data)
                    first = pieces.setdefault(action.sequence, data)
                    self.check(
                        data == first,
                        f"{worker.place} sends output {action.sequence} of turn {action.turn} of"
                        f" {action.session} otherwise than before",
                    )
                case StartTurn(step=int() as step):
                    self._made[worker.incarnation, action.session].steps[action.turn] = step
                case SendReport(report=TurnEnded() as ended):
                    self._ended(self._made[worker.incarnation, ended.session], ended)
                case SignalSession(name=name) if name == RESET:
                    self._made[worker.incarnation, action.session].answers.clear()
                case FreeSession():
                    self._made.pop((worker.incarnation, action.session), None)

    def _ended(self, made: _Made, ended: TurnEnded) -> None:
        if ended.turn in made.ends:
            return
        made.ends[ended.turn] = ended
        step = made.steps.get(ended.turn)
        if step is not None and ended.status is TurnStatus.COMPLETED:
            made.answers[step] = ended.turn

    def _replayed(self, made: _Made, command: Replay, actions: list[Action]) -> None:
        reports = [action.report for action in actions if isinstance(action, SendReport)]
        answer = next((report for report in reports if isinstance(report, Answer)), None)
        if answer is None or answer.error is not None:
            return
        again = [action for action in actions if isinstance(action, SendOutput)]
        if command.command in made.replays:
            self.count("replays asked for again")
            self.check(not again, f"{command} is carried out again")
            return
        made.replays.add(command.command)
        lost, numbers = answer.result["lost"], [action.sequence for action in again]
        first = command.after + lost + 1
        self.check(
            numbers == list(range(first, first + len(numbers))),
            f"{command} loses {lost} and brings {numbers}",
        )
        if lost:
            self.count("gaps stated")
        if again:
            self.count("outputs sent again")
        for ended in [report for report in reports if isinstance(report, TurnEnded)]:
            self.count("last words said again")
            known = made.ends.get(ended.turn, ended)
            self.check(ended == known, f"{command} brings {ended}, which was {known}")

    def _asked(self, made: _Made, run: Run, actions: list[Action]) -> None:
        assert run.step is not None
        ends = [
            action.report
            for action in actions
            if isinstance(action, SendReport) and isinstance(action.report, TurnEnded)
        ]
        mine = next((ended for ended in ends if ended.turn == run.turn), None)
        if mine is not None and mine.error is not None:
            self.count(f"steps refused: {mine.error.code}")
        if not any(isinstance(action, RepeatTurn) for action in actions):
            return
        earlier = made.answers.get(run.step)
        self.check(earlier is not None, f"{run} is answered, and that step was never committed")
        assert earlier is not None
        self.count("committed steps answered again")
        again = {
            action.sequence: bytes(action.payload.data)
            for action in actions
            if isinstance(action, SendOutput) and action.turn == run.turn
        }
        self.check(again == made.pieces[earlier], f"{run} is answered otherwise than before")
        completed = mine is not None and mine.status is TurnStatus.COMPLETED
        self.check(completed, f"{run} is answered again, and ends with {mine}")
        made.answers[run.step] = run.turn
