"""The llama.cpp server inside this process, closed to everyone else.

The library serves HTTP beside its own handlers and has no way to switch that off. It
listens on a Unix socket in a folder that only this user can enter, never on a port,
and demands a key that exists only in this process. The engine needs it for what has
no handler: tokens of a text, a file's chat template, and slots in files.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from protocol.errors import EngineFailed, InvalidRequest, ModelFileError
from workers.engines.ar.tokens import Token, align
from workers.runtime_directory import runtime_directory

# Threads that spin while they wait for each other slow llama.cpp down a hundredfold as
# soon as another process wants a core. OpenMP reads this once, when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import xllamacpp

_BATCH_TOKENS = 256
_ANSWER_TIMEOUT_S = 30.0


class Refused(EngineFailed):
    """llama.cpp answered that it cannot do what it was asked."""


class LlamaServer:
    """One loaded model with `slots` contexts of `context_tokens` tokens each."""

    def __init__(self, path: Path, *, slots: int, context_tokens: int, threads: int) -> None:
        """Load the model; takes seconds.

        Raises ModelFileError when llama.cpp cannot load the file.
        """
        self._folder = ExitStack()
        self._key = secrets.token_hex(32)
        private = self._folder.enter_context(runtime_directory())
        self.socket_path = private / "llama.sock"
        self._links = private / "slots"
        self._links.mkdir(mode=0o700)
        parameters = self._parameters(path, slots, context_tokens, threads)
        # Its own check of what it restores knows the shape of a state, not its meaning.
        self.state_kind = (
            f"xllamacpp {xllamacpp.__version__}, {context_tokens} tokens, "
            f"keys {parameters.cache_type_k}, values {parameters.cache_type_v}"
        )
        try:
            self._server: Any = xllamacpp.Server(parameters)
        except (RuntimeError, ValueError) as error:
            self._folder.close()
            raise ModelFileError(f"llama.cpp cannot load {path}: {error}") from error
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(self.socket_path)),
            base_url="http://llama",
            headers={"Authorization": f"Bearer {self._key}"},
        )

    def _parameters(self, path: Path, slots: int, context_tokens: int, threads: int) -> Any:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_parallel = slots
        parameters.n_ctx = slots * context_tokens
        parameters.kv_unified = False
        parameters.n_batch = parameters.n_ubatch = _BATCH_TOKENS
        parameters.cpuparams.n_threads = threads
        parameters.cpuparams_batch.n_threads = threads
        # Layers that see only a window forget what lies before it, and a prefix that is
        # cut back could not be continued; at full size they forget nothing.
        parameters.swa_full = True
        parameters.ctx_shift = False
        # Copies of contexts outside the slots would be memory outside any budget.
        parameters.cache_ram_mib = 0
        parameters.cache_idle_slots = False
        parameters.n_ctx_checkpoints = 0
        parameters.fit_params = False
        parameters.hostnames = [str(self.socket_path)]
        parameters.api_keys = [self._key]
        parameters.ui = False
        parameters.endpoint_slots = False  # what is in them; saving them is something else
        parameters.slot_save_path = f"{self._links}/"
        parameters.endpoint_props = False
        parameters.verbosity = 0
        return parameters

    def generate(self, request: dict[str, Any], on_chunk: Callable[[dict[str, Any]], bool]) -> None:
        """Stream a completion; blocks, and calls `on_chunk` on this thread until it is True."""
        self._server.handle_completions(request, on_chunk)

    async def tokenize(self, text: str, *, special: bool) -> list[Token]:
        """The tokens of `text`; with `special`, control tokens written out in it count as such."""
        if not text:
            return []
        pieces = await self._tokens(text, special=special, add_special=False)
        return align(text, pieces)

    async def leading_tokens(self) -> list[int]:
        """The ids that this model wants in front of every text."""
        return [token for token, _ in await self._tokens("", special=False, add_special=True)]

    async def _tokens(
        self, text: str, *, special: bool, add_special: bool
    ) -> list[tuple[int, bytes]]:
        body = {
            "content": text,
            "parse_special": special,
            "add_special": add_special,
            "with_pieces": True,
        }
        answer = (await self._post("/tokenize", body)).json()
        return [(entry["id"], _piece_bytes(entry["piece"])) for entry in answer["tokens"]]

    async def apply_template(self, messages: list[dict[str, str]]) -> str:
        """The prompt that the model's chat template makes of `messages`.

        Raises InvalidRequest when the template refuses them.
        """
        body = {
            "messages": messages,
            "add_generation_prompt": True,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        try:
            answer = await self._post("/apply-template", body)
        except Refused as error:
            raise InvalidRequest(
                f"the model's chat template refuses this conversation: {error.message}",
                field="input",
            ) from error
        prompt: str = answer.json()["prompt"]
        return prompt

    async def save_slot(self, slot: int, path: Path) -> tuple[int, int]:
        """Write what `slot` holds over the file at `path`; other slots wait meanwhile.

        How many tokens it holds, and the bytes of the file. Raises EngineFailed, also where
        there is no room for the file.
        """
        saved = await self._move_slot(slot, path, "save")
        return saved["n_saved"], saved["n_written"]

    async def restore_slot(self, slot: int, path: Path) -> None:
        """Make `slot` hold what `save_slot` wrote at the front of the file at `path`.

        Raises Refused for a file that llama.cpp cannot use; the slot is empty then.
        """
        await self._move_slot(slot, path, "restore")

    async def _move_slot(self, slot: int, path: Path, action: str) -> dict[str, Any]:
        with self._linked(slot, path) as name:
            # As long as the disk takes.
            response = await self._post(
                f"/slots/{slot}?action={action}", {"filename": name}, timeout_s=None
            )
        answer: dict[str, Any] = response.json()
        return answer

    @contextmanager
    def _linked(self, slot: int, path: Path) -> Iterator[str]:
        """A name by which llama.cpp reaches `path`: it knows files of one folder only."""
        link = self._links / str(slot)
        link.symlink_to(path.absolute())
        try:
            yield link.name
        finally:
            link.unlink()

    async def _post(
        self, path: str, body: dict[str, Any], timeout_s: float | None = _ANSWER_TIMEOUT_S
    ) -> httpx.Response:
        try:
            response = await self._client.post(path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise EngineFailed(f"llama.cpp does not answer: {error!r}") from error
        if response.is_error:
            raise Refused(f"llama.cpp refused {path}: {response.text[:500]}")
        return response

    async def stop(self) -> None:
        """Unload the model. No generation may be running."""
        await self._client.aclose()
        await asyncio.to_thread(self._unload)

    def _unload(self) -> None:
        # The library stops its threads when its object is collected.
        self._server = None
        gc.collect()
        self._folder.close()


def _piece_bytes(piece: str | list[int]) -> bytes:
    return piece.encode() if isinstance(piece, str) else bytes(piece)
