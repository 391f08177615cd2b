"""Durable sleep: a wait that outlives whoever waits.

The sleeper is the flow engine of its own timer. It reads the state, listens to its subject for the next change, and
when the time has come completes the timer; it needs no notify consumer, and one that is there answers the same. What
is heard is never believed, only looked at: the broker hands a write on before it is stored, or refused. A change may
also go unheard, so there are looks in between: at the due time, after a reconnect, and else less and less often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from timer_service.clock import SystemClock
from timer_service.domain.identity import TimerRef, occurrence_id
from timer_service.domain.model import MAX_DELAY_MS, Phase
from timer_service.errors import BrokerError, CommandRejected, Forbidden, NotStored, SleepInterrupted
from timer_service.wire.sleeps import SLEEP_NAMESPACE, SLEEP_PAYLOAD, SLEEP_SHA256, answer_id

if TYPE_CHECKING:
    from timer_service.client import TimerClient
    from timer_service.wire.records import Outcome

FIRST_LOOK_S = 0.05
MAX_LOOK_S = 60.0
_SEND_AGAIN_S = 5.0
_MAX_SEND_AGAIN_S = 600.0
_MILLISECOND = timedelta(milliseconds=1)

SleepKey = str | Mapping[str, str]
"""A name, which is taken in a namespace of its own (``sleep``), or the key object of any timer."""


def sleep_key(key: SleepKey) -> Mapping[str, str]:
    """The key object of the timer that a sleep on ``key`` waits for."""
    return {"namespace": SLEEP_NAMESPACE, "name": key} if isinstance(key, str) else key


def delay_of(duration: int | timedelta) -> int:
    """A duration in whole milliseconds, fractions rounded up. Raises ValueError outside of 1 ms to 100 years."""
    delay_ms = -(-duration // _MILLISECOND) if isinstance(duration, timedelta) else duration
    if type(delay_ms) is not int or not 1 <= delay_ms <= MAX_DELAY_MS:
        raise ValueError(f"a sleep lasts 1 to {MAX_DELAY_MS} ms (or a timedelta of that), not {duration!r}")
    return delay_ms


class Sleep:
    """One wait for one timer; any number of processes may wait for the same."""

    def __init__(self, client: TimerClient, timer_ref: TimerRef, timer: Mapping[str, str], delay_ms: int) -> None:
        self._client = client
        self._timer_ref = timer_ref
        self._body = {
            "timer": dict(timer),
            "due": {"delay_ms": delay_ms},
            "payload": SLEEP_PAYLOAD,
            "if_exists": "reject",
        }
        self._clock = SystemClock()
        self._changed = asyncio.Event()
        self._starting: asyncio.Task[Outcome | None] | None = None
        self._send_at_s, self._send_again_s = 0.0, _SEND_AGAIN_S
        self._look_s = FIRST_LOOK_S
        self._due_at_ms: int | None = None

    async def over(self) -> None:
        """Return when the time has passed. See ``TimerClient.sleep`` for what is raised."""
        try:
            async with self._client.watching(self._timer_ref, self._changed.set):
                while not await self._look():
                    await self._pause()
        finally:
            await self._forget_start()

    # -- looking ------------------------------------------------------------------------------------------------

    async def _look(self) -> bool:
        """Whether it is over. Starts the timer where there is none; what the broker can't do now is tried again."""
        self._changed.clear()
        settled = self._starting is not None and self._starting.done()  # what is read from here on shows its effect
        try:
            record = await self._client.get(self._timer_ref, payload=False)
            if record is not None and record["payload_sha256"] == SLEEP_SHA256:
                return await self._is_over(record)
        except (BrokerError, NotStored) as error:
            if self._client.closed or isinstance(error.__cause__ or error, Forbidden):
                raise
            return False
        if settled:
            self._check_start(record)
        self._ensure_started()
        return False

    async def _is_over(self, record: dict[str, Any]) -> bool:
        match record["phase"]:
            case Phase.WAITING:
                self._due_at_ms = record["due_at_ms"]
                return False
            case Phase.ELAPSED:
                await self._complete(record["generation"], record["fence"])
                return True
            case Phase.COMPLETED:
                return True
            case ended:
                raise SleepInterrupted(self._timer_ref, ended, record.get("message") or record.get("failure_code"))

    async def _complete(self, generation: int, fence: int) -> None:
        """Stored is enough: another may have completed it before, and no answer would change that it is over."""
        answer = answer_id(occurrence_id(self._timer_ref, generation))
        await self._client.complete(self._timer_ref, generation, fence, command_id=answer, wait=False)

    async def _pause(self) -> None:
        """Until something changes, or it is time to look all the same."""
        wait_s = self._look_s
        self._look_s = min(wait_s * 2, MAX_LOOK_S)
        if self._due_at_ms is not None and 0 <= (left_s := (self._due_at_ms - self._clock.now_ms()) / 1000) <= wait_s:
            wait_s, self._look_s = left_s + FIRST_LOOK_S, FIRST_LOOK_S
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            return
        self._look_s = FIRST_LOOK_S

    # -- the start ----------------------------------------------------------------------------------------------

    def _check_start(self, record: dict[str, Any] | None) -> None:
        """The start was settled, and yet the timer is none of ours: raises when it will never be."""
        assert self._starting is not None
        error = self._starting.exception()
        if isinstance(error, CommandRejected):
            raise error
        outcome = None if error is not None else self._starting.result()
        if outcome is None or record is None:
            return
        if record["generation"] >= (outcome.generation or 0):  # else a replica answered that does not know it yet
            raise SleepInterrupted(self._timer_ref, "replaced", "another timer was started under its key")

    def _ensure_started(self) -> None:
        """Send the start, again and again while there is neither a timer nor a refusal.

        The command_id follows from the timer: however often it is sent, by whomever, it takes effect once.
        """
        now_s = asyncio.get_running_loop().time()
        if self._starting is not None and (not self._starting.done() or now_s < self._send_at_s):
            return
        self._send_at_s = now_s + self._send_again_s
        self._send_again_s = min(self._send_again_s * 2, _MAX_SEND_AGAIN_S)
        send = self._client.send("start", self._body, command_id=f"sleep:{self._timer_ref}")
        self._starting = asyncio.create_task(send, name=f"sleep.{self._timer_ref}")
        self._starting.add_done_callback(self._on_settled)

    def _on_settled(self, task: asyncio.Task[Outcome | None]) -> None:
        if not task.cancelled() and (task.exception() is None or isinstance(task.exception(), CommandRejected)):
            self._changed.set()

    async def _forget_start(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
