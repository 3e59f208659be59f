"""What no surface foresees, on a connection: told its client as a fault, and logged once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import structlog

from protocol.errors import AntiphonError

_log = structlog.get_logger(__name__)


@contextlib.contextmanager
def faults(session: str | None = None) -> Iterator[None]:
    """Where a connection is served. Raises AntiphonError for what is neither one nor an OSError,
    which is that the client has gone."""
    try:
        yield
    except (AntiphonError, OSError):
        raise
    except Exception as error:
        raise fault(session) from error


def fault(session: str | None) -> AntiphonError:
    """Log the error that is being handled: what its client is told."""
    _log.exception("connection_failed", session=session)
    return AntiphonError("The gateway failed at this; its log says more.")
