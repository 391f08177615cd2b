"""Calling one method of a timed action as a timer would, without a broker."""

from __future__ import annotations

from typing import Any

import msgspec

from notify_consumer.actions.definition import Deferred, TimedAction, methods_of
from notify_consumer.actions.dispatch import NAMESPACE, ActionTable
from notify_consumer.answers import Retry
from notify_consumer.calls import Call
from notify_consumer.context import Context
from notify_consumer.resume import Resume
from timer_service.domain.identity import NameKey, derive_timer_ref, occurrence_id
from timer_service.wire.canonical import payload_sha256


class ActionRun(msgspec.Struct, frozen=True):
    """What came of a call: done, or after how many milliseconds it would be made again."""

    done: bool
    again_in_ms: int | None = None


class TimedActionTestKit:
    """Calls the methods of one action. The argument goes through JSON and its checks, as it does on its way.

    run = await TimedActionTestKit(OrderTimers(shop)).call("expire", "o-1", previous_attempts=2)
    assert run.done
    """

    def __init__(self, action: TimedAction) -> None:
        self._action = action
        self._methods = methods_of(type(action))
        self._table = ActionTable()
        self._table.add(action)

    async def call(
        self,
        handler: str | Deferred,
        *argument: Any,
        timer_name: str = "test",
        previous_attempts: int = 0,
    ) -> ActionRun:
        """Call a method by its action's name with an argument, or a deferred call.

        What the method raises counts as failed here too; raises TypeError, ValueError and HandoffRefused for calls
        that could not be deferred, or would go to the dead state.
        """
        deferred = handler if isinstance(handler, Deferred) else self._deferred(handler, argument)
        resume = _resume(deferred, timer_name, previous_attempts)
        found = self._table.find(resume)
        answer = await Call(found, Context(resume, flow=found.place, attempt=1)).run()
        return ActionRun(False, answer.delay_ms) if isinstance(answer, Retry) else ActionRun(True)

    def _deferred(self, handler: str, argument: tuple[Any, ...]) -> Deferred:
        if handler not in self._methods:
            raise ValueError(f"{self._action.name} has no action {handler!r}, but {sorted(self._methods)}")
        return Deferred(self._action.name, handler, self._methods[handler].encoded(*argument))


def _resume(deferred: Deferred, timer_name: str, previous_attempts: int) -> Resume:
    timer_ref, payload = derive_timer_ref(NameKey(timer_name, NAMESPACE)), deferred.payload
    return Resume(
        v=1,
        resume_id=occurrence_id(timer_ref, previous_attempts),
        timer_ref=timer_ref,
        timer={"namespace": NAMESPACE, "name": timer_name},
        generation=previous_attempts,
        fence=2,
        retries_used=previous_attempts,
        max_retries=None,
        edges=None,
        runtime_sha256=None,
        due_at_ms=0,
        elapsed_at_ms=0,
        payload=payload,
        payload_sha256=payload_sha256(payload),
    )
