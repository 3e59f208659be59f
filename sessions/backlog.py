"""What a worker was sent for one session and has not worked off yet.

It is bounded so that one client cannot fill the link that all sessions of a worker
share. The rule when it is full: who hands the client's verbs over waits.
"""

from __future__ import annotations

from collections import deque

INPUT_BYTES = 1024 * 1024
"""Stream input under way: about 20 s of audio."""
TURN_BYTES = 4 * 1024 * 1024
"""Payloads of turns that have not ended."""
COMMANDS = 256
"""Pieces of stream input, signals and changes of settings under way."""
STOPPING_TURNS = 4
"""Turns that were cancelled and whose engine has not stopped yet."""


class Backlog:
    """Counts for one stage of one session."""

    def __init__(self) -> None:
        self._inputs: deque[tuple[int, int]] = deque()
        self._input_bytes = 0
        self._commands: set[str] = set()
        self._turns: dict[int, int] = {}
        self._turn_bytes = 0
        self._stopping: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether the next verb should wait."""
        return (
            self._input_bytes > INPUT_BYTES
            or self._turn_bytes > TURN_BYTES
            or len(self._inputs) + len(self._commands) > COMMANDS
            or len(self._stopping) > STOPPING_TURNS
        )

    @property
    def empty(self) -> bool:
        """Whether the worker has worked off all that it was sent."""
        return not (self._inputs or self._commands or self._turns)

    @property
    def input_bytes(self) -> int:
        """Stream input that the worker has not applied yet."""
        return self._input_bytes

    def input(self, sequence: int, size: int) -> None:
        """Stream input number `sequence`, of `size` bytes, was sent."""
        self._inputs.append((sequence, size))
        self._input_bytes += size

    def received_through(self, sequence: int) -> None:
        """The worker has applied stream input up to `sequence`."""
        while self._inputs and self._inputs[0][0] <= sequence:
            self._input_bytes -= self._inputs.popleft()[1]

    def command(self, command: str) -> None:
        """A command that will be answered was sent."""
        self._commands.add(command)

    def answered(self, command: str) -> bool:
        """The worker has answered it; whether it was under way."""
        known = command in self._commands
        self._commands.discard(command)
        return known

    def turn(self, turn: int, size: int) -> None:
        """A turn was started with `size` bytes of payloads."""
        self._turns[turn] = size
        self._turn_bytes += size

    def stop(self, turns: set[int]) -> None:
        """`turns` were cancelled; each ends when its engine has stopped."""
        self._stopping |= turns & self._turns.keys()

    def ended(self, turn: int) -> None:
        """The worker has said its last word about the turn."""
        self._turn_bytes -= self._turns.pop(turn, 0)
        self._stopping.discard(turn)

    def clear(self) -> None:
        """The worker is gone, with all that was under way."""
        self._inputs.clear()
        self._commands.clear()
        self._turns.clear()
        self._stopping.clear()
        self._input_bytes = self._turn_bytes = 0

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            tuple(self._inputs),
            tuple(sorted(self._commands)),
            tuple(sorted(self._turns.items())),
            tuple(sorted(self._stopping)),
        )
