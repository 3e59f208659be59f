"""One reply while llama.cpp generates it, on a thread of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from workers.engines.ar.stopping import ReplyCutter
from workers.engines.ar.tokens import Token


class Generation:
    """Takes llama.cpp's chunks and says when to stop.

    `on_chunk` runs on the generating thread, the only writer; everything else is read
    once that thread is done. `cancel` may be called from any thread.
    """

    def __init__(self, cutter: ReplyCutter, on_piece: Callable[[str], None]) -> None:
        self._cutter = cutter
        self._on_piece = on_piece
        self._tokens_are_known = True
        self.cancelled = False
        self.launched = False
        """Whether llama.cpp has begun: the slot holds the prompt, or its beginning."""
        self.error: str | None = None
        self.tokens: list[Token] = []
        """The generated tokens, up to the first whose bytes llama.cpp did not report."""
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.finish_reason: Literal["stop", "length"] = "stop"

    def cancel(self) -> None:
        """Stop at the next chunk: at most one token or one batch of the prompt away."""
        self.cancelled = True

    def on_chunk(self, chunk: dict[str, Any]) -> bool:
        """Take one streamed chunk; True stops the generation at once."""
        self.launched = self.launched or "choices" in chunk
        if self.cancelled:
            return True
        # The library swallows what a callback raises.
        try:
            return self._take(chunk)
        except Exception as error:
            self.error = f"unexpected answer of llama.cpp: {error!r}"
            return True

    def _take(self, chunk: dict[str, Any]) -> bool:
        if "choices" not in chunk:
            problem = chunk.get("error", chunk)
            self.error = str(problem.get("message", problem))
            return True
        if (timings := chunk.get("timings")) is not None:
            self.prefill_tokens = timings["prompt_n"]
            self.cached_tokens = timings["cache_n"]
            self.output_tokens = timings["predicted_n"]
        choice = chunk["choices"][0]
        text: str = choice["text"]
        self._remember(choice.get("logprobs"), text)
        if piece := self._cutter.feed(text):
            self._on_piece(piece)
        if choice["finish_reason"] == "length":
            self.finish_reason = "length"
        return self._cutter.ended

    def _remember(self, logprobs: dict[str, Any] | None, text: str) -> None:
        if not logprobs or not self._tokens_are_known:
            return
        tokens = [Token(entry["id"], bytes(entry["bytes"])) for entry in logprobs["content"]]
        # Tokens that end within a character are withheld and never listed.
        if b"".join(token.data for token in tokens) != text.encode():
            self._tokens_are_known = False
            return
        self.tokens += tokens

    def finish(self) -> None:
        """Pass on what the cutter held back. Called on the generating thread at the end."""
        if not self.cancelled and self.error is None and (piece := self._cutter.finish()):
            self._on_piece(piece)
