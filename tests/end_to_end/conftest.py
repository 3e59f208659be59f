"""The voice product, served once for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deployment import Deployment


@pytest.fixture(scope="session")
def voice() -> Iterator[Deployment]:
    """`examples/voice.yaml` as `make run` serves it, on a port of its own."""
    with Deployment() as deployment:
        yield deployment
