"""The whole ring in memory: replicas of the service on one broker that is none, in a time that takes no time.

``play(story)`` runs a coroutine on an event loop whose clock jumps to the next thing to happen, so that back-offs,
waits and due times cost nothing. ``Ring`` keeps what the broker would keep: it delivers each command until it is
acknowledged, hands wakes on, and feeds every change of the state to all replicas.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

from timer_service.domain.identity import TimerRef
from timer_service.errors import BrokerError
from timer_service.jetstream.topology import is_literal_subject, state_subject, wake_subject
from timer_service.metrics import Metrics
from timer_service.ports import Schedule, StreamState
from timer_service.replica import Ports, Replica, Rules
from timer_service.runtime.feed import Feed
from timer_service.runtime.native import NativeWaits
from timer_service.runtime.reconciler import Reconciler
from timer_service.testing import (
    MemoryArchive,
    MemoryDelivery,
    MemoryPublicity,
    MemoryResumes,
    MemorySchedules,
    MemorySnapshots,
    MemoryState,
    MemoryWakes,
)
from timer_service.wire.records import Outcome, Resume, encode_wake

T = TypeVar("T")
T0_MS = 1_700_000_000_000
ACK_WAIT_S = 5.0


class _JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock stands while code runs, and jumps over every wait: a slow machine changes no outcome."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = self._scheduled  # type: ignore[attr-defined]
            live = (timer.when() for timer in timers if not timer.cancelled())  # a cancelled one would be waited for
            self._now = max(self._now, min(live, default=0.0))
        super()._run_once()  # type: ignore[misc]


def play(story: Coroutine[Any, Any, T]) -> T:
    """Run ``story`` to its end; waiting is free."""
    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        return runner.run(story)


class LoopClock:
    """Epoch milliseconds by the loop's clock."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._zero = self._loop.time()

    def now_ms(self) -> int:
        return T0_MS + round((self._loop.time() - self._zero) * 1000)


class Log:
    """Keeps what was logged as a mistake."""

    def __init__(self) -> None:
        self.mistakes: list[tuple[Any, ...]] = []

    def debug(self, *_: Any, **__: Any) -> None: ...
    def info(self, *_: Any, **__: Any) -> None: ...
    def warning(self, *_: Any, **__: Any) -> None: ...

    def error(self, event: str, **data: Any) -> None:
        if event != "state.unreadable":
            self.mistakes.append((event, data))

    def exception(self, event: str, **data: Any) -> None:
        self.mistakes.append((event, data))


class Change:
    """A state message as the stream would deliver it."""

    def __init__(self, timer_ref: TimerRef, value: tuple[bytes, bool, int]) -> None:
        self.subject = state_subject(timer_ref)
        self.data, removed, self.seq = value
        self.headers = {"KV-Operation": "PURGE"} if removed else None


class _Follower:
    def __init__(self, ring: Ring, on_message: Any, on_caught_up: Callable[[], None], after_seq: int) -> None:
        self._ring, self._on_message, self._on_caught_up = ring, on_message, on_caught_up
        self.last_seq = after_seq
        self.caught_up = False
        self.healthy = True

    async def start(self) -> None:
        standing = sorted(self._ring.state._values.items(), key=lambda item: item[1][2])
        for timer_ref, value in standing:
            if value[2] > self.last_seq:
                self.take(timer_ref, value)
        self._ring.followers.append(self)
        self.caught_up = True
        self._on_caught_up()

    def take(self, timer_ref: TimerRef, value: tuple[bytes, bool, int]) -> None:
        self.last_seq = value[2]
        self._on_message(Change(timer_ref, value))

    async def stop(self) -> None:
        if self in self._ring.followers:
            self._ring.followers.remove(self)


class _Sweeper:
    async def sweep(self, referred: set[int], spared: set[TimerRef], grace_ms: int) -> int:
        return 0


