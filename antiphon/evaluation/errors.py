"""Why an evaluation is worth nothing."""

from __future__ import annotations

from protocol.errors import AntiphonError


class EvaluationFailed(AntiphonError):
    """A robot or the gateway failed, or what was measured does not hold together."""

    code = "evaluation_failed"
