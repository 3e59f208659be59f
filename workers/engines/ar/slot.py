"""One session's place in llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from workers.engines.ar.generation import Generation
from workers.engines.ar.tokens import Token, TokenMemory


@dataclass(frozen=True)
class _Running:
    """A generation, and what it works on."""

    generation: Generation
    done: asyncio.Future[None]
    prompt: list[int]
    memory: TokenMemory


class Slot:
    """One context of the server, and the tokens that lie in it.

    Only one generation uses it at a time. Whoever comes next waits until the thread of
    the one before has ended, also where that one was cancelled.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.lock = asyncio.Lock()
        self.memory = TokenMemory()
        self.resident: list[int] | None = None
        """The ids that llama.cpp has of this session, or that it has the first of; None until
        it has some, and where that is not known: the text of the one before may lie there."""
        self.continues_only: list[int] | None = None
        """What a file gave llama.cpp, where only prompts that go on from all of it can use it.
        Stays when the session goes, as what lies in the slot does."""
        self.warming: asyncio.Task[None] | None = None
        """Who reads the beginning of prompts into it before anybody asks."""
        self._running: _Running | None = None

    def reads_all(self, prompt: list[int]) -> bool:
        """Whether nothing of what is resident may be used for `prompt`.

        llama.cpp puts only the end of what layers with a window hold into files. That is
        all they need to go on, but not to go on from somewhere before the end; it would do
        so all the same, and miss what is not there.
        """
        needed = self.continues_only
        if needed is None:
            return False
        return len(prompt) <= len(needed) or prompt[: len(needed)] != needed

    def begin(self, generation: Generation, done: asyncio.Future[None], prompt: list[int]) -> None:
        """`generation` of `prompt` now owns the slot until `done`."""
        self._running = _Running(generation, done, prompt, self.memory)

    async def settle(self) -> None:
        """Wait for the last generation to end and take over what it left. Lock held."""
        if (running := self._running) is None:
            return
        await asyncio.wait([running.done])
        generation = running.generation
        running.memory.extend(generation.tokens)
        if generation.launched and self.reads_all(running.prompt):
            self.continues_only = None
        if running.memory is self.memory:  # else its session has gone
            ids = [token.id for token in generation.tokens]
            self.resident = running.prompt + ids if generation.launched else None
        self._running = None

    def remember(self, tokens: Sequence[Token]) -> None:
        """The slot's text is that of `tokens`, whatever it was. Lock held, slot settled."""
        self.memory = TokenMemory()
        self.memory.extend(tokens)

    def cancel(self) -> None:
        """Stop the generation that runs, if one does."""
        if self._running is not None:
            self._running.generation.cancel()

    async def drained(self) -> None:
        """Wait until no thread uses the slot."""
        if self._running is not None:
            await asyncio.wait([self._running.done])

    def forget(self) -> None:
        """Give the slot back: what was said in it is no longer known here."""
        self.cancel()
        self.memory = TokenMemory()
        self.resident = None
