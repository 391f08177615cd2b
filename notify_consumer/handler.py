"""A registered function: what its signature asks for is read once, and filled in at every call.

The rule, checked at registration:

- the first parameter gets the Resume;
- one more may be annotated ``Context``, and one more with the type that the payload must have: a pydantic model,
  a dataclass, a TypedDict, or anything else that pydantic can validate; their names and order are free;
- parameters with a default belong to the function, and are never filled in (so ``functools.partial`` works).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from notify_consumer.answers import Answer, Done, Fail, Retry
from notify_consumer.context import Context
from notify_consumer.errors import HandlerFailed, HandoffRefused
from notify_consumer.resume import Resume
from timer_service.wire.canonical import exact_json

HandlerFunction = Callable[..., Any]
"""Async, or plain (then it runs in a thread of its own). It returns an Answer, or None for done."""

MAX_TIMEOUT_MS = 86_400_000
_MISTAKES_SHOWN = 5
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_FILLED_FIRST = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
UNRESOLVED = object()
"""The annotation of a parameter whose text means nothing in its module."""


class Handler:
    """A function and how it is called. Raises ValueError when its signature or the time-out can't be used.

    With ``timeout_ms`` a call that takes longer is cancelled and counts as failed. That is for async functions
    only: a function in a thread can't be cancelled.
    """

    def __init__(self, function: HandlerFunction, *, timeout_ms: int | None = None) -> None:
        self.function = function
        self.name = str(getattr(function, "__qualname__", function))
        self.is_async = _is_async(function)
        self.timeout_ms = timeout_ms
        _check_timeout(self)
        self._wanted = self._wanted_parameters()

    def bind(self, context: Context) -> Callable[[], Any]:
        """The function with its arguments. Raises HandoffRefused when the payload is not of its type."""
        given: list[Any] = [context.resume]
        named: dict[str, Any] = {}
        for parameter, wanted in self._wanted:
            value = context if wanted is None else wanted.read(context.resume.payload, "the payload")
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                named[parameter.name] = value
            else:
                given.append(value)
        return functools.partial(self.function, *given, **named)

    def answer(self, value: Any, context: Context) -> Answer:  # noqa: ARG002 - for those who answer in another way
        """What the function's return value means. Raises TypeError when it means nothing."""
        if value is None:
            return Done()
        if isinstance(value, Done | Retry | Fail):
            return value
        raise TypeError(f"a handler returns done(), retry(), fail() or None, not {type(value).__name__}")

    def answer_to(self, failure: HandlerFailed, context: Context) -> Answer | None:  # noqa: ARG002
        """What a failed call means to the timer; None: nothing, the resume is handed off again."""
        return None

    def _wanted_parameters(self) -> list[tuple[inspect.Parameter, Typed | None]]:
        """The parameters after the first that are filled in: None stands for the context."""
        parameters = _parameters(self.function)
        if not parameters or parameters[0].kind not in _FILLED_FIRST:
            raise ValueError(f"{self.name}: a handler's first parameter gets the Resume, and there is none")
        self._check_first(parameters[0])
        found: list[tuple[inspect.Parameter, Typed | None]] = []
        for parameter in parameters[1:]:
            if parameter.kind not in _VARIADIC:
                found += self._wanted_parameter(parameter)
        for what, count in (("Context", sum(w is None for _, w in found)), ("payload", sum(bool(w) for _, w in found))):
            if count > 1:
                raise ValueError(f"{self.name}: there is more than one {what} parameter")
        return found

    def _check_first(self, parameter: inspect.Parameter) -> None:
        annotation = annotation_of(self.function, parameter)
        if not _takes_resume(annotation):
            raise ValueError(f"{self.name}: the first parameter gets the Resume, and {parameter.name} is not one")

    def _wanted_parameter(self, parameter: inspect.Parameter) -> list[tuple[inspect.Parameter, Typed | None]]:
        annotation = annotation_of(self.function, parameter)
        has_default = parameter.default is not parameter.empty
        if has_default and (annotation is Context or Context in get_args(annotation)):
            raise ValueError(f"{self.name}: {parameter.name} has a default, so it would not get the Context")
        if has_default:
            return []
        if annotation is parameter.empty:
            raise ValueError(f"{self.name}: annotate {parameter.name}, with Context or with the type of the payload")
        if annotation is UNRESOLVED:
            text = f"{parameter.annotation} is not defined at the top of its module"
            raise ValueError(f"{self.name}: {parameter.name}: {text}")
        wanted = None if annotation is Context else Typed(annotation, f"{self.name}: {parameter.name}")
        return [(parameter, wanted)]


class Typed:
    """A type that JSON values are validated against. Raises ValueError when pydantic can't."""

    def __init__(self, annotation: Any, where: str) -> None:
        self._shown = getattr(annotation, "__name__", str(annotation))
        try:
            self.adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        except (PydanticUserError, NameError, TypeError) as error:
            raise ValueError(f"{where}: pydantic can't validate {self._shown}: {_first_line(error)}") from None

    def read(self, value: Any, what: str) -> Any:
        """``value`` as that type. Raises HandoffRefused with what is wrong; the value itself is not repeated."""
        try:
            return self.adapter.validate_json(exact_json(value))
        except ValidationError as error:
            raise HandoffRefused(f"{what} is not of type {self._shown}: {mistakes(error)}") from None


def mistakes(error: ValidationError) -> str:
    """What a ValidationError found, in one line and without the values."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [_mistake(each["loc"], each["msg"]) for each in found[:_MISTAKES_SHOWN]]
    more = len(found) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _mistake(place: tuple[int | str, ...], text: str) -> str:
    return f"{'.'.join(map(str, place))}: {text}" if place else text


def annotation_of(function: HandlerFunction, parameter: inspect.Parameter) -> Any:
    """The annotation of a parameter, evaluated where it is text: only this one, so that others may be anything."""
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    try:
        return eval(parameter.annotation, _globals_of(function))  # noqa: S307 - the text is the program's own
    except Exception:
        return UNRESOLVED


def _globals_of(function: Any) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__globals__"):
        function = getattr(type(function), "__call__", function)  # noqa: B004 - the function behind an object
    found: dict[str, Any] = getattr(function, "__globals__", {})
    return found


def _parameters(function: HandlerFunction) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # some built-in functions do not say
        return [inspect.Parameter("resume", inspect.Parameter.POSITIONAL_ONLY)]


def _takes_resume(annotation: Any) -> bool:
    if annotation in (inspect.Parameter.empty, Any) or not isinstance(annotation, type):
        return True
    try:
        return issubclass(Resume, annotation)
    except TypeError:  # a protocol with fields
        return True


def _check_timeout(handler: Handler) -> None:
    timeout_ms = handler.timeout_ms
    if timeout_ms is None:
        return
    if type(timeout_ms) is not int or not 1 <= timeout_ms <= MAX_TIMEOUT_MS:
        raise ValueError(f"timeout_ms is an integer from 1 to {MAX_TIMEOUT_MS}, not {timeout_ms!r}")
    if not handler.is_async:
        raise ValueError(
            f"{handler.name} runs in a thread, which can't be cancelled: timeout_ms needs an async function"
        )


def _is_async(function: HandlerFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