class Process:
    """One service process."""

    def __init__(self, ring: Ring, **settings: Any) -> None:
        clock, log, metrics = ring.clock, ring.log, Metrics()
        self._ring = ring
        ports = Ports(ring.state, ring.archive, ring.snapshots, ring.resumes, ring.wakes, ring.publicity)
        rules = Rules(
            allowed_reply=lambda subject: is_literal_subject(subject, "_INBOX."),
            max_payload=lambda: settings.get("max_payload", 2**20),
            resume_timeout_ms=settings.get("resume_timeout_ms", 60_000),
            inline_payload_max_bytes=settings.get("inline_payload_max_bytes", 1024),
            markers_ms=settings.get("markers_ms", 3_600_000),
        )
        replica = Replica(ports, clock, metrics, log, rules)
        self.metrics, self.problems, self.archived, self.lanes = (
            metrics,
            replica.problems,
            replica.archived,
            replica.lanes,
        )
        self.driver, self.admission, self.commands, self.wakes = (
            replica.driver, replica.admission, replica.commands, replica.wakes,
        )  # fmt: skip
        self.native: NativeWaits | None = None
        if settings.get("native"):
            self.native = NativeWaits(
                clock, self.driver, ring.schedules, ring.wakes, ring.state, metrics, log, interval_ms=3_600_000
            )
        self.feed = Feed(
            self._follow, self.driver, replica.recent, self.archived, self.problems, metrics, log, now_ms=clock.now_ms
        )
        self.feed.entry_arrived = self.commands.entry_arrived
        self.reconciler = Reconciler(
            clock, self.feed, self.driver, self.lanes, replica.resumes, self.problems, _Sweeper(), ring.look, metrics,
            log, interval_ms=3_600_000, snapshot_grace_ms=600_000,
        )  # fmt: skip
        self._tasks: list[asyncio.Task[None]] = []

    def _follow(self, on_message: Any, on_caught_up: Callable[[], None], after_seq: int) -> _Follower:
        return _Follower(self._ring, on_message, on_caught_up, after_seq)

    async def start(self) -> None:
        for timer_ref in self._ring.archive._records:
            self.archived.add(timer_ref)
        self.archived.complete = True
        await self.feed.start()
        self._tasks = [asyncio.create_task(self.driver.run()), asyncio.create_task(self.reconciler.run())]
        if self.native is not None:
            self._tasks.append(asyncio.create_task(self.native.run(self.feed.ready)))

    def crashed(self) -> list[BaseException]:
        """What ended a part of it that should run for ever."""
        ended = [task for task in self._tasks if task.done() and not task.cancelled()]
        return [task.exception() or RuntimeError("it returned") for task in ended]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.commands.stop()
        await self.feed.stop()


