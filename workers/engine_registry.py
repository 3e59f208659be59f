"""The engines of this environment, by name."""

from __future__ import annotations

import importlib
import importlib.metadata

from protocol.errors import ConfigError
from workers.engine import Engine

ENTRY_POINTS = "antiphon.engines"


def engine_class(name: str) -> type[Engine]:
    """The engine registered as `name`, or in a module as `MODULE:CLASS`.

    Imports its module, but loads no model. Raises ConfigError when there is none or its
    module cannot be imported.
    """
    registered = importlib.metadata.entry_points(group=ENTRY_POINTS)
    module, colon, attribute = name.partition(":")
    if not colon and name not in registered.names:
        known = ", ".join(sorted(registered.names)) or "none"
        raise ConfigError(f"there is no engine {name}; installed are {known}", field="engine")
    try:
        if colon:
            engine = getattr(importlib.import_module(module), attribute)
        else:
            engine = registered[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"engine {name} cannot be loaded: {error}", field="engine") from None
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        raise ConfigError(f"engine {name} is not an Engine but {engine!r}", field="engine")
    return engine
