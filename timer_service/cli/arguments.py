"""What people type, turned into values: durations, instants, JSON, keys; and the options that commands share.

What can't be understood is a usage error (exit code 2). What can be understood but not accepted is left to the
service, whose answer names the code of the contract.
"""

from __future__ import annotations

import re
import sys
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from timer_service.client import timer_ref_of
from timer_service.clock import SystemClock
from timer_service.domain.identity import TimerRef, is_timer_ref
from timer_service.wire.canonical import strict_loads
from timer_service.wire.commands import BadCommand
from timer_service.wire.instants import parse_instant_ms

Nats = Annotated[
    str, typer.Option("--nats", metavar="URL", envvar="DURABLE_TIMER_NATS_URL", help="The NATS server or cluster.")
]
Creds = Annotated[
    str | None,
    typer.Option("--creds", metavar="FILE", envvar="DURABLE_TIMER_NATS_CREDS", help="Credentials for NATS."),
]
Json = Annotated[bool, typer.Option("--json", help="For machines: JSON on standard output, one object a line.")]
CommandId = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Repeating a command under the same id changes nothing. Default: a new one."),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return when the broker has stored the command.")]
TimeoutMs = Annotated[int, typer.Option(min=1, metavar="MS", help="How long to wait for the outcome.")]
Ref = Annotated[str | None, typer.Argument(metavar="[TIMER_REF]", help="The timer; or give --name.")]
Name = Annotated[str | None, typer.Option(metavar="NAME", help="Name of a timer that belongs to no flow.")]
Namespace = Annotated[str | None, typer.Option(metavar="NS", help="Namespace of the name. Default: default.")]

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(ms|s|m|h|d|w)")


def duration_ms(text: str) -> int:
    """``1h30m``, ``500ms``, ``1.5s`` in milliseconds, rounded up. A usage error otherwise."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise typer.BadParameter(f"{text!r} is not a duration such as 30m, 1h30m or 500ms (w, d, h, m, s, ms)")
    total = sum((Decimal(number) * _UNITS_MS[unit] for number, unit in parts), Decimal(0))
    return int(total.to_integral_value(ROUND_CEILING))


def instant_ms(text: str) -> int:
    """An RFC 3339 date-time, or a duration from now, in epoch milliseconds."""
    if _PART.match(text) and "T" not in text:
        return SystemClock().now_ms() + duration_ms(text)
    try:
        return parse_instant_ms(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is neither RFC 3339 with an offset nor a duration: {error}") from None


def json_value(text: str, option: str) -> Any:
    """JSON from the command line, from a file (``@FILE``) or from standard input (``-``)."""
    try:
        return strict_loads(_json_bytes(text))
    except OSError as error:
        raise typer.BadParameter(f"{option}: {error}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{option} is not JSON (a text needs its quotes): {error}") from None


def _json_bytes(text: str) -> bytes:
    if text == "-":
        return sys.stdin.buffer.read()
    if text.startswith("@"):
        return Path(text[1:]).read_bytes()
    return text.encode("utf-8", "surrogateescape")


def json_object(text: str | None, option: str) -> dict[str, Any] | None:
    """As ``json_value``, for an object; None stays None."""
    if text is None:
        return None
    value = json_value(text, option)
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{option} must be a JSON object")
    return value


def retries(text: str) -> int | None:
    """A number, or ``none`` for "without limit"."""
    if text.lower() == "none":
        return None
    if not text.isascii() or not text.isdigit():
        raise typer.BadParameter(f"--max-retries is a number from 0, or none; not {text!r}")
    return int(text)


def named_ref(ref: str | None, name: str | None, namespace: str | None) -> TimerRef:
    """The timer meant by TIMER_REF or ``--name``; a usage error when it is neither or both."""
    if (ref is None) == (name is None):
        raise typer.BadParameter("give either TIMER_REF or --name")
    if ref is not None and namespace is not None:
        raise typer.BadParameter("--namespace goes with --name")
    if ref is not None and not is_timer_ref(ref):
        raise typer.BadParameter(f"{ref!r} is not a timer_ref (26 characters); a timer is named with --name")
    return derived_ref(ref if ref is not None else name_key(name, namespace))


def derived_ref(timer: str | dict[str, str]) -> TimerRef:
    """The timer_ref of a key; a timer_ref is checked. A usage error when it is neither."""
    try:
        return timer_ref_of(timer)
    except (BadCommand, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


def name_key(name: str | None, namespace: str | None) -> dict[str, str]:
    """The key object of a named timer."""
    parts = {"name": name, "namespace": namespace}
    return {part: value for part, value in parts.items() if value is not None}
