"""What people read: short, and safe for a terminal whatever was sent."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from timer_service import show
from timer_service.cli import diagnose
from timer_service.jetstream import topology

NOW = 1_800_000_000_000
ENTRY = {
    "generation": 0, "accepted_at_ms": NOW - 5_000, "due_at_ms": NOW - 2_000, "woken_at_ms": NOW - 2_000,
    "elapsed_at_ms": NOW - 1_990, "resumed_at_ms": None, "resumes": 1, "answer": None, "answered_at_ms": None,
    "lateness_ms": 10,
}  # fmt: skip
RECORD = {
    "timer_ref": "a" * 26, "timer": {"name": "tea", "namespace": "default"}, "phase": "elapsed", "generation": 0,
    "fence": 2, "due_at_ms": NOW - 2_000, "retries_used": 0, "max_retries": None, "timeline": [ENTRY],
}  # fmt: skip


def story(**other: object) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(show.story({**RECORD, **other}, NOW), highlight=False)
    return out.getvalue()


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1_500, "1.5 s"),
        (61_000, "1 m 1 s"),
        (5_400_000, "1 h 30 m"),
        (90_061_000, "1 d 1 h"),
        (86_400_000, "1 d"),
    ],
)
def test_durations_have_two_units_at_most(ms: int, text: str) -> None:
    """Two units say enough."""
    assert show.duration(ms) == text


def test_text_from_outside_can_not_steer_the_terminal() -> None:
    """Escape sequences, bidirectional overrides and line breaks of strangers are replaced."""
    assert show.clean("a\x1b[31mb\u202ec\n\u009bd") == "a\ufffd[31mb\ufffdc\ufffd\ufffdd"
    assert "\x1b" not in story(payload="\x1b[2J", message="\x1b]0;x\x07", timer={"name": "\u009b31m", "namespace": "n"})


def test_rich_markup_in_names_is_text() -> None:
    """A name in brackets is shown as it is."""
    assert "[red]x[/]" in story(timer={"name": "[red]x[/]", "namespace": "default"})


def test_keys_are_short() -> None:
    """The default namespace goes without saying; a flow's node names its flow, version and execution."""
    assert show.key({"name": "a", "namespace": "default"}) == "a"
    assert show.key({"name": "a", "namespace": "n"}) == "n/a"
    flow = {"flow_id": "f", "flow_version": "2", "root_execution_id": "r", "node_id": "wait"}
    assert show.key(flow) == "f@2 wait of r"


def test_the_story_says_what_a_timer_waits_for() -> None:
    """Its due time, the service when overdue, an answer with the command that gives it, or nothing."""
    assert f"complete|retry|fail {'a' * 26} 0 2" in story()
    assert "a retry will end it" in story(cancel_requested=True)
    assert "its due time" in story(phase="waiting", due_at_ms=NOW + 1)
    assert "it is overdue" in story(phase="waiting")
    assert "about to be filed" in story(phase="completed")
    assert "waits for" not in story(phase="completed", status="completed", ended_at_ms=NOW)


def test_a_due_time_that_will_not_come_is_no_time_from_now() -> None:
    """A timer cancelled long before it was due does not say in how many days it is."""
    assert "(in 1 h)" in story(phase="waiting", due_at_ms=NOW + 3_600_000)
    assert "(in 1 h)" not in story(phase="cancelled", status="cancelled", due_at_ms=NOW + 3_600_000, ended_at_ms=NOW)


def test_the_story_says_why_it_was_late() -> None:
    """Started too late, woken too late, stored too late: each with its share; nothing when it was on time."""
    assert "why late" not in story()
    late = {**ENTRY, "woken_at_ms": NOW - 1_000, "elapsed_at_ms": NOW, "lateness_ms": 2_000}
    assert "generation 0: 1.0 s nobody woke it" in story(timeline=[late])
    assert "1.0 s from its wake until that was stored" in story(timeline=[late])
    past = {**late, "due_at_ms": NOW - 65_000, "lateness_ms": 65_000}
    assert "1 m it was due before it was started" in story(timeline=[past, {**ENTRY, "generation": 1}])
    assert "why late" not in story(timeline=[{**late, "woken_at_ms": None}])


def test_the_story_names_the_last_commands() -> None:
    """Who answered: the ids of the last commands, newest last, safe for a terminal."""
    receipts = [[f"c{n}", "hash", None] for n in range(6)] + [["\x1b[2J", "hash", None]]
    assert "… 3 before, c3, c4, c5, \ufffd[2J" in story(receipts=receipts)


def test_long_payloads_are_cut() -> None:
    """A payload takes a few lines, and says how long it is."""
    assert "(10002 characters)" in story(payload="x" * 10_000)


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB")])
def test_sizes_have_one_unit(count: int, text: str) -> None:
    """The largest unit that leaves a number from 1."""
    assert show.size(count) == text


def test_stats_fit_into_80_columns() -> None:
    """No name and no heading is cut where a terminal has its usual width."""
    stream = {"messages": 99_999_999, "bytes": 2**40, "max_bytes": 2**40, "percent": 100.0}
    consumer = {"pending": 999_999, "unacknowledged": 99_999, "redelivered": 99_999, "readers_waiting": 512}
    streams = [spec.name for spec in topology.streams(topology.Sizes())]
    consumers = [spec.name for spec in topology.CONSUMERS]
    found = {
        "server": {"url": "nats://127.0.0.1:4222", "version": "2.15.1"},
        "durability": None,
        "streams": dict.fromkeys(streams, stream),
        "consumers": dict.fromkeys(consumers, consumer),
    }
    out = io.StringIO()
    Console(file=out, width=80).print(diagnose.tables(found), highlight=False)
    assert "…" not in out.getvalue()
    assert all(name in out.getvalue() for name in (*streams, *consumers, "unacked", "requests"))
