"""How a timed action is written, and a call of one of its methods put off till later."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar, Concatenate, Final, Generic, ParamSpec, TypeVar, overload

import msgspec
from pydantic import ValidationError

from notify_consumer.context import Context
from notify_consumer.handler import UNRESOLVED, Typed, annotation_of, mistakes
from timer_service.wire.canonical import MalformedJson, exact_json, strict_loads

VERSION: Final = 1
MAX_ARGUMENT_BYTES: Final = 1024
_NAME_CHARS: Final = 128

S = TypeVar("S", bound="TimedAction")
P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[S, P], R]

current: ContextVar[Context] = ContextVar("timed_action")
"""The call under way, in its task or thread."""


class ActionDone(msgspec.Struct, frozen=True):
    """The timer completes."""


class ActionFailed(msgspec.Struct, frozen=True):
    """The method is to be called again; ``message`` goes into the log."""

    message: str

    def __post_init__(self) -> None:
        if type(self.message) is not str:
            raise TypeError(f"the message of a failure is a str, not {type(self.message).__name__}")


Effect = ActionDone | ActionFailed


class Effects:
    """What a method of a timed action may return."""

    def done(self) -> Effect:
        """It is done, or there was nothing to do. Returning None means the same."""
        return ActionDone()

    def fail(self, message: str) -> Effect:
        """It did not work: call it again, after 3 s doubling to 30 s. Raising an exception means the same."""
        return ActionFailed(message)


effects: Final = Effects()


class TimedAction:
    """The base of classes whose ``@action`` methods are called by timers.

    ``name`` is what waiting timers know the class by (the name of the class unless given): keep it when you rename
    the class. One object serves all calls, also at the same time, so what belongs to a single call is not kept in
    attributes of your own.
    """

    name: ClassVar[str]
    effects: ClassVar[Effects] = effects

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__
        _check_name("the name of a timed action", cls.name)

    @property
    def context(self) -> Context:
        """The call under way: attempt, logger, deadline. Raises RuntimeError outside of one."""
        try:
            return current.get()
        except LookupError:
            raise RuntimeError("no timer is calling; in tests use TimedActionTestKit") from None

    @property
    def timer_name(self) -> str:
        """The name of the timer that calls."""
        return self.context.resume.timer["name"]

    @property
    def previous_attempts(self) -> int:
        """How often this timer's call has failed before: 0 at first. A replaced timer starts anew."""
        return self.context.resume.retries_used


class Deferred(msgspec.Struct, frozen=True):
    """A call that is put off: which method of which action, and its argument as JSON."""

    action: str
    handler: str
    argument: bytes

    @property
    def payload(self) -> dict[str, Any]:
        """What the timer carries."""
        argument = strict_loads(self.argument)
        return {"v": VERSION, "action": self.action, "handler": self.handler, "argument": argument}


class BoundAction(Generic[P]):
    """An ``@action`` method, named through its class: ``OrderTimers.expire``."""

    def __init__(self, owner: type[TimedAction], method: ActionMethod[Any, P, Any]) -> None:
        self._owner = owner
        self._method = method

    def deferred(self, *args: P.args, **kwargs: P.kwargs) -> Deferred:
        """The call with this argument. Raises TypeError for other arguments than the method takes, ValueError for
        one of another type, one that is not JSON, and one of more than 1,024 bytes (its JSON, in UTF-8)."""
        return Deferred(self._owner.name, self._method.name, self._method.encoded(*args, **kwargs))


class ActionMethod(Generic[S, P, R]):
    """What ``@action`` makes of a method: through an object it is that method, through the class it can be deferred."""

    def __init__(self, name: str, function: Method[S, P, R], timeout_ms: int | None) -> None:
        self.name = name
        self.function = function
        self.timeout_ms = timeout_ms
        self.parameter, self.typed = _argument(function)

    @overload
    def __get__(self, instance: None, owner: type[S]) -> BoundAction[P]: ...

    @overload
    def __get__(self, instance: S, owner: type[S]) -> Callable[P, R]: ...

    def __get__(self, instance: S | None, owner: type[S]) -> BoundAction[P] | Callable[P, R]:
        if instance is None:
            return BoundAction(owner, self)
        method: Callable[P, R] = self.function.__get__(instance, owner)
        return method

    def encoded(self, *args: Any, **kwargs: Any) -> bytes:
        """The JSON of the one argument, null where the method takes none."""
        bound = inspect.signature(self.function).bind(None, *args, **kwargs)
        bound.apply_defaults()
        value = None if self.parameter is None else bound.arguments[self.parameter.name]
        return _limited(self._json(value))

    def _json(self, value: Any) -> bytes:
        try:
            if self.typed is not None:
                adapter = self.typed.adapter
                value = adapter.dump_python(adapter.validate_python(value), mode="json", by_alias=True)
            return exact_json(value)
        except ValidationError as error:
            raise ValueError(f"the argument of {self.name!r} is not what it takes: {mistakes(error)}") from None
        except MalformedJson as error:
            raise ValueError(f"the argument of {self.name!r} is not JSON: {error}") from None


def action(name: str, *, timeout_ms: int | None = None) -> Callable[[Method[S, P, R]], ActionMethod[S, P, R]]:
    """Let timers call this method, async or plain, under ``name``: its name in waiting timers.

    It takes one argument or none, of any JSON value or of the type in its annotation. With ``timeout_ms`` (async
    methods only) a call that takes longer is cancelled and has failed. Raises ValueError for what can't be used.
    """
    _check_name("the name of an action", name)

    def decorate(function: Method[S, P, R]) -> ActionMethod[S, P, R]:
        return ActionMethod(name, function, timeout_ms)

    return decorate


def methods_of(cls: type[TimedAction]) -> dict[str, ActionMethod[Any, Any, Any]]:
    """The ``@action`` methods of a class by their names. Raises ValueError when two have the same."""
    found: dict[str, ActionMethod[Any, Any, Any]] = {}
    for attribute in dir(cls):
        method = inspect.getattr_static(cls, attribute)
        if not isinstance(method, ActionMethod):
            continue
        if method.name in found:
            raise ValueError(f"{cls.__name__} has two actions named {method.name!r}")
        found[method.name] = method
    return found


def _argument(function: Callable[..., Any]) -> tuple[inspect.Parameter | None, Typed | None]:
    """The parameter after ``self``, and its type when it has one."""
    where = getattr(function, "__qualname__", str(function))
    bare = isinstance(function, (staticmethod, classmethod))
    parameters = [] if bare else list(inspect.signature(function).parameters.values())
    if not parameters:
        raise ValueError(f"{where}: an action is a method with self")
    del parameters[0]
    single = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) > 1 or any(parameter.kind not in single for parameter in parameters):
        raise ValueError(f"{where}: an action takes one argument or none; put several into one object")
    if not parameters:
        return None, None
    annotation = annotation_of(function, parameters[0])
    if annotation is UNRESOLVED:
        raise ValueError(f"{where}: {parameters[0].annotation} is not defined at the top of its module")
    untyped = annotation in (inspect.Parameter.empty, Any)
    return parameters[0], None if untyped else Typed(annotation, f"{where}: {parameters[0].name}")


def _limited(text: bytes) -> bytes:
    if len(text) > MAX_ARGUMENT_BYTES:
        hint = "give an id, and have the method read the rest"
        raise ValueError(f"the argument has {len(text)} bytes of JSON; {MAX_ARGUMENT_BYTES} is the most: {hint}")
    return text


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= _NAME_CHARS:
        raise ValueError(f"{what} has 1 to {_NAME_CHARS} printable characters, not {name!r}")
