"""The timer service without a broker, for tests: the production pieces on ports in memory, in a time of your own.

    async with MemoryService() as service:
        await service.client.start({"name": "tea"}, delay_ms=240_000)
        await service.advance(240_000)
        assert service.resumes.read().due_at_ms == service.clock.now_ms()

Commands are read, decided, stored and answered by the same code as on a real broker, and a client is a ``TimerClient``;
only what keeps and carries is in memory, and the clock stands until ``advance`` moves it. With handlers attached it
is ``notify_consumer.testkit.TimerTestKit``. docs/testing.md tells how to use both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Self

from timer_service.client import TimerClient, TimerName
from timer_service.clock import ManualClock
from timer_service.domain.identity import TimerRef
from timer_service.domain.model import JsonText, Wake
from timer_service.errors import Unavailable
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.topology import command_subject, is_literal_subject, wake_subject
from timer_service.metrics import Metrics
from timer_service.ports import Stored
from timer_service.replica import Ports, Replica, Rules
from timer_service.testing import (
    MemoryArchive,
    MemoryDelivery,
    MemoryPublicity,
    MemoryResumes,
    MemorySnapshots,
    MemoryState,
    MemoryWakes,
)
from timer_service.wire.commands import Kind
from timer_service.wire.records import Outcome, encode_wake

T0_MS = 1_900_000_000_000
PATIENCE_S = 10.0
MAX_PAYLOAD = 2**20
_REPLIES = "_INBOX.memory."
_QUIET_TURNS = 25
_BUSY_TURNS = 200
_MILLISECOND = timedelta(milliseconds=1)


class MemoryService:
    """One timer service and its broker. Use it as an async context manager, from one event loop.

    Nothing happens in the background that takes time: due timers fire, and resumes that nobody answers are repeated,
    when ``advance`` reaches their time. ``state``, ``archive``, ``resumes``, ``publicity`` are the ports of
    ``timer_service.testing``, to look into or to make trouble with.
    """

    def __init__(self, *, now_ms: int = T0_MS, resume_timeout_ms: int = 60_000) -> None:
        self.clock = ManualClock(now_ms)
        self.state, self.archive, self.snapshots = MemoryState(), MemoryArchive(), MemorySnapshots()
        self.resumes, self.wakes, self.publicity = MemoryResumes(), MemoryWakes(), _Publicity(self._on_outcome)
        self.mistakes: list[tuple[str, dict[str, Any]]] = []
        """What the service logged as an error; leaving the context raises when there is any."""
        self._listeners: dict[TimerRef, list[Callable[[], None]]] = {}
        self._clients: list[MemoryClient] = []
        self._seq = 0
        self._unsettled = 0
        self._running: asyncio.Task[None] | None = None
        self.client = self.connect()
        """A client of this service; ``connect`` makes more of them, as other processes would have."""
        rules = Rules(
            allowed_reply=partial(is_literal_subject, prefix=_REPLIES),
            max_payload=lambda: MAX_PAYLOAD,
            resume_timeout_ms=resume_timeout_ms,
        )
        ports = Ports(self.state, self.archive, self.snapshots, self.resumes, self.wakes, self.publicity)
        self._replica = Replica(ports, self.clock, Metrics(), _Log(self.mistakes), rules)
        self.clock.on_shift(self._replica.driver.wake)
        self.state.on_written = self._on_written
        self.wakes.on_wake = self._on_wake

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self._replica.driver.run(), name="memory.driver")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._replica.commands.stop()
        for client in self._clients:
            await client.close()
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        if self.mistakes and kind is None:
            raise AssertionError(f"the timer service logged errors: {self.mistakes}")

    def connect(self) -> TimerClient:
        """Another client of this service; all are closed at the end."""
        made = MemoryClient(self)
        self._clients.append(made)
        return made

    # -- time -------------------------------------------------------------------------------------------------

    async def advance(self, duration: int | timedelta) -> None:
        """Let time pass (milliseconds, or a timedelta): what becomes due happens in order, each at its own time.

        Returns when all that this set off has come to rest: see ``settle``. Raises ValueError when negative.
        """
        by_ms = duration // _MILLISECOND if isinstance(duration, timedelta) else duration
        if by_ms < 0:
            raise ValueError("time never goes back")
        await self.settle()
        end_ms = self.clock.now_ms() + by_ms
        while (at_ms := await self.next_at_ms()) is not None and at_ms <= end_ms:
            await self._to(at_ms)
        await self._to(end_ms)

    async def step(self) -> bool:
        """Go on to the next thing that happens by itself; False, and no time passes, where nothing ever will."""
        await self.settle()
        at_ms = await self.next_at_ms()
        if at_ms is not None:
            await self._to(at_ms)
        return at_ms is not None

    async def _to(self, at_ms: int) -> None:
        self.clock.advance(at_ms - self.clock.now_ms())
        await self.settle()

    async def next_at_ms(self) -> int | None:
        """When something happens next if nobody does anything: a timer is due, or a look at one. None: never."""
        ahead = [armed.at for armed in self._replica.driver.armed()]
        return max(min(ahead), self.clock.now_ms()) if ahead else None

    async def settle(self) -> None:
        """Wait until all that can happen now has happened, code of yours that waits for nothing else included.

        AssertionError when that takes longer than 10 s of real time.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + PATIENCE_S
        turns = quiet = 0
        while quiet < _QUIET_TURNS:
            turns += 1
            await asyncio.sleep(0.001 if turns > _BUSY_TURNS else 0)  # others may work in threads of their own
            quiet = quiet + 1 if await self._rests() else 0
            if loop.time() > end_s:
                raise AssertionError(
                    f"not at rest after {PATIENCE_S:g} s: does a handler wait for something, such as for time to pass?"
                )

    async def _rests(self) -> bool:
        if self._unsettled or len(self._replica.lanes) or await self._others_work():
            return False
        at_ms = await self.next_at_ms()
        return at_ms is None or at_ms > self.clock.now_ms()

    async def _others_work(self) -> bool:
        """Whether whoever reads the resumes has work that needs no time to pass."""
        return False

    async def get(self, timer: TimerName) -> dict[str, Any] | None:
        """The timer as it is stored, else its newest record, else None: see ``TimerClient.get``."""
        return await self.client.get(timer)

    # -- the broker's part --------------------------------------------------------------------------------------

    def publish(self, kind: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Store a command, as any publisher may."""
        self._deliver(self._replica.commands.handle, command_subject(kind), data, headers or {})

    def _on_wake(self, wake: Wake) -> None:
        self._deliver(self._replica.wakes.handle, wake_subject(wake.timer_ref), encode_wake(wake), {})

    def _deliver(self, handle: Callable[[Any], None], subject: str, data: bytes, headers: dict[str, str]) -> None:
        self._seq += 1
        self._hand_over(handle, subject, data, headers, self._seq, self.clock.now_ms())

    def _hand_over(
        self, handle: Callable[[Any], None], subject: str, data: bytes, headers: dict[str, str], seq: int, at_ms: int
    ) -> None:
        def settled(delivery: MemoryDelivery) -> None:
            self._unsettled -= 1
            if delivery.answers[-1] == "nak":  # given back: again at once, its delay is by no clock of ours
                self._hand_over(handle, subject, data, headers, seq, at_ms)

        self._unsettled += 1
        delivery = MemoryDelivery(subject, data, seq=seq, stored_at_ms=at_ms, headers=headers, on_settled=settled)
        asyncio.get_running_loop().call_soon(handle, delivery)

    def _on_written(self, timer_ref: TimerRef, _: int) -> None:
        for listener in list(self._listeners.get(timer_ref, ())):
            listener()

    def _on_outcome(self, reply_to: str, outcome: Outcome) -> None:
        for client in self._clients:
            client.told(reply_to, outcome)

    @contextlib.contextmanager
    def listening(self, timer_ref: TimerRef, listener: Callable[[], None]) -> Iterator[None]:
        """Within the block ``listener`` is called after each write of this timer."""
        self._listeners.setdefault(timer_ref, []).append(listener)
        try:
            yield
        finally:
            self._listeners[timer_ref].remove(listener)


class MemoryClient(TimerClient):
    """A ``TimerClient`` of a ``MemoryService``. A cancel never waits for a start: there is none on its way."""

    def __init__(self, service: MemoryService) -> None:
        super().__init__(Connection("memory", name="testkit"))
        self._service = service
        self._inbox = f"{_REPLIES}{id(self)}"
        self._sleeping: list[Callable[[], None]] = []
        self._closed = False

    async def open(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Calls that are under way end with the same errors as on a broker."""
        self._closed = True
        self._give_up()
        for listener in list(self._sleeping):
            listener()

    @property
    def closed(self) -> bool:
        return self._closed

    async def cancel(self, *args: Any, **options: Any) -> Outcome | None:
        return await super().cancel(*args, **{**options, "wait_ms": 0})

    def told(self, reply_to: str, outcome: Outcome) -> None:
        """An outcome was published."""
        future = self._waiting.pop(reply_to, None)
        if future is not None and not future.done():
            future.set_result(outcome)

    async def _store(self, kind: Kind, data: bytes, headers: dict[str, str]) -> None:
        if self._closed:
            raise Unavailable("the client is closed")
        self._service.publish(kind, data, headers)

    async def _stored(self, timer_ref: TimerRef) -> Stored:
        if self._closed:
            raise Unavailable("the client is closed")
        live = self._service.state.peek(timer_ref)
        return live if live.timer is not None else await self._service.archive.last(timer_ref)

    async def _payload(self, seq: int) -> JsonText:
        return await self._service.snapshots.get(seq)

    @contextlib.asynccontextmanager
    async def watching(self, timer_ref: TimerRef, listener: Callable[[], None]) -> AsyncIterator[None]:
        self._sleeping.append(listener)
        with self._service.listening(timer_ref, listener):
            try:
                yield
            finally:
                self._sleeping.remove(listener)


class _Publicity(MemoryPublicity):
    """Tells publishers at once, and remembers."""

    def __init__(self, on_outcome: Callable[[str, Outcome], None]) -> None:
        super().__init__()
        self._on_outcome = on_outcome

    async def outcome(self, reply_to: str, outcome: Outcome) -> None:
        await super().outcome(reply_to, outcome)
        self._on_outcome(reply_to, outcome)


class _Log:
    """Keeps what is logged as a mistake of the service; everything else is nobody's concern here."""

    def __init__(self, mistakes: list[tuple[str, dict[str, Any]]]) -> None:
        self._mistakes = mistakes

    def debug(self, *_: Any, **__: Any) -> None: ...
    def info(self, *_: Any, **__: Any) -> None: ...
    def warning(self, *_: Any, **__: Any) -> None: ...

    def error(self, event: str, **data: Any) -> None:
        self._mistakes.append((event, data))

    exception = error
