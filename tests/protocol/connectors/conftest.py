"""Ends of every kind of connector, and the proof that they leave nothing behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.protocol.connectors.ends import Ends, open_files, start_ends

KINDS = ["inline", "shm"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of connector that the test runs with."""
    name: str = request.param
    return name


def shared_memory() -> set[str]:
    """The segments of this machine; a folder is a deployment's for parked sessions."""
    return {entry.name for entry in os.scandir("/dev/shm") if not entry.is_dir()}


@pytest.fixture
async def ends(kind: str) -> AsyncIterator[Ends]:
    """A near end; whatever happened, no file, name or memory is left of it afterwards."""
    segments = shared_memory()
    files = open_files()
    with tempfile.TemporaryDirectory(prefix="ant-") as directory:
        made = start_ends(kind, Path(directory))
        yield made
        await made.end()
        assert open_files() <= files
        left = set(os.listdir(directory))
        killed = {f"{far.name}.arena" for far in made.far if far.process.returncode}
        assert left <= killed
    assert shared_memory() <= segments
