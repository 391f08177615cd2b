"""Which function gets which resume."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar, overload

from notify_consumer.actions.definition import TimedAction
from notify_consumer.actions.dispatch import ActionTable, is_timed_action
from notify_consumer.handler import Handler, HandlerFunction
from notify_consumer.resume import Resume
from timer_service.wire.sleeps import SLEEP_SHA256

F = TypeVar("F", bound=HandlerFunction)

_LETTERS = re.compile(r"[^\W\d_]{0,64}")


class Handlers:
    """A registry of handlers; the most specific one that matches gets the resume.

    For a lineage timer: flow and node, then flow, then the default. For a named timer: the longest prefix of its
    name (whatever its namespace), then the default. The timers of timed actions have a namespace of their own and
    go to their actions only. What a function's signature may ask for is told in ``notify_consumer.handler``.

    Registering the same place twice raises ValueError, and so does a signature that can't be used. With
    ``timeout_ms`` a call that takes longer is cancelled and counts as a failed hand-off; async functions only.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, str | None], Handler] = {}
        self._prefixes: dict[str, Handler] = {}
        self._default: Handler | None = None
        self._actions = ActionTable()

    def flow(self, flow_id: str, node: str | None = None, *, timeout_ms: int | None = None) -> Callable[[F], F]:
        """Register for one node of a flow, or for all its nodes that have no handler of their own."""

        def register(function: F) -> F:
            _put(self._nodes, (flow_id, node), Handler(function, timeout_ms=timeout_ms))
            return function

        return register

    def name(self, prefix: str, *, timeout_ms: int | None = None) -> Callable[[F], F]:
        """Register for named timers whose name begins with ``prefix``; an empty one matches every name."""

        def register(function: F) -> F:
            _put(self._prefixes, prefix, Handler(function, timeout_ms=timeout_ms))
            return function

        return register

    @overload
    def default(self, function: F) -> F: ...

    @overload
    def default(self, *, timeout_ms: int | None = None) -> Callable[[F], F]: ...

    def default(self, function: F | None = None, *, timeout_ms: int | None = None) -> F | Callable[[F], F]:
        """Register for everything that nothing else matches: ``@handlers.default``, with or without brackets."""

        def register(function: F) -> F:
            if self._default is not None:
                raise ValueError("there is a default handler already")
            self._default = Handler(function, timeout_ms=timeout_ms)
            return function

        return register if function is None else register(function)

    def actions(self, *actions: TimedAction) -> None:
        """Register timed actions; two under one name raise ValueError. One object serves all calls of its class."""
        for action in actions:
            self._actions.add(action)

    def find(self, resume: Resume) -> Handler | None:
        """The handler for ``resume``, None when nothing matches.

        Raises HandoffRefused for a timed action that is not registered, or whose payload can't be read.
        """
        if resume.payload_sha256 == SLEEP_SHA256:
            return _SLEPT
        if is_timed_action(resume):
            return self._actions.find(resume)
        if "flow_id" in resume.timer:
            flow_id, node = resume.timer["flow_id"], resume.timer.get("node_id")
            found = self._nodes.get((flow_id, node)) or self._nodes.get((flow_id, None))
        else:
            prefix = self._prefix(resume.timer["name"])
            found = None if prefix is None else self._prefixes[prefix]
        return found or self._default

    def flow_of(self, resume: Resume) -> str:
        """The share that ``resume`` counts against: a flow that is slow or fails takes at most its own.

        A lineage timer belongs to its flow. A named one belongs, within its namespace, to the prefix that its
        handler is registered for; without one to the letters that its name begins with, so that ``order-1`` and
        ``order-2`` are one flow and ``report-1`` is another. Each handler of a timed action is a flow of its own.
        """
        if resume.payload_sha256 == SLEEP_SHA256:
            return "sleep"
        if is_timed_action(resume):
            return self._actions.flow_of(resume)
        if "flow_id" in resume.timer:
            return f"flow:{resume.timer['flow_id']}"
        name = resume.timer["name"]
        group = self._prefix(name) or _letters(name)
        return f"name:{resume.timer.get('namespace', 'default')}/{group}"

    def _prefix(self, name: str) -> str | None:
        matching = [prefix for prefix in self._prefixes if name.startswith(prefix)]
        return max(matching, key=len, default=None)

    def __len__(self) -> int:
        return len(self._nodes) + len(self._prefixes) + (self._default is not None) + len(self._actions)


async def _slept(_: Resume) -> None:
    """A durable sleep (``TimerClient.sleep``) is nobody's to handle: whoever sleeps looks at the timer itself."""


_SLEPT = Handler(_slept)


def _put(table: dict[Any, Handler], place: Any, handler: Handler) -> None:
    if place in table:
        raise ValueError(f"there is a handler for {place!r} already")
    table[place] = handler


def _letters(name: str) -> str:
    found = _LETTERS.match(name)
    return found[0] if found else ""
