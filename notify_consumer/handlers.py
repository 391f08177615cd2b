"""Which function gets which resume."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from notify_consumer.resume import Resume

HandlerFunction = Callable[[Resume], Any]
"""Async, or plain (then it runs in a thread of its own). It returns an Answer, or None for done."""

F = TypeVar("F", bound=HandlerFunction)

_LETTERS = re.compile(r"[^\W\d_]{0,64}")


class Handlers:
    """A registry of handlers; the most specific one that matches gets the resume.

    For a lineage timer: flow and node, then flow, then the default. For a named timer: the longest prefix of its
    name (whatever its namespace), then the default. Registering the same place twice raises ValueError.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, str | None], HandlerFunction] = {}
        self._prefixes: dict[str, HandlerFunction] = {}
        self._default: HandlerFunction | None = None

    def flow(self, flow_id: str, node: str | None = None) -> Callable[[F], F]:
        """Register for one node of a flow, or for all its nodes that have no handler of their own."""

        def register(function: F) -> F:
            _put(self._nodes, (flow_id, node), function)
            return function

        return register

    def name(self, prefix: str) -> Callable[[F], F]:
        """Register for named timers whose name begins with ``prefix``; an empty one matches every name."""

        def register(function: F) -> F:
            _put(self._prefixes, prefix, function)
            return function

        return register

    def default(self, function: F) -> F:
        """Register for everything that nothing else matches: ``@handlers.default``, without brackets."""
        if self._default is not None:
            raise ValueError("there is a default handler already")
        self._default = function
        return function

    def find(self, resume: Resume) -> HandlerFunction | None:
        """The handler for ``resume``, None when nothing matches."""
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
        ``order-2`` are one flow and ``report-1`` is another.
        """
        if "flow_id" in resume.timer:
            return f"flow:{resume.timer['flow_id']}"
        name = resume.timer["name"]
        group = self._prefix(name) or _letters(name)
        return f"name:{resume.timer.get('namespace', 'default')}/{group}"

    def _prefix(self, name: str) -> str | None:
        matching = [prefix for prefix in self._prefixes if name.startswith(prefix)]
        return max(matching, key=len, default=None)

    def __len__(self) -> int:
        return len(self._nodes) + len(self._prefixes) + (self._default is not None)


def _put(table: dict[Any, HandlerFunction], place: Any, function: HandlerFunction) -> None:
    if place in table:
        raise ValueError(f"there is a handler for {place!r} already")
    table[place] = function


def _letters(name: str) -> str:
    found = _LETTERS.match(name)
    return found[0] if found else ""
