"""Calling a handler so that nothing it does can harm the process."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from typing import Any

from notify_consumer.answers import Answer, Done, Fail, Retry
from notify_consumer.errors import HandlerFailed
from notify_consumer.handlers import HandlerFunction
from notify_consumer.resume import Resume

_CANCEL_WAIT_S = 1.0


class Call:
    """One call of one handler."""

    def __init__(self, function: HandlerFunction, resume: Resume) -> None:
        self._function = function
        self._resume = resume
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
        """What the handler answers. Raises HandlerFailed for everything else that it may do.

        A CancelledError or SystemExit of the handler's own counts as a failure. When this is cancelled from
        outside the handler is cancelled and given a second to end; one in a thread can't be stopped.
        """
        task = self._task = asyncio.create_task(self._answer(), name=f"handler.{self._resume.resume_id}")
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_WAIT_S)
            raise
        if task.cancelled():
            raise HandlerFailed("CancelledError: the handler was cancelled from within")
        return task.result()

    async def _answer(self) -> Answer:
        try:
            return _checked(await self._value())
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            raise HandlerFailed(_said(error)) from error

    async def _value(self) -> Any:
        if _is_async(self._function):
            return await self._function(self._resume)
        value = await self._in_thread()
        return await value if inspect.isawaitable(value) else value

    async def _in_thread(self) -> Any:
        """In a daemon thread of its own: a hanging one takes no other's place, and does not hold up the exit."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            result = _outcome(context, self._function, self._resume)
            self._in_its_thread = False
            try:
                loop.call_soon_threadsafe(_settle, future, result)
            except RuntimeError:
                return  # the loop is closed: the process is ending

        self._in_its_thread = True
        threading.Thread(target=work, name=f"handler.{self._resume.resume_id}", daemon=True).start()
        value, error = await future
        if error is not None:
            raise error
        return value


def _is_async(function: HandlerFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


def _outcome(
    context: contextvars.Context, function: HandlerFunction, resume: Resume
) -> tuple[Any, BaseException | None]:
    try:
        return context.run(function, resume), None
    except BaseException as error:  # handed over to the loop
        return None, error


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _checked(value: Any) -> Answer:
    if value is None:
        return Done()
    if isinstance(value, Done | Retry | Fail):
        return value
    raise TypeError(f"a handler returns done(), retry(), fail() or None, not {type(value).__name__}")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
