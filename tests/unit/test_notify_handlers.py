"""Which handler gets which resume, what it may answer, and that nothing it does harms the process."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from typing import Any

import msgspec
import pytest

from notify_consumer import Done, Fail, Handlers, Resume, Retry, done, fail, retry
from notify_consumer.answers import feedback_of
from notify_consumer.calls import Call
from notify_consumer.context import Context
from notify_consumer.errors import HandlerFailed, UnreadableResume
from notify_consumer.handler import Handler
from notify_consumer.resume import read_resume
from tests.support.notify import resume_body, resume_bytes, until
from timer_service.domain.model import MAX_DELAY_MS, MAX_DUE_MS
from timer_service.wire.canonical import canonical_json


def resume(*args: Any, **fields: Any) -> Resume:
    return read_resume(resume_bytes(*args, **fields))


def named(name: str) -> Any:
    """A handler that only has a name."""

    async def handler(resume: Resume) -> None: ...

    handler.__name__ = name
    return handler


def chosen(handlers: Handlers, *args: Any, **fields: Any) -> str | None:
    found = handlers.find(resume(*args, **fields))
    return None if found is None else str(getattr(found.function, "__name__", found))


# -- choosing ---------------------------------------------------------------------------------------------------


@pytest.fixture
def handlers() -> Handlers:
    table = Handlers()
    table.flow("billing")(named("billing"))
    table.flow("billing", node="pay")(named("billing.pay"))
    table.flow("shipping", "pack")(named("shipping.pack"))
    table.name("order-")(named("order-"))
    table.name("order-eu-")(named("order-eu-"))
    return table


@pytest.mark.parametrize(
    ("flow", "node", "handler"),
    [
        ("billing", "pay", "billing.pay"),
        ("billing", "wait", "billing"),
        ("shipping", "pack", "shipping.pack"),
        ("shipping", "wait", None),
        ("Billing", "pay", None),
        ("other", "pay", None),
    ],
)
def test_the_node_comes_before_its_flow(handlers: Handlers, flow: str, node: str, handler: str | None) -> None:
    """A node's own handler wins over that of the flow; flows are compared byte for byte."""
    assert chosen(handlers, "run-1", flow=flow, node=node) == handler


@pytest.mark.parametrize(
    ("name", "handler"),
    [("order-eu-7", "order-eu-"), ("order-7", "order-"), ("order-", "order-"), ("order", None), ("billing", None)],
)
def test_the_longest_prefix_wins(handlers: Handlers, name: str, handler: str | None) -> None:
    """A named timer goes to the longest prefix registered, whatever the order of registration; never to a flow."""
    assert chosen(handlers, name) == handler


def test_the_default_gets_the_rest(handlers: Handlers) -> None:
    """The default takes what nothing else matches, and only that."""
    handlers.default(named("default"))
    assert chosen(handlers, "nobody") == "default"
    assert chosen(handlers, "run", flow="nobody") == "default"
    assert chosen(handlers, "order-7") == "order-"


def test_an_empty_prefix_matches_every_name_but_no_flow() -> None:
    """The empty prefix is the least specific of names."""
    handlers = Handlers()
    handlers.name("")(named("names"))
    assert chosen(handlers, "anything") == "names"
    assert chosen(handlers, "run", flow="f") is None


def test_the_same_place_twice_is_refused(handlers: Handlers) -> None:
    """Registering a place again raises at once instead of replacing silently."""
    handlers.default(named("default"))
    for register in (
        handlers.flow("billing"),
        handlers.flow("billing", "pay"),
        handlers.name("order-"),
        handlers.default,
    ):
        with pytest.raises(ValueError, match="already"):
            register(named("second"))


def test_decorators_hand_the_function_back(handlers: Handlers) -> None:
    """A decorated function stays callable by itself."""
    function = named("f")
    assert handlers.flow("x")(function) is function
    assert handlers.name("x")(function) is function
    assert handlers.default(function) is function
    assert len(handlers) == 8


@pytest.mark.parametrize(
    ("body", "flow"),
    [
        (resume_body("run", flow="billing", node="pay"), "flow:billing"),
        (resume_body("run", flow="unknown"), "flow:unknown"),
        (resume_body("order-eu-7"), "name:default/order-eu-"),
        (resume_body("order-7"), "name:default/order-"),
        (resume_body("report-7"), "name:default/report"),
        (resume_body("2024-report"), "name:default/"),
        (resume_body("größe_1"), "name:default/größe"),
    ],
)
def test_what_shares_a_fate_shares_a_flow(handlers: Handlers, body: dict[str, Any], flow: str) -> None:
    """A lineage counts against its flow, a named timer against its handler's prefix or the word it begins with."""
    assert handlers.flow_of(read_resume(canonical_json(body))) == flow


