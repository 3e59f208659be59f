"""One way of logging for all processes: structured lines on standard error.

Context (session, epoch, turn, stage, worker) is bound with
`structlog.contextvars.bind_contextvars` or `log.bind`, never formatted into the event.
"""

from __future__ import annotations

import logging
import os
import sys

import structlog
from structlog.types import Processor

FORMAT_VARIABLE = "ANTIPHON_LOG_FORMAT"
LEVEL_VARIABLE = "ANTIPHON_LOG_LEVEL"


def configure_logging(process: str) -> None:
    """Log as `process` from now on, the standard library's loggers included.

    The environment chooses: ANTIPHON_LOG_FORMAT `json` or `text` (by default text on a
    terminal, JSON elsewhere), ANTIPHON_LOG_LEVEL as in `logging` (default INFO). Other
    libraries are heard from WARNING on, or from a higher level.
    """
    text = os.environ.get(FORMAT_VARIABLE, "text" if sys.stderr.isatty() else "json") == "text"
    level = logging.getLevelNamesMapping().get(
        os.environ.get(LEVEL_VARIABLE, "INFO").upper(), logging.INFO
    )
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _name_process(process),
    ]
    renderer: Processor = (
        structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])
        if text
        else structlog.processors.JSONRenderer()
    )
    last: list[Processor] = [structlog.processors.format_exc_info, renderer]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))


def _name_process(process: str) -> Processor:
    def add(
        _logger: object, _method: str, event: structlog.types.EventDict
    ) -> structlog.types.EventDict:
        event["process"] = process
        return event

    return add
