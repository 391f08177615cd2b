"""Stored states, changed by hand into what a crash leaves behind."""

from __future__ import annotations

import json
from typing import Any

from tests.support.service import Desk
from timer_service.jetstream import topology


async def rewritten(desk: Desk, timer_ref: str, change: Any) -> dict[str, Any]:
    """Replace the stored state, as a service that died right after that write would have left it."""
    entry = await desk.entry(timer_ref)
    assert entry is not None
    state = change(json.loads(entry.data or b""))
    headers = {"Nats-Expected-Last-Subject-Sequence": str(entry.seq)}
    await desk.js.publish(topology.state_subject(timer_ref), json.dumps(state).encode(), headers=headers)
    return dict(state)


def as_elapsed(state: dict[str, Any], at_ms: int) -> dict[str, Any]:
    line = {**state["timeline"][0], "due_at_ms": at_ms, "woken_at_ms": at_ms, "elapsed_at_ms": at_ms, "lateness_ms": 0}
    return {**state, "phase": "elapsed", "fence": state["fence"] + 1, "due_at_ms": at_ms, "timeline": [line]}


def as_cancelled(state: dict[str, Any], at_ms: int) -> dict[str, Any]:
    line = {**state["timeline"][0], "answer": "cancel", "answered_at_ms": at_ms}
    return {
        **state,
        "phase": "cancelled",
        "fence": state["fence"] + 1,
        "timeline": [line],
        "ended_at_ms": at_ms,
    }
