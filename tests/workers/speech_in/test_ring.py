"""The ring against a plain list that forgets nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.speech_in.ring import AudioLost, AudioRing


@given(
    st.integers(1, 50),
    st.integers(0, 1000),
    st.lists(st.integers(0, 120), max_size=20),
    st.data(),
)
def test_what_is_kept_is_what_came(
    capacity: int, position: int, lengths: list[int], data: st.DataObject
) -> None:
    ring = AudioRing(capacity, position)
    everything: list[int] = []
    for length in lengths:
        chunk = [(len(everything) + i) % 30_000 for i in range(length)]
        everything += chunk
        ring.append(np.array(chunk, np.int16))
        assert ring.end == position + len(everything)
        assert ring.start == max(position, ring.end - capacity)
        start = data.draw(st.integers(ring.start, ring.end))
        end = data.draw(st.integers(start, ring.end))
        assert ring.read(start, end).tolist() == everything[start - position : end - position]


def test_a_lost_stretch_is_refused_and_says_what_is_left() -> None:
    ring = AudioRing(10)
    ring.append(np.arange(25, dtype=np.int16))
    with pytest.raises(AudioLost) as lost:
        ring.read(14, 20)
    assert lost.value.available_from == 15
    assert ring.read(15, 20).tolist() == [15, 16, 17, 18, 19]


def test_what_has_not_come_is_refused() -> None:
    ring = AudioRing(10)
    ring.append(np.arange(5, dtype=np.int16))
    with pytest.raises(ValueError, match="ends at 5"):
        ring.read(0, 6)
    with pytest.raises(ValueError, match="ends at 5"):
        ring.read(4, 3)


def test_what_was_read_does_not_change_when_the_ring_turns() -> None:
    ring = AudioRing(4)
    ring.append(np.array([1, 2, 3, 4], np.int16))
    read = ring.read(0, 4)
    ring.append(np.array([5, 6, 7, 8], np.int16))
    assert read.tolist() == [1, 2, 3, 4]


def test_a_restart_forgets_and_goes_on_elsewhere() -> None:
    ring = AudioRing(4)
    ring.append(np.array([1, 2, 3], np.int16))
    ring.restart(100)
    ring.append(np.array([9], np.int16))
    assert ring.read(100, 101).tolist() == [9]
    with pytest.raises(AudioLost):
        ring.read(0, 3)
