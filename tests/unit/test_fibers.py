"""A reply resumes whoever waits for it: a fiber at once, a Task on its next turn; with a value or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from timer_service.fibers import Pending, start_fiber


class Ended:
    """Remembers how fibers ended."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []

    def __call__(self, error: BaseException | None) -> None:
        self.errors.append(error)


async def take(pending: Pending[Any], into: list[Any]) -> None:
    into.append(await pending)


# ── in a fiber ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_fiber_runs_to_its_first_wait_at_once():
    """Starting one runs it, in the caller's stack, until it waits or ends."""
    pending: Pending[int] = Pending()
    steps: list[str] = []

    async def work() -> None:
        steps.append("begun")
        await pending
        steps.append("resumed")

    ended = Ended()
    start_fiber(work(), ended)
    assert (steps, ended.errors) == (["begun"], [])
    pending.resolve(1)
    assert (steps, ended.errors) == (["begun", "resumed"], [None])


async def test_a_reply_resumes_a_fiber_in_the_stack_of_who_resolves():
    """No turn of the loop lies between the reply and the waiting code."""
    pending: Pending[int] = Pending()
    got: list[int] = []
    start_fiber(take(pending, got), Ended())
    pending.resolve(7)
    assert got == [7]


async def test_a_reply_that_is_already_there():
    """Waiting for what has come does not wait, in either world."""
    pending: Pending[int] = Pending()
    pending.resolve(7)
    got: list[int] = []
    ended = Ended()
    start_fiber(take(pending, got), ended)
    assert (got, ended.errors) == ([7], [None])
    assert await pending == 7


async def test_an_error_is_raised_where_it_is_waited_for():
    """The fiber may handle it, or ends with it."""
    failed: list[Pending[int]] = [Pending(), Pending()]
    caught: list[str] = []

    async def handles() -> None:
        try:
            await failed[0]
        except ValueError as error:
            caught.append(str(error))

    ended = Ended()
    start_fiber(handles(), ended)
    start_fiber(take(failed[1], []), ended)
    for pending in failed:
        pending.fail(ValueError("no"))
    assert caught == ["no"]
    assert ended.errors[0] is None
    assert isinstance(ended.errors[1], ValueError)


async def test_a_fiber_that_raises_before_it_waits():
    """Its end is reported once, and nothing escapes into the starter."""

    async def broken() -> None:
        raise KeyError("at once")

    ended = Ended()
    start_fiber(broken(), ended)
    assert [type(error) for error in ended.errors] == [KeyError]


async def test_only_the_first_resolution_counts():
    """Later values, errors and cancellations are ignored."""
    pending: Pending[int] = Pending()
    pending.resolve(1)
    pending.resolve(2)
    pending.fail(ValueError())
    assert pending.cancel() is False
    assert pending.result() == 1
    failed: Pending[int] = Pending()
    failed.fail(ValueError())
    failed.resolve(1)
    with pytest.raises(ValueError, match=r"^$"):
        failed.result()


async def test_a_fiber_may_wait_for_the_loop():
    """Bare turns, sleeps, futures and tasks of asyncio work in it."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()
    got: list[Any] = []

    async def value() -> int:
        return 3

    async def work() -> None:
        await asyncio.sleep(0)
        got.append("turn")
        await asyncio.sleep(0.001)
        got.append(await future)
        got.append(await asyncio.ensure_future(value()))
        done.set()

    ended = Ended()
    start_fiber(work(), ended)
    assert got == []
    asyncio.get_running_loop().call_later(0.005, future.set_result, 2)
    await asyncio.wait_for(done.wait(), 20)
    assert got == ["turn", 2, 3]
    assert ended.errors == [None]


async def test_the_error_of_a_future_reaches_the_fiber():
    """As in a Task."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()
    errors: list[BaseException | None] = []

    async def work() -> None:
        await future

    def ended(error: BaseException | None) -> None:
        errors.append(error)
        done.set()

    start_fiber(work(), ended)
    future.set_exception(ValueError("no"))
    await asyncio.wait_for(done.wait(), 20)
    assert isinstance(errors[0], ValueError)


async def test_fibers_may_wait_through_many_layers():
    """Coroutines awaiting coroutines, many replies one after the other."""
    pendings: list[Pending[int]] = [Pending() for _ in range(100)]
    total = []

    async def one(index: int) -> int:
        return await pendings[index]

    async def all_of_them() -> None:
        total.append(sum([await one(index) for index in range(100)]))

    start_fiber(all_of_them(), Ended())
    for number, pending in enumerate(pendings):
        assert total == []
        pending.resolve(number)
    assert total == [4950]


# ── in a Task ───────────────────────────────────────────────────────────────────────────────────────────────


async def started(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A Task that has come to its first wait."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    return task


async def test_a_task_gets_the_reply():
    """The same object is awaited by ordinary Tasks: a value, or an error."""
    value: Pending[int] = Pending()
    error: Pending[int] = Pending()
    got: list[int] = []
    first, second = await started(take(value, got)), await started(take(error, got))
    value.resolve(7)
    error.fail(ValueError("no"))
    await first
    with pytest.raises(ValueError, match="no"):
        await second
    assert got == [7]


async def test_a_task_goes_on_in_a_turn_of_its_own():
    """Whoever resolves goes on first: a Task is not stepped from within another."""
    pending: Pending[int] = Pending()
    got: list[int] = []
    task = await started(take(pending, got))
    pending.resolve(7)
    assert got == []
    await task
    assert got == [7]


async def test_a_waiting_task_can_be_cancelled():
    """The wait ends with CancelledError, and a reply that comes later is dropped."""
    pending: Pending[int] = Pending()
    task = await started(take(pending, []))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pending.done()
    pending.resolve(7)


async def test_timeouts_and_gather_work_with_tasks():
    """What asyncio builds on cancellation works."""
    never: Pending[int] = Pending()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(take(never, []), 0.001)
    pendings: list[Pending[int]] = [Pending() for _ in range(3)]
    got: list[int] = []
    gathered = asyncio.gather(*(take(pending, got) for pending in pendings))
    await asyncio.sleep(0)
    for number, pending in enumerate(pendings):
        pending.resolve(number)
    await gathered
    assert got == [0, 1, 2]


async def test_cancelling_a_wait_raises_in_the_fiber():
    """A fiber has no Task, but its wait can be broken off."""
    pending: Pending[int] = Pending()
    ended = Ended()
    start_fiber(take(pending, []), ended)
    assert pending.cancel() is True
    assert [type(error) for error in ended.errors] == [asyncio.CancelledError]
