"""``notify-consumer`` as a child that comes to a stop at a step of a hand-off, or whose clocks are wrong.

    HOLD_STEP=handled HOLD_RESUME=… python -m tests.support.notify_steps serve …

When the resume gets to that step, ``held-<step>`` appears in HOLD_FOLDER, and the work on it goes no further: with
HOLD_FREEZE the whole process stops (SIGSTOP), and goes on from there after SIGCONT. AHEAD_MS sets Python's clocks
ahead. The program is the real one; only the methods that are the steps are wrapped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from notify_consumer import cli
from notify_consumer.outbox import make_outbox
from timer_service.client import TimerClient

STEPS = (
    "stored",  # by the broker; not in the outbox yet
    "inserted",  # not acknowledged yet
    "acked",  # not claimed yet
    "claimed",  # the handler has not begun
    "handling",
    "handled",  # the answer is not stored yet
    "answered",  # the feedback has not been sent
    "published",  # it has been, and nobody has waited for what becomes of it
    "settled",  # the timer service has told; the row does not know
    "done",
)


async def hold(step: str, resume_id: str) -> None:
    """Stop here if this is the step and the resume."""
    if not _is_held(step, resume_id):
        return
    marker = Path(os.environ["HOLD_FOLDER"]) / f"held-{step}"
    if marker.exists():
        return
    marker.touch()
    if not os.environ.get("HOLD_FREEZE"):
        await asyncio.Event().wait()
    os.kill(os.getpid(), signal.SIGSTOP)


def _is_held(step: str, resume_id: str) -> bool:
    return (step, resume_id) == (os.environ.get("HOLD_STEP"), os.environ.get("HOLD_RESUME"))


def _wrap(owner: type, name: str, before: Callable[..., Any] | None, after: Callable[..., Any] | None) -> None:
    original = getattr(owner, name)

    async def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        if before is not None:
            await before(*args)
        result = await original(self, *args, **options)
        if after is not None:
            await after(result, *args)
        return result

    setattr(owner, name, wrapped)


class _Steps:
    """What is awaited before and after the methods."""

    def __init__(self) -> None:
        self._inserted: set[str] = set()

    async def before_insert(self, rows: Any) -> None:
        for row in rows:
            await hold("stored", row.resume_id)

    async def after_insert(self, _: Any, rows: Any) -> None:
        for row in rows:
            self._inserted.add(row.resume_id)
            await hold("inserted", row.resume_id)

    async def before_claim(self, *_: Any) -> None:
        for resume_id in self._inserted:
            await hold("acked", resume_id)

    async def after_claim(self, claims: Any, *_: Any) -> None:
        for claim in claims:
            await hold("claimed", claim.resume_id)

    async def before_store(self, claim: Any, _: Any) -> None:
        await hold("handled", claim.resume_id)

    async def after_store(self, _: Any, claim: Any, *__: Any) -> None:
        await hold("answered", claim.resume_id)

    async def after_finish(self, _: Any, claim: Any, *__: Any) -> None:
        await hold("done", claim.resume_id)

    async def after_send(self, _: Any, kind: str, body: Any) -> None:
        await hold("settled", body["command_id"].removeprefix("notify:"))


def _wrap_send() -> None:
    """Publishing and waiting are one call; the step between them is a call that does not wait."""
    send = TimerClient.send

    async def published(self: TimerClient, kind: Any, body: Any, **options: Any) -> Any:
        resume_id = body["command_id"].removeprefix("notify:")
        if _is_held("published", resume_id):
            await send(self, kind, body, wait=False)
            await hold("published", resume_id)
        return await send(self, kind, body, **options)

    TimerClient.send = published  # type: ignore[method-assign]


def _install(store: type) -> None:
    steps = _Steps()
    _wrap(store, "insert", steps.before_insert, steps.after_insert)
    _wrap(store, "claim", steps.before_claim, steps.after_claim)
    _wrap(store, "store_outcome", steps.before_store, steps.after_store)
    _wrap(store, "finish", None, steps.after_finish)
    _wrap(TimerClient, "send", None, steps.after_send)
    _wrap_send()


def _set_clocks_ahead(ahead_ms: int) -> None:
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + ahead_ms / 1000
    time.time_ns = lambda: real_ns() + ahead_ms * 1_000_000


if __name__ == "__main__":
    if ahead := os.environ.get("AHEAD_MS"):
        _set_clocks_ahead(int(ahead))
    if os.environ.get("HOLD_STEP"):
        _install(type(make_outbox(os.environ["HOLD_OUTBOX"])))
    cli.main()