class Ring:
    """The broker's side, and as many replicas as wanted. Use it as an async context manager, within ``play``."""

    def __init__(self, replicas: int = 1, **settings: Any) -> None:
        self.clock, self.log = LoopClock(), Log()
        self.state, self.archive, self.snapshots = MemoryState(), MemoryArchive(), MemorySnapshots()
        self.resumes, self.wakes, self.publicity = MemoryResumes(), MemoryWakes(), MemoryPublicity()
        self.schedules = MemorySchedules()
        self.followers: list[_Follower] = []
        self.queued: dict[int, tuple[str, bytes, dict[str, str], int]] = {}
        """Commands that are not acknowledged, by stream sequence."""
        self.deliveries: Counter[int] = Counter()
        self.wakes_unsettled = 0
        self.fired: list[tuple[TimerRef, int]] = []
        """Occurrences that the broker woke by a schedule."""
        self.lose_acks = False
        """The broker does not hear acknowledgements: it will deliver again."""
        self.fences: dict[TimerRef, list[tuple[int, int]]] = {}
        """(generation, fence) of each write of a timer, in order."""
        self.replicas = [Process(self, **settings) for _ in range(replicas)]
        self._turn = count()
        self._seq = 0
        self.state.on_written = self._on_written
        self.wakes.on_wake = lambda wake: self.wake(encode_wake(wake))
        self.schedules.on_put = self._on_scheduled

    async def __aenter__(self) -> Ring:
        for replica in self.replicas:
            await replica.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for replica in self.replicas:
            await replica.stop()

    async def look(self) -> StreamState:
        return StreamState("now", self.state._seq, len(self.state._values))

    # -- the broker's part ----------------------------------------------------------------------------------

    def _on_written(self, timer_ref: TimerRef, revision: int) -> None:
        value = self.state._values[timer_ref]
        try:
            said = json.loads(value[0])
            self.fences.setdefault(timer_ref, []).append((said["generation"], said["fence"]))
        except (ValueError, KeyError, TypeError):
            pass  # written by hand
        loop = asyncio.get_running_loop()
        for follower in self.followers:
            loop.call_soon(follower.take, timer_ref, value)

    def _on_scheduled(self, timer_ref: TimerRef, schedule: Schedule) -> None:
        """As a broker: not within 250 ms, and only what still stands then."""
        loop = asyncio.get_running_loop()

        def fire() -> None:
            wake = self.schedules.fire(timer_ref, schedule.seq)
            if wake is not None:
                self.fired.append((timer_ref, schedule.generation))
                self.wake(wake)

        loop.call_later(max(0.25, (schedule.at_ms - self.clock.now_ms()) / 1000), fire)

    def wake(self, data: bytes) -> None:
        """Store a wake, whatever it says."""
        self.wakes_unsettled += 1
        delivery = MemoryDelivery(
            wake_subject("a" * 26), data, seq=1, stored_at_ms=self.clock.now_ms(), on_settled=self._on_wake_settled
        )
        asyncio.get_running_loop().call_soon(self._next().wakes.handle, delivery)

    def _on_wake_settled(self, _: MemoryDelivery) -> None:
        self.wakes_unsettled -= 1

    def publish(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> int:
        """Store a command; returns its sequence. Its outcome goes to ``_INBOX.<sequence>`` unless headers are given."""
        self._seq += 1
        seq = self._seq
        given = {"Durable-Timer-Reply": f"_INBOX.{seq}"} if headers is None else headers
        self.queued[seq] = (subject, data, given, self.clock.now_ms())
        self.deliver(seq)
        return seq

    def send(self, kind: str, /, **body: Any) -> int:
        """Store a command of these fields; ``v`` and ``command_id`` are filled in."""
        fields = {"v": 1, "command_id": f"c-{self._seq + 1}", **body}
        return self.publish(f"durable_timer.commands.{kind}.v1", json.dumps(fields).encode())

    def deliver(self, seq: int) -> None:
        """Deliver a command that is queued (again)."""
        subject, data, headers, stored_at_ms = self.queued[seq]
        self.deliveries[seq] += 1
        delivery = MemoryDelivery(
            subject, data, seq=seq, stored_at_ms=stored_at_ms, headers=headers, on_settled=self._on_settled
        )
        asyncio.get_running_loop().call_soon(self._next().commands.handle, delivery)

    def _on_settled(self, delivery: MemoryDelivery) -> None:
        loop = asyncio.get_running_loop()
        if delivery.answers[-1] == "nak":
            loop.call_later((delivery.nak_delay_ms or 0) / 1000, self._again, delivery.seq)
        elif self.lose_acks:
            loop.call_later(ACK_WAIT_S, self._again, delivery.seq)
        else:
            self.queued.pop(delivery.seq, None)

    def _again(self, seq: int) -> None:
        if seq in self.queued:
            self.deliver(seq)

    def _next(self) -> Process:
        return self.replicas[next(self._turn) % len(self.replicas)]

    # -- a stranger's view -----------------------------------------------------------------------------------

    def outcomes(self, seq: int) -> list[Outcome]:
        """What the publisher of a command was told."""
        return [outcome for reply_to, outcome in self.publicity.outcomes if reply_to == f"_INBOX.{seq}"]

    async def ask(self, kind: str, /, **body: Any) -> Outcome:
        """Store a command and wait for its first outcome."""
        seq = self.send(kind, **body)
        await self.until(lambda: self.outcomes(seq), f"the outcome of {kind}")
        return self.outcomes(seq)[0]

    async def until(self, look: Callable[[], Any], what: str, within_s: float = 600.0) -> Any:
        """Let time pass until ``look`` answers."""
        loop, step_s = asyncio.get_running_loop(), 0.001
        end = loop.time() + within_s
        while not (seen := look()):
            assert loop.time() < end, f"never came: {what}; {self._under_way()}"
            await asyncio.sleep(step_s)
            step_s = min(step_s * 1.3, 0.5)
        return seen

    async def resume(self, timer_ref: TimerRef, generation: int) -> Resume:
        """Read resumes until that of this occurrence comes."""

        def look() -> Resume | None:
            while (resume := self.resumes.read()) is not None:
                if (resume.timer_ref, resume.generation) == (timer_ref, generation):
                    return resume
            return None

        return await self.until(look, f"the resume {timer_ref}.{generation}")  # type: ignore[no-any-return]

    async def settle(self, within_s: float = 120.0) -> None:
        """Wait until no command is queued, no wake under way and no ended timer left in the state."""

        def quiet() -> bool:
            return not any(self._under_way().values())

        await self.until(quiet, "rest", within_s)

    def _under_way(self) -> dict[str, Any]:
        return {
            "queued": list(self.queued),
            "wakes": self.wakes_unsettled,
            "lanes": sum(len(replica.lanes) for replica in self.replicas),
            "ended": self._ended_entries(),
            "mistakes": self.log.mistakes,
        }

    def _ended_entries(self) -> list[TimerRef]:
        def ended(timer_ref: TimerRef) -> bool:
            try:
                timer = self.state.peek(timer_ref).timer
            except Exception:
                return False
            return timer is not None and timer.phase.ended

        return [timer_ref for timer_ref in self.state.refs() if ended(timer_ref)]

    def sound(self) -> None:
        """Nothing crashed, nothing was logged as a mistake, no fence or generation went back."""
        assert self.log.mistakes == []
        for replica in self.replicas:
            assert replica.crashed() == []
        for timer_ref, seen in self.fences.items():
            assert seen == sorted(seen), f"{timer_ref} went back: {seen}"


def fail_nth(adapter: Any, number: int, error: BrokerError, *, stored: bool, times: int = 1) -> None:
    """Let the ``number``-th call of ``adapter`` from now on (from 0), and the next ``times - 1``, raise ``error``."""
    usual, calls = adapter._do, count()

    async def doing(effect: Callable[[], T]) -> T:
        if number <= next(calls) < number + times:
            adapter.calls += 1
            await asyncio.sleep(0)
            if stored:
                effect()
            raise error
        return await usual(effect)  # type: ignore[no-any-return]

    adapter._do = doing