# -- reading ----------------------------------------------------------------------------------------------------


def test_a_handler_sees_every_field() -> None:
    """The Resume has the fields of the contract; big integers and doubles in the payload survive."""
    payload = {"big": 2**70, "double": 1.5, "list": [None, True]}
    body = resume_body("run", flow="f", payload=payload, edges={"start": "a", "elapsed": "b"}, retries_used=3)
    got = read_resume(canonical_json(body))
    assert msgspec.structs.asdict(got) == body
    assert got.timer == {"flow_id": "f", "flow_version": "1", "root_execution_id": "run", "node_id": "wait"}


def test_without_an_elapsed_time_the_due_time_stands_in() -> None:
    """elapsed_at_ms is an integer for handlers, whatever the resume says."""
    assert resume(elapsed_at_ms=None).elapsed_at_ms == 1_000


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"v": 2}, "version 2"),
        ({"timer_ref": "nope"}, "nope"),
        ({"resume_id": f"{'a' * 26}.0"}, "resume_id is"),
        ({"resume_id": "whatever"}, "not an occurrence id"),
        ({"generation": 1}, "resume_id is"),
        ({"fence": 0}, "fence is 0"),
        ({"fence": "2"}, "fence"),
        ({"timer": {}}, "neither"),
        ({"timer": {"name": 5}}, "Expected `str`"),
        ({"timer": None}, "Expected `object`"),
        ({"edges": [1]}, "Expected"),
        ({"payload_sha256": None}, "payload_sha256"),
    ],
)
def test_an_unreadable_resume_says_why(changes: dict[str, Any], reason: str) -> None:
    """Whatever feedback could not be sent for is unreadable, with the reason, and with the id where it has one."""
    body = resume_body() | changes
    with pytest.raises(UnreadableResume, match=reason) as caught:
        read_resume(canonical_json(body))
    expected = None if body["resume_id"] == "whatever" else body["resume_id"]
    assert caught.value.resume_id == expected


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'{"v":1}', b"\xff", b"[" * 100_000, b'{"resume_id":7}', b'{"resume_id":"a b\\n"}'],
)
def test_bytes_that_are_no_resume_have_no_id(data: bytes) -> None:
    """Any bytes give UnreadableResume, never another error."""
    with pytest.raises(UnreadableResume) as caught:
        read_resume(data)
    assert caught.value.resume_id is None


def test_a_payload_that_two_readers_could_read_differently_is_unreadable() -> None:
    """Duplicate keys and lone surrogates are refused here as in commands."""
    for payload in (b'{"a":1,"a":2}', b'"\\ud800"', b"1e999"):
        data = resume_bytes(payload="PAYLOAD").replace(b'"PAYLOAD"', payload)
        with pytest.raises(UnreadableResume) as caught:
            read_resume(data)
        assert caught.value.resume_id in (resume_body()["resume_id"], None)


# -- answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: retry(delay_ms=0),
        lambda: retry(delay_ms=-1),
        lambda: retry(delay_ms=MAX_DELAY_MS + 1),
        lambda: retry(delay_ms=1.5),  # type: ignore[arg-type]
        lambda: retry(delay_ms=True),
        lambda: retry(at_ms=-1),
        lambda: retry(at_ms=MAX_DUE_MS + 1),
        lambda: retry(delay_ms=1, at_ms=1),
        lambda: Retry(delay_ms=0),
        lambda: fail(""),
        lambda: fail("Upper"),
        lambda: fail("a" * 65),
        lambda: fail("new\nline"),
        lambda: Fail("ok", "x" * 1025),
        lambda: Fail("ok", "\ud800"),
        lambda: fail(5),  # type: ignore[arg-type]
        lambda: fail("ok", 5),  # type: ignore[arg-type]
        lambda: Fail("ok", b"bytes"),  # type: ignore[arg-type]
    ],
)
def test_an_answer_the_service_would_refuse_is_refused_here(wrong: Any) -> None:
    """Such an answer raises in the handler, where it can be seen, instead of being rejected later."""
    with pytest.raises((ValueError, TypeError), match=r" is a|has |give |can't encode"):
        wrong()


def test_a_long_message_is_cut_at_a_character() -> None:
    """fail() cuts its message at 1,024 bytes of UTF-8, never inside a character."""
    message = fail("code", "ü" * 600).message
    assert message == "ü" * 512
    assert fail("code", "\ud800").message == "?"


