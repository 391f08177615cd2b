"""Whatever is done to them, queue and scheduler behave as a plain list would that is searched anew at every step."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.property.test_heap_model import check_inside
from timer_service.clock import ManualClock
from timer_service.scheduler import DelayedScheduler, SchedulerFull, TimerQueue

# Few keys and few times: moves, ties and repetitions are common.
KEYS = st.sampled_from("abcdef")
TIMES = st.integers(0, 6)
CAPACITY = 4


class QueueAgainstList(RuleBasedStateMachine):
    """The model is a list of (key, time) in the order in which they were scheduled.

    What ``fire`` does to a key is drawn before: nothing, scheduling another, cancelling another, failing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.queue: TimerQueue[str] = TimerQueue(self.clock)
        self.armed: list[tuple[str, int]] = []
        self.fired: list[str] = []
        self.reactions: dict[str, tuple[Any, ...]] = {}
        self.model_reactions: dict[str, tuple[Any, ...]] = {}
        self.task: asyncio.Task[None] | None = None
        self.expected: list[str] = []

    def teardown(self) -> None:
        self.stop()
        self.loop.close()

    async def _rounds(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.queue.run(self.fire))

    def fire(self, key: str) -> None:
        self.fired.append(key)
        match self.reactions.pop(key, ()):
            case ("schedule", other, at):
                self.queue.schedule(other, at)
            case ("cancel", other):
                self.queue.cancel(other)
            case ("fail",):
                raise LookupError(key)

    # -- the model ------------------------------------------------------------------------------------------

    def model_schedule(self, key: str, at: int) -> None:
        self.armed = [*(armed for armed in self.armed if armed[0] != key), (key, at)]

    def model_cancel(self, key: str) -> bool:
        before = len(self.armed)
        self.armed = [armed for armed in self.armed if armed[0] != key]
        return len(self.armed) < before

    def model_runs(self) -> bool:
        """Fire as the queue should, until nothing is due; whether ``fire`` failed."""
        now_ms = self.clock.now_ms()
        while due := sorted((armed for armed in self.armed if armed[1] <= now_ms), key=lambda armed: armed[1]):
            self.armed = [armed for armed in self.armed if armed[1] > now_ms]
            for place, (key, _) in enumerate(due):
                self.expected.append(key)
                match self.model_reactions.pop(key, ()):
                    case ("schedule", other, at):
                        self.model_schedule(other, at)
                    case ("cancel", other):
                        self.model_cancel(other)
                    case ("fail",):
                        anew = {armed[0] for armed in self.armed}
                        self.armed = [*(late for late in due[place + 1 :] if late[0] not in anew), *self.armed]
                        return True
        return False

    # -- what is done ---------------------------------------------------------------------------------------

    @rule(key=KEYS, at=TIMES)
    def schedule(self, key: str, at: int) -> None:
        self.queue.schedule(key, self.clock.now_ms() - 2 + at)
        self.model_schedule(key, self.clock.now_ms() - 2 + at)

    @rule(key=KEYS)
    def cancel(self, key: str) -> None:
        assert self.queue.cancel(key) is self.model_cancel(key)

    def react(self, key: str, *reaction: Any) -> None:
        self.reactions[key] = self.model_reactions[key] = reaction

    @rule(key=KEYS, other=KEYS, at=TIMES)
    def react_by_scheduling(self, key: str, other: str, at: int) -> None:
        self.react(key, "schedule", other, self.clock.now_ms() - 1 + at)

    @rule(key=KEYS, other=KEYS)
    def react_by_cancelling(self, key: str, other: str) -> None:
        self.react(key, "cancel", other)

    @rule(key=KEYS)
    def react_by_failing(self, key: str) -> None:
        self.react(key, "fail")

    @rule(by_ms=TIMES)
    def advance(self, by_ms: int) -> None:
        self.clock.advance(by_ms)

    @precondition(lambda self: self.task is None)
    @rule()
    def start(self) -> None:
        self.task = self.loop.run_until_complete(self._start())
        self.let_it_run()

    @precondition(lambda self: self.task is not None)
    @rule()
    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self.loop.run_until_complete(self._rounds())
            self.task = None

    @precondition(lambda self: self.task is not None)
    @rule()
    def let_it_run(self) -> None:
        self.loop.run_until_complete(self._rounds())
        assert self.task is not None
        failed = self.model_runs()
        assert self.fired == self.expected
        assert self.reactions == self.model_reactions
        assert self.task.done() is failed
        if failed:
            assert isinstance(self.task.exception(), LookupError)
            self.task = None

    @invariant()
    def inside_is_in_order(self) -> None:
        check_inside(self.queue._heap, list(self.queue._armed.values()))
        assert len(self.queue) == len(self.armed)
        assert {entry.key: entry.at for entry in self.queue._armed.values()} == dict(self.armed)
        assert self.fired == self.expected


