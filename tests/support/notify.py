"""What tests of the notify consumer share: resumes, a sender that answers as told, and waiting for conditions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from notify_consumer.outbox.base import NewRow
from timer_service.domain.codes import Status
from timer_service.domain.identity import LineageKey, NameKey, derive_timer_ref
from timer_service.errors import CommandRejected
from timer_service.wire.canonical import canonical_json, payload_sha256
from timer_service.wire.records import Outcome

DEADLINE_S = 20.0


def resume_body(
    name: str = "order-1", *, flow: str | None = None, node: str = "wait", generation: int = 0, **fields: Any
) -> dict[str, Any]:
    """A resume as the timer service publishes it: of the timer ``name``, or of a run ``name`` of ``flow``."""
    key = NameKey(name) if flow is None else LineageKey(flow, "1", name, node)
    timer_ref = derive_timer_ref(key)
    body: dict[str, Any] = {
        "v": 1,
        "resume_id": f"{timer_ref}.{generation}",
        "timer_ref": timer_ref,
        "timer": {field: getattr(key, field) for field in key.__struct_fields__},
        "generation": generation,
        "fence": 2,
        "retries_used": 0,
        "max_retries": 0,
        "edges": None,
        "runtime_sha256": None,
        "due_at_ms": 1_000,
        "elapsed_at_ms": 1_002,
        "payload": {"n": 1},
    }
    body |= fields
    return {**body, "payload_sha256": payload_sha256(body["payload"])}


def resume_bytes(*args: Any, **fields: Any) -> bytes:
    return canonical_json(resume_body(*args, **fields))


def new_row(name: str = "order-1", *, lane: str = "x", **fields: Any) -> NewRow:
    body = resume_body(name, **fields)
    return NewRow(body["resume_id"], lane, canonical_json(body))


async def until(condition: Callable[[], Any], what: str = "") -> Any:
    """Wait until ``condition()`` is true (or its result, when it is awaitable) and return it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if loop.time() > deadline:
            raise AssertionError(f"not within {DEADLINE_S:g} s: {what or condition}")
        await asyncio.sleep(0.005)


def outcome(status: Status = Status.ACCEPTED, code: str | None = None) -> Outcome:
    return Outcome("c", status, code, None, None, None, None, None, None)


def rejected(code: str) -> CommandRejected:
    return CommandRejected(outcome(Status.REJECTED, code))


class FakeSender:
    """Records commands; each gets ``reply``, or raises it. While ``held`` nothing is answered."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Mapping[str, Any]]] = []
        self.reply: Outcome | Exception = outcome()
        self.open = asyncio.Event()
        self.open.set()

    async def send(
        self, kind: str, body: Mapping[str, Any], *, wait: bool = True, timeout_ms: int | None = None
    ) -> Outcome | None:
        self.sent.append((kind, body))
        await self.open.wait()
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.sent]
