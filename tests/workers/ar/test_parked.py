"""The file of a parked session is read back exactly, or not at all."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import SessionStateLost
from protocol.payloads import Message
from workers.engines.ar.parked import Parked, create, seal, unseal

messages = st.builds(Message, st.sampled_from(["user", "assistant"]), st.text(max_size=20))
parked = st.builds(
    Parked,
    st.just("w"),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.binary(max_size=8)), max_size=20),
    st.lists(messages, max_size=4),
    st.lists(st.integers(-1, 2**31 - 1), max_size=20),
    st.booleans(),
)
SMALL = Parked("w", [(7, b" The"), (9, b"\xe2\x82")], [Message("user", "Hello!")], [2, 7], True)


def written(folder: Path, state: bytes, known: Parked) -> Path:
    path = folder / "parked"
    path.write_bytes(state)
    seal(path, known)
    return path


@given(state=st.binary(max_size=2000), known=parked)
def test_what_was_sealed_is_read_and_the_state_lies_in_front(state: bytes, known: Parked) -> None:
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as folder:
        path = written(Path(folder), state, known)
        assert unseal(path, "w") == (known, len(state))
        assert path.read_bytes().startswith(state)


def test_a_state_of_many_blocks_is_checked_to_its_end(tmp_path: Path) -> None:
    path = written(tmp_path, bytes((3 << 20) + 17), SMALL)
    assert unseal(path, "w") == (SMALL, (3 << 20) + 17)
    with path.open("r+b") as file:
        file.seek(3 << 20)
        file.write(b"x")
    with pytest.raises(SessionStateLost, match="checksum"):
        unseal(path, "w")


def test_any_damaged_byte_and_any_lost_end_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, b"the state of a slot", SMALL)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(SessionStateLost):
            unseal(path, "w")
        path.write_bytes(whole[:at])
        with pytest.raises(SessionStateLost):
            unseal(path, "w")
    path.write_bytes(whole + b"x")
    with pytest.raises(SessionStateLost):
        unseal(path, "w")


def test_a_session_of_another_model_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, b"state", SMALL)
    with pytest.raises(SessionStateLost, match="another model"):
        unseal(path, "v")


def test_a_file_that_is_gone_is_a_lost_state(tmp_path: Path) -> None:
    with pytest.raises(SessionStateLost):
        unseal(tmp_path / "none", "w")


def test_a_new_file_is_for_this_user_alone_and_replaces_none(tmp_path: Path) -> None:
    path = tmp_path / "parked"
    create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        create(path)
