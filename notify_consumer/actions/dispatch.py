"""From the resume of a timed action's timer to the method that it calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

import msgspec

from notify_consumer import events
from notify_consumer.actions.definition import (
    VERSION,
    ActionDone,
    ActionFailed,
    ActionMethod,
    TimedAction,
    current,
    methods_of,
)
from notify_consumer.answers import Answer, Done, Retry
from notify_consumer.context import Context
from notify_consumer.errors import HandlerFailed, HandoffRefused
from notify_consumer.handler import Handler, Typed
from notify_consumer.policy import Policy
from notify_consumer.resume import Resume

NAMESPACE: Final = "timed-actions"
"""Of the names of these timers: only timed actions get them."""

_BACKOFF: Final = Policy()  # 3 s doubling to 30 s, whatever the hand-offs of this process use


def is_timed_action(resume: Resume) -> bool:
    """Whether its timer was made by a TimerScheduler."""
    return resume.timer.get("namespace") == NAMESPACE


def retry_delay_ms(previous_attempts: int) -> int:
    """How long a call waits after it has failed, and that ``previous_attempts`` times before: 3 s doubling to 30 s."""
    return _BACKOFF.delay_ms(previous_attempts + 1)


class ActionTable:
    """The registered timed actions."""

    def __init__(self) -> None:
        self._handlers: dict[tuple[str, str], ActionHandler] = {}

    def add(self, action: TimedAction) -> None:
        """Raises ValueError for an action without methods and one whose name is taken, TypeError for what is none."""
        if not isinstance(action, TimedAction):
            raise TypeError(f"give an object of a TimedAction, not {action!r}")
        methods = methods_of(type(action))
        if not methods:
            raise ValueError(f"{type(action).__name__} has no @action method")
        if any(name == action.name for name, _ in self._handlers):
            raise ValueError(f"there is a timed action {action.name!r} already")
        made = {(action.name, name): ActionHandler(action, method) for name, method in methods.items()}
        self._handlers |= made

    def find(self, resume: Resume) -> ActionHandler:
        """The method that ``resume`` calls. Raises HandoffRefused when there is none such."""
        called = read_call(resume.payload)
        handler = self._handlers.get((called.action, called.handler))
        if handler is None:
            raise HandoffRefused(f"no timed action {called.action!r} with {called.handler!r} is registered here")
        return handler

    def flow_of(self, resume: Resume) -> str:
        """The share that ``resume`` counts against: that of the method, as far as it is known here."""
        try:
            return f"action:{self.find(resume).place}"
        except HandoffRefused:
            return "action:"

    def __len__(self) -> int:
        return len(self._handlers)


class CallBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The payload of a timed action's timer."""

    v: int
    action: str
    handler: str
    argument: Any


def read_call(payload: Any) -> CallBody:
    """What ``payload`` says is to be called. Raises HandoffRefused when this version can't tell."""
    version = payload.get("v") if isinstance(payload, dict) else None
    if version != VERSION:
        raise HandoffRefused(f"not a timed action of version {VERSION}: v is {version!r}")
    try:
        return msgspec.convert(payload, CallBody)
    except msgspec.ValidationError as error:
        raise HandoffRefused(f"not a timed action: {error}") from None


class ActionHandler(Handler):
    """A method of a timed action. It has an answer to its failures: the timer waits again."""

    def __init__(self, action: TimedAction, method: ActionMethod[Any, Any, Any]) -> None:
        self._method = method
        self.place = f"{action.name}/{method.name}"
        super().__init__(method.function.__get__(action), timeout_ms=method.timeout_ms)

    def _wanted_parameters(self) -> list[tuple[inspect.Parameter, Typed | None]]:
        return []  # its one parameter was looked at when the action was defined

    def bind(self, context: Context) -> Callable[[], Any]:
        current.set(context)  # each call has a task of its own, and the thread of a plain method a copy
        if self._method.parameter is None:
            return self.function
        argument = read_call(context.resume.payload).argument
        typed = self._method.typed
        return functools.partial(self.function, argument if typed is None else typed.read(argument, "the argument"))

    def answer(self, value: Any, context: Context) -> Answer:
        match value:
            case None | ActionDone():
                return Done()
            case ActionFailed(message=message):
                return self._again(message, context)
            case _:
                kind = type(value).__name__
                raise TypeError(f"a timed action returns effects.done(), effects.fail() or None, not {kind}")

    def answer_to(self, failure: HandlerFailed, context: Context) -> Answer:
        return self._again(str(failure), context, failure.__cause__)

    def _again(self, error: str, context: Context, cause: BaseException | None = None) -> Answer:
        previous = context.resume.retries_used
        delay_ms = retry_delay_ms(previous)
        context.logger.warning(
            events.ACTION_FAILED,
            action=self.place,
            timer=context.resume.timer["name"],
            previous_attempts=previous,
            again_in_ms=delay_ms,
            error=error,
            exc_info=cause,
        )
        return Retry(delay_ms)
