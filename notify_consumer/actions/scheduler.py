"""Making, looking for and deleting the timers of timed actions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, Protocol

from notify_consumer.actions.definition import Deferred
from notify_consumer.actions.dispatch import NAMESPACE
from timer_service.domain.model import MAX_DELAY_MS

_MILLISECOND = timedelta(milliseconds=1)


class Timers(Protocol):
    """As much of ``timer_service.client.TimerClient`` as is needed here."""

    async def start(
        self,
        timer: Mapping[str, str],
        *,
        delay_ms: int | None = None,
        payload: Any = None,
        max_retries: int | None = 0,
        if_exists: Literal["reject", "replace"] | None = None,
    ) -> Any: ...

    async def delete(self, timer: Mapping[str, str]) -> bool: ...

    async def get(self, timer: Mapping[str, str], *, payload: bool = True) -> dict[str, Any] | None: ...


class TimerScheduler:
    """Timers that call timed actions. A name (1 to 256 bytes) is one timer; other timers' names are others.

    What the client raises comes through: CommandRejected, OutcomeUnknown, NotStored. Every call may be repeated.
    """

    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    async def create_single_timer(self, name: str, delay: timedelta | int, call: Deferred) -> None:
        """Have ``call`` made once ``delay`` has passed (an int is milliseconds; at least 1, at most 100 years).
        Raises ValueError for another delay.

        A timer of that name is replaced in one step, also one whose call is being made or waits to be repeated:
        the former argument is not tried again.
        """
        if not isinstance(call, Deferred):
            raise TypeError("give Action.method.deferred(argument)")
        await self._timers.start(
            _key(name), delay_ms=_ms(delay), payload=call.payload, max_retries=None, if_exists="replace"
        )

    async def delete(self, name: str) -> bool:
        """Have nothing called any more; returns whether there was such a timer, and none is no error.

        A call that has begun goes on, and is not repeated if it fails.
        """
        return await self._timers.delete(_key(name))

    async def exists(self, name: str) -> bool:
        """Whether a call is to come or being made, or will be repeated should it fail; False once deleted."""
        found = await self._timers.get(_key(name), payload=False)
        return found is not None and "status" not in found and not found.get("cancel_requested", False)


def _key(name: str) -> dict[str, str]:
    return {"namespace": NAMESPACE, "name": name}


def _ms(delay: timedelta | int) -> int:
    """Milliseconds; parts of one round up, so that nothing is early."""
    delay_ms = -(delay // -_MILLISECOND) if isinstance(delay, timedelta) else delay
    if type(delay_ms) is not int or not 1 <= delay_ms <= MAX_DELAY_MS:
        raise ValueError(f"a delay is a timedelta, or milliseconds, of 1 to {MAX_DELAY_MS} ms, not {delay!r}")
    return delay_ms
