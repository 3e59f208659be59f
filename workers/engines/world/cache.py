"""The memory of the blocks, for all sessions together: keys and values, and the frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engines.world.architecture import Architecture
from workers.engines.world.denoiser import Past


class Cache:
    """Keys and values, (layers, 2, blocks, frames of a block, heads, tokens, head_dim), and the
    frames that left them as bytes, (blocks, frames of a block, 3, height, width).

    Written on the event loop alone; a frame's place is written before the first call that sees
    it. One block more, which is nobody's, stays zero: it fills the tables of short rollouts.
    """

    def __init__(
        self, architecture: Architecture, blocks: int, block_frames: int, device: torch.device
    ) -> None:
        a = architecture
        self.empty = blocks
        shape = (a.layers, 2, blocks + 1, block_frames, a.heads, a.tokens, a.head_dim)
        self._memory = torch.empty(shape, device=device).zero_()
        pictures = (blocks + 1, block_frames, 3, a.height, a.width)
        self._pictures = torch.empty(pictures, dtype=torch.uint8, device=device).zero_()

    @property
    def size_bytes(self) -> int:
        """Of all of it."""
        return self._memory.nbytes + self._pictures.nbytes

    def clear(self, block: int) -> None:
        """Empty a block: what is masked must still be a number."""
        self._memory[:, :, block] = 0.0

    def copy(self, source: int, target: int) -> None:
        """Make `target` what `source` is."""
        self._memory[:, :, target] = self._memory[:, :, source]
        self._pictures[target] = self._pictures[source]

    def write(self, block: int, place: int, frame: Tensor, left: Tensor) -> None:
        """Put a frame, (3, height, width), and what it leaves, (layers, 2, heads, tokens,
        head_dim), in its place."""
        self._pictures[block, place] = frame
        self._memory[:, :, block, place] = left

    def picture(self, block: int, place: int) -> Tensor:
        """The frame that is there; a view."""
        return self._pictures[block, place]

    def past(self, tables: Sequence[Sequence[int]], offsets: Sequence[Sequence[int]]) -> Past:
        """What sessions look at: the blocks of each, as many of each, and their offsets."""
        chosen = torch.tensor(tables, device=self._memory.device).flatten()
        gathered = self._memory.index_select(2, chosen)
        # (layers, 2, sessions, blocks, frames, heads, tokens, head_dim)
        gathered = gathered.unflatten(2, (len(tables), -1)).permute(0, 1, 2, 5, 3, 4, 6, 7)
        gathered = gathered.flatten(4, 6)
        keys, values = gathered.unbind(1)
        return Past(keys.unbind(0), values.unbind(0), torch.tensor(offsets, device=chosen.device))

    def read(self, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copies of what is in blocks, on the host: keys and values, (blocks, layers, 2, ...),
        and frames."""
        chosen = torch.tensor(blocks, dtype=torch.int64, device=self._memory.device)
        cached = self._memory.index_select(2, chosen).movedim(2, 0).contiguous()
        return cached.cpu(), self._pictures.index_select(0, chosen).cpu()

    def load(self, blocks: Sequence[int], content: tuple[Tensor, Tensor]) -> None:
        """Put what `read` gave into blocks that nobody looks at yet."""
        for block, cached, pictures in zip(blocks, *content, strict=True):
            self._memory[:, :, block] = cached.to(self._memory.device)
            self._pictures[block] = pictures.to(self._memory.device)
