"""A reply on its way, and the fiber that waits for it without a Task or a Future.

On the ring a coroutine waits for little else than broker replies. A ``Pending`` is what such a wait yields:
whoever receives the reply resumes the coroutine itself, at once. The same object follows asyncio's protocol
for future-like objects, so that ordinary Tasks can await it too.

A coroutine that runs as a fiber may await Pendings and asyncio Futures (so ``asyncio.sleep`` works), but has
no current Task: ``asyncio.timeout`` and task groups do not work in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """One value to come: resolved once, with a value or an error; later resolutions are ignored."""

    __slots__ = ("_asyncio_future_blocking", "_callback", "_context", "_done", "_error", "_value", "resume")

    def __init__(self) -> None:
        self._asyncio_future_blocking = False
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callback: Callable[[Any], object] | None = None
        self._context: Context | None = None
        self.resume: Callable[[], None] | None = None
        """What a waiting fiber left here: called at once, in the stack of whoever resolves this."""

    def resolve(self, value: T) -> None:
        if not self._done:
            self._value = value
            self._finish()

    def fail(self, error: BaseException) -> None:
        if not self._done:
            self._error = error
            self._finish()

    def _finish(self) -> None:
        self._done = True
        if self.resume is not None:
            self.resume()
        elif self._callback is not None:
            asyncio.get_running_loop().call_soon(self._callback, self, context=self._context)

    def __await__(self) -> Generator[Pending[T], None, T]:
        if not self._done:
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    # -- what asyncio.Task asks of a future-like object --

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def done(self) -> bool:
        return self._done

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context | None = None) -> None:
        self._callback, self._context = callback, context
        if self._done:
            asyncio.get_running_loop().call_soon(callback, self, context=context)

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002 - asyncio's signature
        if self._done:
            return False
        self.fail(asyncio.CancelledError())
        return True


class Fiber:
    """Drives one coroutine; ``on_done(error)`` is called once, with None when it returned."""

    __slots__ = ("_coroutine", "_on_done")

    def __init__(self, coroutine: Coroutine[Any, Any, object], on_done: Callable[[BaseException | None], None]):
        self._coroutine = coroutine
        self._on_done = on_done

    def step(self) -> None:
        """Run to the next wait, or to the end. Call it once to start."""
        try:
            waited = self._coroutine.send(None)
        except StopIteration:
            self._on_done(None)
        except BaseException as error:
            self._on_done(error)
        else:
            self._wait_for(waited)

    def _wait_for(self, waited: Any) -> None:
        if type(waited) is Pending:
            waited._asyncio_future_blocking = False
            waited.resume = self.step
        elif waited is None:  # a bare yield, as in sleep(0)
            asyncio.get_running_loop().call_soon(self.step)
        else:
            waited._asyncio_future_blocking = False
            waited.add_done_callback(self._woken)

    def _woken(self, _: object) -> None:
        self.step()


def start_fiber(coroutine: Coroutine[Any, Any, object], on_done: Callable[[BaseException | None], None]) -> None:
    """Run ``coroutine`` up to its first wait, now; ``on_done`` is called when it has ended."""
    Fiber(coroutine, on_done).step()
