"""Calling a handler so that nothing it does can harm the process."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any

from notify_consumer.answers import Answer
from notify_consumer.context import Context
from notify_consumer.errors import HandlerFailed, HandoffRefused
from notify_consumer.handler import Handler

_CANCEL_WAIT_S = 1.0


class Call:
    """One call of one handler."""

    def __init__(self, handler: Handler, context: Context) -> None:
        self._handler = handler
        self._context = context
        self._task: asyncio.Task[Answer] | None = None
        self._in_its_thread = False

    @property
    def ended(self) -> bool:
        """Whether none of the handler's code is running, which a cancel alone does not make sure of."""
        return not self.ignores_cancel and not self._in_its_thread

    @property
    def ignores_cancel(self) -> bool:
        """After ``run`` was cancelled: whether the handler goes on in the event loop all the same."""
        return self._task is not None and not self._task.done()

    async def run(self) -> Answer:
        """What the handler answers. Raises HandoffRefused for a payload of another type than it takes.

        Everything else that it may do raises HandlerFailed, unless the handler has an answer to its own failures:
        a CancelledError or SystemExit of its own too, and a time-out, after which it is cancelled and waited for.
        When this is cancelled from outside the handler is cancelled and given a second to end; one in a thread
        can't be stopped.
        """
        task = self._task = asyncio.create_task(self._answer(), name=f"handler.{self._context.resume.resume_id}")
        try:
            in_time = await self._wait(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_WAIT_S)
            raise
        try:
            return self._result(task, in_time)
        except HandlerFailed as failure:
            if (answer := self._handler.answer_to(failure, self._context)) is not None:
                return answer
            raise

    async def _wait(self, task: asyncio.Task[Answer]) -> bool:
        """Wait for the end of ``task``; returns whether it came in time. One that is late is cancelled."""
        timeout_ms = self._handler.timeout_ms
        if timeout_ms is None:
            await asyncio.wait({task})
            return True
        self._context.deadline.within(timeout_ms)
        await asyncio.wait({task}, timeout=timeout_ms / 1000)
        if task.done():
            return True
        task.cancel()
        await asyncio.wait({task})  # while it goes on nobody else may have the resume
        return False

    def _result(self, task: asyncio.Task[Answer], in_time: bool) -> Answer:
        if not in_time:
            if not task.cancelled():
                task.exception()  # it was seen: what a cancelled handler says in the end does not count
            raise HandlerFailed(f"time-out: it took longer than {self._handler.timeout_ms} ms and was cancelled")
        if task.cancelled():
            raise HandlerFailed("CancelledError: the handler was cancelled from within")
        if isinstance(error := task.exception(), GeneratorExit):
            raise HandlerFailed(_said(error)) from error
        return task.result()

    async def _answer(self) -> Answer:
        try:
            return self._handler.answer(await self._value(), self._context)
        except (asyncio.CancelledError, GeneratorExit, HandoffRefused):
            raise
        except BaseException as error:
            raise HandlerFailed(_said(error)) from error

    async def _value(self) -> Any:
        function = self._handler.bind(self._context)
        if self._handler.is_async:
            return await function()
        value = await self._in_thread(function)
        return await value if inspect.isawaitable(value) else value

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        """In a daemon thread of its own: a hanging one takes no other's place, and does not hold up the exit."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            result = _outcome(context, function)
            self._in_its_thread = False
            try:
                loop.call_soon_threadsafe(_settle, future, result)
            except RuntimeError:
                return  # the loop is closed: the process is ending

        self._in_its_thread = True
        threading.Thread(target=work, name=f"handler.{self._context.resume.resume_id}", daemon=True).start()
        value, error = await future
        if error is not None:
            raise error
        return value


def _outcome(context: contextvars.Context, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return context.run(function), None
    except BaseException as error:  # handed over to the loop
        return None, error


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _said(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception as second:  # the handler's own code, too
        text = f"its text can't be had, that raised {type(second).__name__}"
    return f"{kind}: {text}" if text else kind
