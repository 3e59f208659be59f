"""An error that is raised more than once is the same each time, whatever its class is made of."""

from __future__ import annotations

import pytest

from gateway.http_errors import HttpRefusal
from gateway.surfaces.worlds.stepping import StepRefused, WorldEnded
from protocol.errors import AntiphonError, CapacityExceeded, ErrorInfo, ErrorKind, InvalidRequest


def known(base: type[AntiphonError]) -> set[type[AntiphonError]]:
    """The class and all that are made of it."""
    return {base, *(kind for below in base.__subclasses__() for kind in known(below))}


ODD = [
    HttpRefusal("no", code="odd", status=404),
    StepRefused(ErrorInfo("odd", ErrorKind.LOST, "no", "step"), 3),
    WorldEnded(),
]


@pytest.mark.parametrize(
    "error",
    [
        *ODD,
        CapacityExceeded("full", field="model", retry_after_ms=5),
        InvalidRequest("no", code="odd"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_raised_again(error: AntiphonError) -> None:
    with pytest.raises(type(error)) as raised:
        raise error.again()
    same = raised.value
    assert same is not error
    assert error.__traceback__ is None
    assert (same.args, vars(same), same.info()) == (error.args, vars(error), error.info())


def test_every_class_with_arguments_of_its_own_is_looked_at() -> None:
    own = {
        kind
        for kind in known(AntiphonError)
        if "__init__" in vars(kind) and kind.__module__.startswith("gateway")
    }
    assert own <= {type(error) for error in ODD}
