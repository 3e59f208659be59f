"""The local back end: llama.cpp, with one resident context a session."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from protocol.device_bytes import HOST
from protocol.errors import (
    CapacityExceeded,
    ConfigError,
    EngineFailed,
    InvalidRequest,
    ModelFileError,
    SessionStateLost,
)
from protocol.payloads import Message, text_payload
from workers.engine import DeviceUse, ParkableSession, Turn, TurnResult
from workers.engines.ar.generation import Generation
from workers.engines.ar.gguf import (
    attention_window,
    cache_bytes_per_token,
    has_chat_template,
    is_gguf,
)
from workers.engines.ar.llama_server import LlamaServer, Refused
from workers.engines.ar.options import ArOptions
from workers.engines.ar.parked import Parked, create, seal, unseal
from workers.engines.ar.prompt import (
    HEAD,
    MARKERS,
    ReplyLength,
    chat_messages,
    first_kept,
    render_few_shot,
    reply_length,
)
from workers.engines.ar.slot import Slot
from workers.engines.ar.stopping import ReplyCutter
from workers.engines.ar.tokens import Token
from workers.engines.ar.turns import TurnRequest, read_turn
from workers.model_registry import MODELS
from workers.models import resolve
from workers.to_the_end import to_the_end

_CONTROL_WORDS = ("<start_of_image>", "<end_of_image>", "<start_of_turn>", "<end_of_turn>")
_FEW_SHOT_STOPS = (*MARKERS, *_CONTROL_WORDS)
_LONGEST_LINE_BREAK = 32
_MARKUP = re.compile(r"[<>\[\]{}|]+")
_NOT_PROSE = re.compile(r"[^\w\s.,;:!?'\"()-]+")


class LlamaBackend:
    """One model on this machine and a slot for each session.

    One slot more serves turns outside the default lane, of all sessions in order of
    arrival, so that they leave the sessions' own prefixes alone.
    """

    def __init__(self, options: ArOptions) -> None:
        self.options = options
        self.style = options.prompt_style()
        self._free = [Slot(index) for index in reversed(range(options.sessions))]
        self.shared = Slot(options.sessions)
        self._slots = [*self._free, self.shared]
        self._threads = ThreadPoolExecutor(len(self._slots), thread_name_prefix="llama")
        self._tasks: set[asyncio.Task[None]] = set()
        self._leading: list[int] = []
        self._unwanted: list[int] = []
        self._server: LlamaServer | None = None
        self._token_bytes = 0
        self._window: int | None = None
        self._weights = ""

    @property
    def server(self) -> LlamaServer:
        """The loaded model. Raises EngineFailed before `load` and after `shutdown`."""
        if self._server is None:
            raise EngineFailed("the model is not loaded")
        return self._server

    async def load(self) -> None:
        """Locate and load the model, and read the few-shot head once."""
        path = await asyncio.to_thread(self._locate)
        self._token_bytes = cache_bytes_per_token(path)
        self._window = attention_window(path)
        self._server = await asyncio.to_thread(
            LlamaServer,
            path,
            slots=len(self._slots),
            context_tokens=self.options.context_tokens,
            threads=self.options.threads or min(8, len(os.sched_getaffinity(0))),
        )
        self._leading = await self._server.leading_tokens()
        self._unwanted = await self._find_unwanted()
        await self.warm(self._free[-1])
        content = await asyncio.to_thread(self._content, path)
        self._weights = hashlib.sha256(
            f"{content}, {self._server.state_kind}, {self.style}".encode()
        ).hexdigest()

    def _locate(self) -> Path:
        path = resolve(self.options.model)
        if not is_gguf(path):
            raise ModelFileError(f"{path} is not a GGUF file")
        if self.style == "chat-template" and not has_chat_template(path):
            raise ConfigError(
                f"{path} has no chat template; use `prompt: few-shot`, which suits base models",
                field="prompt",
            )
        return path

    def _content(self, path: Path) -> str:
        """A digest of the model's file; one that is pinned has been verified already."""
        if (model := MODELS.get(self.options.model)) is not None:
            return model.digest
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    async def _find_unwanted(self) -> list[int]:
        """Tokens that would end a reply: line breaks, speakers' names, control tokens."""
        words = [marker.removesuffix(":") for marker in MARKERS]
        candidates = [
            *("\n" * length for length in range(1, _LONGEST_LINE_BREAK)),
            *(space + word for word in words for space in ("", " ")),
            *_CONTROL_WORDS,
        ]
        found: set[int] = set()
        for text in candidates:
            tokens = await self.server.tokenize(text, special=True)
            if len(tokens) == 1:
                found.add(tokens[0].id)
        return sorted(found)

    def devices(self) -> dict[str, DeviceUse]:
        """The contexts: llama.cpp sets them all aside, and clears them, when it loads."""
        return {HOST: DeviceUse(pool=self._slot_bytes() * self.options.sessions)}

    def declare(self) -> dict[str, int]:
        """A session's context, however much of it is in use."""
        return {HOST: self._slot_bytes()}

    def _slot_bytes(self) -> int:
        return self._token_bytes * self.options.context_tokens

    def open(self) -> LlamaSession:
        """A session with a slot of its own.

        Raises CapacityExceeded when every slot has one.
        """
        slot = self._take()
        self._warm_soon(slot)
        return LlamaSession(self, slot)

    def _take(self) -> Slot:
        if not self._free:
            raise CapacityExceeded(f"all {self.options.sessions} sessions of this model are in use")
        return self._free.pop()

    def _warm_soon(self, slot: Slot) -> None:
        if self.style == "few-shot":
            task = asyncio.get_running_loop().create_task(self.warm(slot))
            slot.warming = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def weights(self) -> str:
        """Of the model's file, the size of a context, the library, and how prompts are made."""
        return self._weights

    async def trim(self, slot: Slot, text: str) -> None:
        """Let go of what was made beyond `text`, if anything was. Lock held, slot settled.

        A reply is over some tokens before its generation stops. From a file in which layers
        with a window have only their end, a session goes on from all of it or from nothing.
        """
        tokens = len(slot.memory)
        if not self._window or tokens < self._window - len(self._leading):
            return
        slot.memory.keep_prefix_of(text)
        if len(slot.memory) < tokens:
            await self._fill(slot)
            await slot.settle()

    async def _fill(self, slot: Slot) -> None:
        generation = Generation(ReplyCutter(), lambda _: None)
        await self.generate(slot, generation, {"max_tokens": 0})

    async def save(self, slot: Slot, dropped: Sequence[Message], path: Path) -> None:
        """Write what a session is to a new file at `path`. Lock held, slot settled.

        Whether it fails or is cancelled, no file is left and nothing of it goes on.
        """
        known = [(token.id, token.data) for token in slot.memory.tokens()]

        async def write() -> None:
            resident: list[int] = []
            complete = True
            if slot.resident is not None:
                tokens, size = await self.server.save_slot(slot.index, path)
                resident = (slot.resident + [-1] * tokens)[:tokens]
                complete = self._is_complete(tokens, size)
            parked = Parked(self._weights, known, list(dropped), resident, complete)
            await asyncio.to_thread(seal, path, parked)

        create(path)
        try:
            await to_the_end(write())
        except BaseException:
            await to_the_end(asyncio.to_thread(path.unlink, missing_ok=True))
            raise

    def _is_complete(self, tokens: int, size_bytes: int) -> bool:
        """Whether so large a file has the keys and values of so many tokens in every layer."""
        if self._window:
            return tokens < self._window
        return 0 < self._token_bytes * tokens <= size_bytes

    async def restore(self, path: Path) -> LlamaSession:
        """The session that `save` wrote to `path`, in any slot that is free.

        Raises CapacityExceeded when every slot has a session, and SessionStateLost.
        """
        slot = self._take()
        try:
            parked, state_bytes = await asyncio.to_thread(unseal, path, self._weights)
            async with slot.lock:
                await slot.settle()
                if state_bytes:
                    if not parked.complete:
                        # Before it is so: being cancelled does not keep llama.cpp from it.
                        slot.continues_only = parked.resident
                    await to_the_end(self.server.restore_slot(slot.index, path))
                    if parked.complete:
                        slot.continues_only = None
                    slot.resident = parked.resident
                slot.remember([Token(number, data) for number, data in parked.tokens])
        except Refused as error:
            self.release(slot)
            raise SessionStateLost(error.message) from error
        except BaseException:
            self.release(slot)
            raise
        if not state_bytes:
            self._warm_soon(slot)
        return LlamaSession(self, slot, parked.dropped)

    def release(self, slot: Slot) -> None:
        """Take a closed session's slot back."""
        slot.forget()
        self._free.append(slot)

    async def warm(self, slot: Slot) -> None:
        """Read the few-shot head into `slot`, so that a first turn need not."""
        if self.style != "few-shot":
            return
        async with slot.lock:
            await slot.settle()
            if len(slot.memory) > 0:
                return  # a turn was quicker
            await self.read(slot, HEAD)
            await self._fill(slot)

    async def read(self, slot: Slot, text: str) -> int:
        """Make `slot.memory` the tokens of `text`; how many a prompt of it has."""
        rest = slot.memory.keep_prefix_of(text)
        special = self.style == "chat-template"
        slot.memory.extend(await self.server.tokenize(rest, special=special))
        return len(self._leading) + len(slot.memory)

    async def generate(self, slot: Slot, generation: Generation, request: dict[str, Any]) -> None:
        """Continue the text of `slot.memory`. Lock held, slot settled.

        Cancelling stops the generation; the slot is settled by whoever comes next.
        """
        prompt = self._leading + slot.memory.ids()
        request = {
            "prompt": prompt,
            "id_slot": slot.index,
            "cache_prompt": not slot.reads_all(prompt),
            "stream": True,
            "return_progress": True,
            "timings_per_token": True,
            "logprobs": 1,
            "post_sampling_probs": True,
            **request,
        }
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._threads, self._generate, generation, request)
        slot.begin(generation, done, prompt)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            generation.cancel()
            raise
        if generation.error is not None:
            raise EngineFailed(f"llama.cpp failed: {generation.error}")

    def _generate(self, generation: Generation, request: dict[str, Any]) -> None:
        try:
            self.server.generate(request, generation.on_chunk)
        except Exception as error:
            generation.error = repr(error)
        generation.finish()

    def sampling(self, length: ReplyLength | None) -> dict[str, Any]:
        """How tokens are chosen, for a few-shot reply of `length` or a chat model's."""
        options = self.options
        default = 0.0 if self.style == "few-shot" else 0.7
        chosen: dict[str, Any] = {
            "temperature": default if options.temperature is None else options.temperature,
            "top_p": 0.95 if options.top_p is None else options.top_p,
        }
        if options.seed is not None:
            chosen["seed"] = options.seed
        if length is not None and length.exact:
            # A small model that may not stop repeats itself unless that costs something.
            chosen["ignore_eos"] = True
            chosen["logit_bias"] = [[token, False] for token in self._unwanted]
            chosen["dry_multiplier"] = 0.8
            chosen["dry_allowed_length"] = 3
        return chosen

    async def shutdown(self) -> None:
        """End every generation and unload the model."""
        for task in self._tasks:
            task.cancel()
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*(slot.drained() for slot in self._slots))
        await asyncio.to_thread(self._threads.shutdown)
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop()