@pytest.mark.parametrize(
    ("answer", "kind", "more"),
    [
        (done(), "complete", {}),
        (retry(5), "retry", {"due": {"delay_ms": 5}}),
        (retry(at_ms=7), "retry", {"due": {"at_ms": 7}}),
        (retry(), "retry", {}),
        (fail("broken"), "fail", {"failure_code": "broken"}),
        (fail("broken", "why"), "fail", {"failure_code": "broken", "message": "why"}),
    ],
)
def test_an_answer_becomes_a_command_of_the_contract(answer: Any, kind: str, more: dict[str, Any]) -> None:
    """The command names the occurrence as the resume did; its id follows from the resume, so repeats are known."""
    body = resume_body(generation=3, fence=9)
    feedback = feedback_of(read_resume(canonical_json(body)), answer)
    assert feedback.kind == kind
    assert feedback.body == {
        "v": 1,
        "command_id": f"notify:{body['resume_id']}",
        "timer_ref": body["timer_ref"],
        "generation": 3,
        "fence": 9,
        **more,
    }


# -- calling ----------------------------------------------------------------------------------------------------


def call_of(function: Any, **options: Any) -> Call:
    handler = Handler(function, **options)
    return Call(handler, Context(resume(), flow="x", attempt=1))


async def call(function: Any, **options: Any) -> Any:
    return await call_of(function, **options).run()


async def test_async_and_plain_functions_answer() -> None:
    """Coroutines run in the loop, plain functions in a thread of their own, with the caller's context."""
    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="none")
    mark.set("kept")

    async def in_loop(resume: Resume) -> Any:
        assert threading.current_thread() is threading.main_thread()
        return retry(1)

    def in_thread(resume: Resume) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        return fail("x", mark.get())

    class Callable:
        async def __call__(self, resume: Resume) -> Any:
            assert threading.current_thread() is threading.main_thread()
            return done()

    assert await call(in_loop) == Retry(1)
    assert await call(in_thread) == Fail("x", "kept")
    assert await call(Callable()) == Done()
    assert await call(functools.partial(in_loop)) == Retry(1)
    assert await call(lambda resume: in_loop(resume) if resume else None) == Retry(1)


async def test_nothing_returned_means_done() -> None:
    """None is done()."""
    assert await call(lambda resume: None) == Done()


def raising(error: BaseException) -> Any:
    async def handler(resume: Resume) -> None:
        raise error

    return handler


def raising_in_thread(error: BaseException) -> Any:
    def handler(resume: Resume) -> None:
        raise error

    return handler


class Untold(Exception):
    """An error whose text raises."""

    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("boom"),
        Untold(),
        GeneratorExit(),
        asyncio.CancelledError(),
        SystemExit(3),
        KeyboardInterrupt(),
        StopIteration(),
        MemoryError(),
        TimeoutError(),
        ExceptionGroup("several", [ValueError("one")]),
    ],
)
@pytest.mark.parametrize("handler", [raising, raising_in_thread])
async def test_whatever_a_handler_raises_is_its_failure(handler: Any, error: BaseException) -> None:
    """No exception of a handler, SystemExit and CancelledError included, gets past its call."""
    with pytest.raises(HandlerFailed, match=type(error).__name__):
        await call(handler(error))


async def test_a_handler_that_cancels_itself_has_failed() -> None:
    """A handler that cancels its own task harms only itself."""

    async def handler(resume: Resume) -> None:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(60)

    with pytest.raises(HandlerFailed, match="CancelledError"):
        await call(handler)


@pytest.mark.parametrize("value", [True, 0, "done", {"done": True}, done, Done])
async def test_anything_else_returned_is_a_failure(value: Any) -> None:
    """An answer is one of three types or None; forgetting to call done() is told."""
    with pytest.raises(HandlerFailed, match=r"TypeError: a handler returns done\(\)"):
        await call(lambda resume: value)


async def test_cancelling_a_call_cancels_its_handler() -> None:
    """A call that is cancelled ends its handler and waits for its clean-up."""
    started, cleaned = asyncio.Event(), []

    async def handler(resume: Resume) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append(1)

    attempt = call_of(handler)
    running = asyncio.create_task(attempt.run())
    await started.wait()
    assert not attempt.ended
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cleaned == [1]
    await until(lambda: attempt.ended and not attempt.ignores_cancel)


async def test_a_thread_goes_on_after_a_cancel_and_is_known_to() -> None:
    """A plain function can't be cancelled: its call says that it has not ended until it has."""
    started, release = threading.Event(), threading.Event()

    def handler(resume: Resume) -> None:
        started.set()
        release.wait()

    attempt = call_of(handler)
    running = asyncio.create_task(attempt.run())
    await until(started.is_set)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not attempt.ended
    assert not attempt.ignores_cancel
    release.set()
    await until(lambda: attempt.ended)


async def test_the_traceback_is_kept() -> None:
    """The failure carries what was raised, for the log."""
    with pytest.raises(HandlerFailed) as caught:
        await call(raising(RuntimeError("boom")))
    assert isinstance(caught.value.__cause__, RuntimeError)
