"""What people type: durations, instants, keys; and that nonsense is a usage error before anything is connected."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from timer_service.cli import app
from timer_service.cli.arguments import duration_ms, instant_ms, retries
from timer_service.clock import SystemClock

NOBODY = "nats://127.0.0.1:9"


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("500ms", 500),
        ("30m", 1_800_000),
        ("1h30m", 5_400_000),
        ("1w2d", 777_600_000),
        ("1.5s", 1_500),
        ("0.0001s", 1),
        ("0s", 0),
        ("1m1ms", 60_001),
    ],
)
def test_durations_are_read(text: str, ms: int) -> None:
    """Numbers with units, largest first or not; what is finer than a millisecond rounds up, so nothing is early."""
    assert duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "-5m", "1h-2m", "1e3s", "5min", "٣m", "1..5s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    """Anything else is a usage error, never a guess."""
    with pytest.raises(typer.BadParameter):
        duration_ms(text)


def test_instants_are_rfc_3339_or_from_now() -> None:
    """A date-time with offset, or a duration from now."""
    assert instant_ms("1970-01-01T01:00:01+01:00") == 1_000
    now_ms = SystemClock().now_ms()
    assert 0 <= instant_ms("10m") - now_ms - 600_000 < 60_000
    with pytest.raises(typer.BadParameter):
        instant_ms("tomorrow")


def test_retries_are_a_number_or_none() -> None:
    """``none`` is without limit; signs and other digits are refused."""
    assert (retries("0"), retries("12"), retries("none")) == (0, 12, None)
    for text in ("-1", "+1", "٣", "", "many"):
        with pytest.raises(typer.BadParameter):
            retries(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("start", "--name", "a"),
        ("start", "--name", "a", "--delay", "1h", "--delay-ms", "5"),
        ("start", "--name", "a", "--delay", "an hour"),
        ("start", "--delay", "1h"),
        ("start", "--name", "a", "--flow-id", "f", "--delay", "1h"),
        ("start", "--flow-id", "f", "--delay", "1h"),
        ("start", "--name", "a", "--delay", "1h", "--payload", "not json"),
        ("start", "--name", "a", "--delay", "1h", "--payload", '{"a":1,"a":2}'),
        ("start", "--name", "a", "--delay", "1h", "--payload", "@/nowhere"),
        ("start", "--name", "a", "--delay", "1h", "--max-retries", "-1"),
        ("start", "--name", "a", "--delay", "1h", "--edges", "[]"),
        ("cancel",),
        ("cancel", "not-a-ref"),
        ("get", "not-a-ref"),
        ("complete", "aaaaaaaaaaaaaaaaaaaaaaaaaa", "one", "2"),
        ("list", "--due-before", "soon"),
    ],
    ids=" ".join,
)
def test_what_can_not_be_meant_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    """It exits 2, before anything is connected and without a traceback."""
    done = CliRunner().invoke(app, [*arguments, "--nats", NOBODY])
    assert done.exit_code == 2, done.output
    assert "Usage:" in done.stderr
    assert done.stdout == ""