class LlamaSession(ParkableSession):
    """One conversation, resident in its slot."""

    def __init__(self, backend: LlamaBackend, slot: Slot, dropped: Sequence[Message] = ()) -> None:
        self._backend = backend
        self._slot = slot
        self._dropped = list(dropped)
        self._defused: dict[str, str] = {}
        self._text: str | None = None
        """The prompt and the reply of the last turn; None where there was none, or it broke off."""

    async def run(self, turn: Turn) -> TurnResult:
        """Generate the next reply of the conversation in `turn.inputs`.

        Raises InvalidRequest for an input that is no conversation or does not fit.
        """
        request = await read_turn(turn, self._backend.options.max_output_tokens)
        slot = self._slot if turn.lane == "default" else self._backend.shared
        async with slot.lock:
            await slot.settle()
            return await self._reply(slot, turn, request)

    async def _reply(self, slot: Slot, turn: Turn, request: TurnRequest) -> TurnResult:
        backend, options = self._backend, self._backend.options
        room = options.context_tokens - min(request.max_output_tokens, options.context_tokens // 4)

        prompt = ""

        async def count(dropped: int) -> int:
            nonlocal prompt
            prompt = await self._render(request.instructions, request.messages[dropped:])
            return await backend.read(slot, prompt)

        start = len(self._dropped)
        if request.messages[:start] != self._dropped:
            start = 0
        start = await first_kept(request.messages, start, room, count)
        if turn.lane == "default":
            self._dropped = request.messages[:start]
            self._text = None
        prompt_tokens = await count(start)

        length: ReplyLength | None = None
        cutter = ReplyCutter()
        if backend.style == "few-shot":
            length = reply_length(request.instructions, options.sentences)
            cutter = ReplyCutter(stops=_FEW_SHOT_STOPS, line_break_ends=True, sentences=length.most)
        loop = asyncio.get_running_loop()

        def emit(piece: str) -> None:
            if not generation.cancelled:
                turn.emit(text_payload(piece))

        reply: list[str] = []

        def on_piece(piece: str) -> None:
            reply.append(piece)
            loop.call_soon_threadsafe(emit, piece)

        generation = Generation(cutter, on_piece)
        most = min(request.max_output_tokens, options.context_tokens - prompt_tokens)
        await backend.generate(slot, generation, {"max_tokens": most, **backend.sampling(length)})
        if turn.lane == "default" and backend.style == "few-shot":
            self._text = f"{prompt} {''.join(reply)}"
        usage: dict[str, Any] = {
            "input_tokens": generation.cached_tokens + generation.prefill_tokens,
            "cached_tokens": generation.cached_tokens,
            "output_tokens": generation.output_tokens,
            "finish_reason": "stop" if cutter.ended else generation.finish_reason,
        }
        if start:
            usage["dropped_messages"] = start
        return TurnResult(usage)

    async def _render(self, instructions: str, messages: Sequence[Message]) -> str:
        backend = self._backend
        if backend.style == "few-shot":
            return render_few_shot(instructions, messages)
        chat = chat_messages(instructions, messages)
        defused = {entry["content"]: await self._defuse(entry["content"]) for entry in chat}
        self._defused = defused
        chat = [{**entry, "content": defused[entry["content"]]} for entry in chat]
        try:
            return await backend.server.apply_template(chat)
        except InvalidRequest:
            # Many templates know no system role, or only in front.
            spoken = [
                Message(entry["role"].replace("system", "user"), entry["content"]) for entry in chat
            ]
            return await backend.server.apply_template(chat_messages("", spoken))

    async def _defuse(self, text: str) -> str:
        """`text` without anything that this model's tokeniser takes for a control token."""
        if text in self._defused:
            return self._defused[text]
        server = self._backend.server
        for unwanted in (None, _MARKUP, _NOT_PROSE):
            safe = text if unwanted is None else unwanted.sub(" ", text)
            plain = await server.tokenize(safe, special=False)
            if plain == await server.tokenize(safe, special=True):
                return safe
        return ""

    async def snapshot(self, path: Path) -> None:
        """Write the slot's state, and what is remembered of it, to a new file at `path`.

        Raises EngineFailed when llama.cpp could not write it, OSError when nothing can be
        written there. Cancelling waits for llama.cpp, which cannot be stopped meanwhile.
        """
        if self._slot.warming is not None:
            # Who is put away need not be quick: others may wait for the room, and the processor.
            self._slot.warming.cancel()
        async with self._slot.lock:
            await self._slot.settle()
            if self._text is not None:
                await self._backend.trim(self._slot, self._text)
            await self._backend.save(self._slot, self._dropped, path)

    def close(self) -> None:
        """Give the slot back."""
        self._backend.release(self._slot)
