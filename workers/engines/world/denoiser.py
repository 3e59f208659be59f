"""The denoiser: convolutions over each frame around a transformer that looks back in time.

It is told a noisy frame with its noise level, the frame before it as pixels, the action and
the scene, and says what the frame looks like without noise. A noisy frame is
`(1 - noise) * frame + noise * gaussian`, with pixels from -1 to 1.

Training runs whole sequences at once, each frame with a noise level of its own; inference runs
one frame of each of several sessions, with what earlier frames left in the cache. Both are the
same layers: they differ in where keys and values of earlier frames come from.

What a session gets must not depend on who shares its call. Libraries choose another order of
summation for another number of rows, so without gradients, on a CPU, layers are told in a way
that no session's sums depend on (`Linear`, `Convolution`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.engines.world.architecture import Architecture

UNSEEN = -1
"""The offset of a frame that is not there, or must not be seen."""


@dataclass(frozen=True)
class Past:
    """What sessions have in the cache: `keys[layer]` and `values[layer]` of shape (sessions,
    heads, frames * tokens, head_dim), and how far back each frame lies, (sessions, frames),
    where 0 and less is UNSEEN, and what is beyond the window a sink."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    offsets: Tensor


class Denoiser(nn.Module):
    """The network of one world."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = a = architecture
        rows, columns = a.grid
        pixels = 3 * a.patch**2
        self.noise = nn.Sequential(Linear(64, a.dim), nn.SiLU(), Linear(a.dim, a.dim))
        self.action = nn.Sequential(Linear(a.action_size, a.dim), nn.SiLU(), Linear(a.dim, a.dim))
        self.scene = nn.Embedding(len(a.scenes), a.dim)
        self.stem = Convolution(pixels * (1 + a.ring), a.channels, 3, padding=1)
        self.place = nn.Parameter(0.1 * torch.randn(1, a.channels, rows, columns))
        self.down = Residual(a.channels, a.dim)
        self.fold = Convolution(a.channels, a.dim, 2, stride=2)
        self.position = nn.Parameter(0.1 * torch.randn(1, a.tokens, a.dim))
        self.blocks = cast("list[Block]", nn.ModuleList([Block(a) for _ in range(a.layers)]))
        self.unfold = Linear(a.dim, 4 * a.channels)
        self.up = Residual(a.channels, a.dim)
        self.head = Convolution(a.channels, pixels, 3, padding=1)

    def forward(
        self,
        noisy: Tensor,
        noise: Tensor,
        actions: Tensor,
        scenes: Tensor,
        ring: Tensor,
        past: Past,
    ) -> tuple[Tensor, Tensor]:
        """One frame of each session: it without noise, and what it leaves in the cache.

        `noisy` is (sessions, 3, height, width), `ring` has 3 channels for each frame before
        it, newest first; `noise`, `scenes` are (sessions), `actions` (sessions, action_size).
        The second result is (layers, 2, sessions, heads, tokens, head_dim).
        """
        tokens, skipped, told = self._encode(noisy, noise, actions, scenes, ring)
        offsets = functional.pad(past.offsets, (0, 1))[:, None, :]
        mask = self._sees(offsets, itself=past.offsets.shape[1])
        left = []
        for index, block in enumerate(self.blocks):
            query, key, value = block.project(tokens, told)
            left.append(torch.stack([key, value]))
            keys = torch.cat([past.keys[index], key], dim=2)
            values = torch.cat([past.values[index], value], dim=2)
            tokens = block.attend(tokens, told, query, keys, values, block.bias(mask))
        return self._decode(tokens, skipped, told), torch.stack(left)

    def sequence(
        self,
        noisy: Tensor,
        noise: Tensor,
        actions: Tensor,
        scenes: Tensor,
        ring: Tensor,
        times: Tensor,
    ) -> Tensor:
        """All frames of sequences at once, as `forward` has them one by one, for training.

        Everything has an axis of frames more, the second; `times` (sequences, frames) says
        when each frame is, in frames, and the first `sinks` are their rollout's.
        """
        a = self.architecture
        count, length = noise.shape
        tokens, skipped, told = self._encode(
            noisy.flatten(0, 1),
            noise.flatten(),
            actions.flatten(0, 1),
            scenes.flatten(),
            ring.flatten(0, 1),
        )
        offsets = times[:, :, None] - times[:, None, :]
        offsets[:, :, a.sinks :].masked_fill_(offsets[:, :, a.sinks :] > a.window, UNSEEN)
        mask = self._sees(offsets.clamp(min=UNSEEN), itself=None)
        for block in self.blocks:
            query, key, value = (
                part.unflatten(0, (count, length)).transpose(1, 2).flatten(2, 3)
                for part in block.project(tokens, told)
            )
            tokens = block.attend(tokens, told, query, key, value, block.bias(mask))
        return self._decode(tokens, skipped, told).unflatten(0, (count, length))

    def _encode(
        self, noisy: Tensor, noise: Tensor, actions: Tensor, scenes: Tensor, ring: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        told = self.noise(waves(noise)) + self.action(actions) + self.scene(scenes)
        told = functional.silu(told)
        pixels = functional.pixel_unshuffle(torch.cat([noisy, ring], 1), self.architecture.patch)
        hidden = self.stem(pixels) + self.place
        hidden = self.down(hidden, told)
        tokens = self.fold(hidden).flatten(2).transpose(1, 2) + self.position
        return tokens, hidden, told

    def _decode(self, tokens: Tensor, skipped: Tensor, told: Tensor) -> Tensor:
        rows, columns = self.architecture.grid
        unfolded = self.unfold(tokens).transpose(1, 2).unflatten(2, (rows // 2, columns // 2))
        hidden = skipped + functional.pixel_shuffle(unfolded, 2) + self.place
        hidden = self.up(hidden, told)
        frame: Tensor = functional.pixel_shuffle(
            self.head(functional.silu(hidden)), self.architecture.patch
        )
        return frame

    def _sees(self, offsets: Tensor, itself: int | None) -> Tensor:
        """Which of a block's time biases each frame has for each other, of (sessions, frames,
        frames): 0 for itself, one for each place in the window, one for sinks beyond it, and
        the last for what it does not see. `itself` is the frame that is being made."""
        window = self.architecture.window
        kinds = torch.where(offsets > window, window + 1, offsets)
        seen = offsets > 0
        if itself is None:
            seen = seen | (offsets == 0)
        else:
            seen[:, :, itself] = True
        return torch.where(seen, kinds, window + 2)


class Residual(nn.Module):
    """Two convolutions over a frame, scaled and shifted by what is told of it."""

    def __init__(self, channels: int, told: int) -> None:
        super().__init__()
        self.first = Convolution(channels, channels, 3, padding=1)
        self.second = Convolution(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(8, channels)
        self.norm_second = nn.GroupNorm(8, channels)
        self.told = Linear(told, 2 * channels)
        nn.init.zeros_(self.second.weight)

    def forward(self, hidden: Tensor, told: Tensor) -> Tensor:
        """`hidden` and what is added to it."""
        scale, shift = self.told(told)[:, :, None, None].chunk(2, dim=1)
        inner = self.first(functional.silu(self.norm(hidden)))
        inner = self.norm_second(inner) * (1 + scale) + shift
        added: Tensor = self.second(functional.silu(inner))
        return hidden + added


class Block(nn.Module):
    """A transformer layer whose keys and values may come from earlier frames.

    How much a token looks at another has a bias for the distance on the frame and one for that
    in time.
    """

    apart: Tensor

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = architecture
        self.heads = a.heads
        self.tokens = a.tokens
        self.told = Linear(a.dim, 6 * a.dim)
        self.norm = nn.LayerNorm(a.dim, elementwise_affine=False)
        self.norm_second = nn.LayerNorm(a.dim, elementwise_affine=False)
        self.qkv = Linear(a.dim, 3 * a.dim)
        self.out = Linear(a.dim, a.dim)
        self.mlp = nn.Sequential(Linear(a.dim, 4 * a.dim), nn.GELU(), Linear(4 * a.dim, a.dim))
        rows, columns = a.grid[0] // 2, a.grid[1] // 2
        self.space = nn.Parameter(torch.zeros(a.heads, (2 * rows - 1) * (2 * columns - 1)))
        self.time = nn.Parameter(0.02 * torch.randn(a.heads, a.window + 2))
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        apart = places[:, None, :] - places[None, :, :] + torch.tensor([rows - 1, columns - 1])
        self.register_buffer(
            "apart", apart[..., 0] * (2 * columns - 1) + apart[..., 1], persistent=False
        )
        nn.init.zeros_(self.told.weight)
        nn.init.zeros_(self.told.bias)

    def project(self, tokens: Tensor, told: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (frames, heads, tokens, head_dim) each."""
        shift, scale = self._told(told, 0, 1)
        projected = self.qkv(self.norm(tokens) * (1 + scale) + shift)
        query, key, value = projected.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return query, key, value

    def attend(
        self,
        tokens: Tensor,
        told: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """The tokens after this layer."""
        gate, shift, scale, gate_second = self._told(told, 2, 3, 4, 5)
        seen = functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias)
        seen = seen.transpose(1, 2).flatten(2).reshape(tokens.shape)
        tokens = tokens + (1 + gate) * self.out(seen)
        inner = self.norm_second(tokens) * (1 + scale) + shift
        result: Tensor = tokens + (1 + gate_second) * self.mlp(inner)
        return result

    def bias(self, sees: Tensor) -> Tensor:
        """What is added to the attention, (sessions, heads, frames * tokens, seen tokens), of
        `Denoiser._sees`."""
        unseen = self.time.new_full((self.heads, 1), -math.inf)
        time = torch.cat([self.time, unseen], 1)[:, sees].transpose(0, 1)
        space = self.space[:, self.apart]
        both = time[:, :, :, None, :, None] + space[None, :, None, :, None, :]
        return both.flatten(4, 5).flatten(2, 3)

    def _told(self, told: Tensor, *parts: int) -> list[Tensor]:
        size = told.shape[-1]
        rows = self.told(told)[:, None, :]
        return [rows[..., part * size : (part + 1) * size] for part in parts]