QueueAgainstList.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_the_queue_behaves_as_a_list = QueueAgainstList.TestCase


class SchedulerAgainstDict(RuleBasedStateMachine):
    """The model is a dict from id to (due, number of the callback); the callbacks note their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: DelayedScheduler[str] = DelayedScheduler(CAPACITY)
        self.model: dict[str, tuple[int, int]] = {}
        self.reactions: dict[int, tuple[Any, ...]] = {}
        self.ran: list[int] = []
        self.number = 0

    def callback(self, number: int) -> None:
        self.ran.append(number)
        match self.reactions.get(number, ()):
            case ("schedule", id, due):
                self.add(id, due)
            case ("cancel", id):
                assert self.scheduler.cancel(id) is (self.model.pop(id, None) is not None)
            case ("fail",):
                raise LookupError(number)

    def add(self, id: str, due: int) -> None:
        self.number += 1
        if id not in self.model and len(self.model) == CAPACITY:
            with pytest.raises(SchedulerFull):
                self.scheduler.schedule(id, due, partial(self.callback, self.number))
        else:
            self.scheduler.schedule(id, due, partial(self.callback, self.number))
            self.model[id] = (due, self.number)

    @rule(id=KEYS, due=TIMES)
    def schedule(self, id: str, due: int) -> None:
        self.add(id, due)

    @rule(id=KEYS, due=TIMES, reaction=st.sampled_from(["schedule", "cancel", "fail"]), other=KEYS, at=TIMES)
    def schedule_one_that_acts(self, id: str, due: int, reaction: str, other: str, at: int) -> None:
        self.add(id, due)
        self.reactions[self.number] = (reaction, other, at)[: {"schedule": 3, "cancel": 2, "fail": 1}[reaction]]

    @rule(id=KEYS)
    def cancel(self, id: str) -> None:
        assert self.scheduler.cancel(id) is (self.model.pop(id, None) is not None)

    @rule(now=TIMES)
    def run_due(self, now: int) -> None:
        claimed = sorted((due, id, number) for id, (due, number) in self.model.items() if due <= now)
        for _, id, _ in claimed:
            del self.model[id]
        numbers = [number for _, _, number in claimed]
        failing = [place for place, number in enumerate(numbers) if self.reactions.get(number) == ("fail",)]
        self.ran = []
        if failing:
            with pytest.raises(LookupError):
                self.scheduler.run_due(now)
            numbers = numbers[: failing[0] + 1]
        else:
            assert self.scheduler.run_due(now) == len(numbers)
        assert self.ran == numbers

    @invariant()
    def agrees_with_the_model(self) -> None:
        check_inside(self.scheduler._heap, list(self.scheduler._pending.values()))
        assert len(self.scheduler) == len(self.model)
        assert {id: pending.at for id, pending in self.scheduler._pending.items()} == {
            id: due for id, (due, _) in self.model.items()
        }
        assert self.scheduler.next() == min((due for due, _ in self.model.values()), default=None)


SchedulerAgainstDict.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_the_scheduler_behaves_as_a_dict = SchedulerAgainstDict.TestCase
