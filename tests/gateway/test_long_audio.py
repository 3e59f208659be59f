from __future__ import annotations

import pytest

from gateway.surfaces.long_audio import APPEND_BYTES, in_pieces
from sessions.duplex.events import AppendAudio, ClearInput


@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        (0, [0]),
        (960, [960]),
        (APPEND_BYTES, [APPEND_BYTES]),
        (APPEND_BYTES + 2, [APPEND_BYTES, 2]),
        (2 * APPEND_BYTES, [APPEND_BYTES, APPEND_BYTES]),
    ],
)
def test_long_audio_comes_in_pieces_of_whole_samples(size: int, pieces: list[int]) -> None:
    pcm = (bytes(range(256)) * (size // 256 + 1))[:size]
    parts = [part for part in in_pieces(AppendAudio(pcm, "ref")) if isinstance(part, AppendAudio)]
    assert [len(part.pcm) for part in parts] == pieces
    assert b"".join(part.pcm for part in parts) == pcm
    assert {part.ref for part in parts} == {"ref"}
    assert all(len(part.pcm) % 2 == 0 for part in parts)


def test_all_else_is_left_as_it_is() -> None:
    assert list(in_pieces(ClearInput("ref"))) == [ClearInput("ref")]
