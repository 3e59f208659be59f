from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def client_python() -> Path:
    """The Python of the official client's environment; `make test` makes it."""
    python = ROOT / ".venv-client" / "bin" / "python"
    assert python.exists(), f"{python} is missing: run `make setup-test`"
    return python