class Linear(nn.Linear):
    """A linear layer over (sessions, ..., numbers), one product a session."""

    def forward(self, values: Tensor) -> Tensor:
        """The values, mapped."""
        if torch.is_grad_enabled() or not values.is_cpu:
            return super().forward(values)
        rows = values.reshape(len(values), -1, self.in_features)
        weight = self.weight.t().expand(len(rows), -1, -1)
        mapped = torch.baddbmm(self.bias.expand(*rows.shape[:2], -1), rows, weight)
        return mapped.reshape(*values.shape[:-1], self.out_features)


class Convolution(nn.Conv2d):
    """A convolution of (sessions, channels, rows, columns)."""

    def forward(self, frames: Tensor) -> Tensor:
        """The frames, convolved."""
        if torch.is_grad_enabled() or not frames.is_cpu:
            return super().forward(frames)
        if not torch.backends.mkldnn.is_available():
            return torch.cat([super(Convolution, self).forward(one) for one in frames.split(1)])
        # Called by its name: `conv2d` takes another kernel for a single frame.
        convolved: Tensor = torch.ops.aten.mkldnn_convolution(
            frames, self.weight, self.bias, self.padding, self.stride, self.dilation, self.groups
        )
        return convolved


def waves(noise: Tensor) -> Tensor:
    """Noise levels as 64 numbers each."""
    frequencies = torch.exp(torch.linspace(0.0, math.log(200.0), 32, device=noise.device))
    angles = noise[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)
