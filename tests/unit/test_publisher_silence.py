"""A stream that leaves writes unanswered is told of while that goes on, and not for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from timer_service.jetstream.publish import Publisher


def test_silence_is_over_when_nothing_was_left_unanswered_lately() -> None:
    """Writes that matter are tried again: none unanswered in three time-outs and 5 s means that all is well."""
    now_s = 100.0
    publisher = Publisher(cast(Any, SimpleNamespace(timeout_s=2.0, connected=True)))
    publisher._now = lambda: now_s
    publisher._heard = now_s
    publisher._unanswered("S")
    assert publisher.silent == ["S"]
    now_s = 110.9
    assert publisher.silent == ["S"]
    publisher._heard = now_s
    publisher._unanswered("S")
    now_s = 121.0
    assert publisher.silent == ["S"]
    now_s = 122.0
    assert publisher.silent == []


def test_a_broker_that_answers_nobody_is_no_silent_stream() -> None:
    """Then it is the connection, which is told of elsewhere."""
    publisher = Publisher(cast(Any, SimpleNamespace(timeout_s=2.0, connected=True)))
    publisher._now = lambda: 100.0
    publisher._heard = 98.0
    publisher._unanswered("S")
    assert publisher.silent == []
