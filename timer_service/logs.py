"""Structured logs: an event constant with dots, and data as keys. JSON lines unless a person is watching."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import structlog


def configure_logs(*, level: str = "INFO") -> None:
    """Log to standard error: lines for people on a terminal, JSON otherwise. Repeating it replaces the set-up."""
    people = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    renderer: Any = structlog.dev.ConsoleRenderer() if people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.getLogger("nats.aio.client").setLevel(logging.CRITICAL)  # the connection tells its own story


def get_logger(**keys: object) -> Any:
    """A logger that adds ``keys`` to every event."""
    return structlog.get_logger(**keys)
