"""What a handler's signature may ask for, what it gets, and how long it may take."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pydantic
import pytest
from structlog.testing import capture_logs
from typing_extensions import TypedDict

from notify_consumer import Context, Done, Handlers, Resume, Retry, done, retry
from notify_consumer.calls import Call
from notify_consumer.context import Deadline
from notify_consumer.errors import HandlerFailed, HandoffRefused
from notify_consumer.handler import Handler
from notify_consumer.outbox.base import State
from notify_consumer.policy import Policy
from notify_consumer.relay import Relay
from notify_consumer.resume import read_resume
from notify_consumer.testing import MemoryOutbox
from tests.support.notify import FakeSender, new_row, resume_body, resume_bytes, until
from timer_service.clock import ManualClock

if TYPE_CHECKING:
    from somewhere import OnlyForTypes  # type: ignore[import-not-found]


class Reminder(pydantic.BaseModel):
    """A payload."""

    model_config = pydantic.ConfigDict(strict=True)

    to: str
    tries: int = 1


@dataclasses.dataclass
class Point:
    x: int
    y: float


class Ticket(TypedDict):
    number: int


class Opaque:
    """Nothing that pydantic could validate."""


def context_of(payload: Any = None, *, deadline: Deadline | None = None, **fields: Any) -> Context:
    resume = read_resume(resume_bytes(payload=payload, **fields))
    return Context(resume, flow="flow:x", attempt=3, deadline=deadline)


async def call(function: Any, payload: Any = None, **options: Any) -> Any:
    return await Call(Handler(function, **options), context_of(payload)).run()


# -- signatures -------------------------------------------------------------------------------------------------


async def plain(resume: Resume) -> Any:
    assert isinstance(resume, Resume)
    return retry(1)


async def unannotated(anything):
    assert isinstance(anything, Resume)
    return retry(2)


async def everything(resume: Resume, payload: Reminder, context: Context) -> Any:
    assert (context.attempt, context.resume) == (3, resume)
    return retry(len(payload.to))


async def other_order(resume: Any, ctx: Context, reminder: Reminder) -> Any:
    assert isinstance(ctx, Context)
    return retry(len(reminder.to))


async def by_name(resume: object, *, context: Context, payload: Reminder) -> Any:
    assert isinstance(context, Context)
    return retry(len(payload.to))


async def by_place(resume: Resume, payload: Reminder, context: Context, /) -> Any:
    assert isinstance(context, Context)
    return retry(len(payload.to))


async def own_default(resume: Resume, payload: Reminder, factor: int = 10) -> Any:
    return retry(factor * len(payload.to))


async def variadic(*args: Any, **kwargs: Any) -> Any:
    assert [type(arg) for arg in args] == [Resume]
    assert kwargs == {}
    return retry(9)


async def returns_the_unknown(resume: Resume, payload: Reminder) -> OnlyForTypes:
    return retry(4)


class Object:
    async def __call__(self, resume: Resume, payload: Reminder) -> Any:
        return retry(len(payload.to))

    def method(self, resume: Resume, payload: Reminder, context: Context) -> Any:
        assert isinstance(context, Context)
        return retry(len(payload.to))


@pytest.mark.parametrize(
    ("function", "delay_ms"),
    [
        (plain, 1),
        (unannotated, 2),
        (everything, 4),
        (other_order, 4),
        (by_name, 4),
        (by_place, 4),
        (own_default, 40),
        (functools.partial(own_default, factor=100), 400),
        (variadic, 9),
        (returns_the_unknown, 4),
        (Object(), 4),
        (Object().method, 4),
        (lambda resume: retry(5), 5),
    ],
)
async def test_a_handler_gets_what_its_signature_asks_for(function: Any, delay_ms: int) -> None:
    """The resume comes first; context and payload by their annotations, in any order; defaults are left alone."""
    assert await call(function, {"to": "anna"}) == Retry(delay_ms)


CONTEXT = context_of()


async def payload_only(payload: Reminder) -> None: ...
async def nothing() -> None: ...
async def only_by_name(*, resume: Resume) -> None: ...
async def context_first(context: Context, resume: Resume) -> None: ...
async def not_annotated(resume: Resume, payload) -> None: ...
async def two_payloads(resume: Resume, one: Reminder, two: Point) -> None: ...
async def two_contexts(resume: Resume, one: Context, two: Context) -> None: ...
async def context_with_default(resume: Resume, context: Context = CONTEXT) -> None: ...
async def context_or_none(resume: Resume, context: Context | None = None) -> None: ...
async def opaque(resume: Resume, payload: Opaque) -> None: ...
async def unresolved(resume: Resume, payload: OnlyForTypes) -> None: ...
async def dictionary(resume: dict[str, Any], payload: Reminder) -> None: ...
async def a_dict(resume: dict) -> None: ...  # type: ignore[type-arg]


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (payload_only, "payload_only: the first parameter gets the Resume, and payload is not one"),
        (nothing, "nothing: a handler's first parameter gets the Resume, and there is none"),
        (only_by_name, "first parameter gets the Resume, and there is none"),
        (context_first, "the first parameter gets the Resume, and context is not one"),
        (not_annotated, "annotate payload, with Context or with the type of the payload"),
        (two_payloads, "more than one payload parameter"),
        (two_contexts, "more than one Context parameter"),
        (context_with_default, "context has a default, so it would not get the Context"),
        (context_or_none, "context has a default, so it would not get the Context"),
        (opaque, "payload: pydantic can't validate Opaque"),
        (unresolved, "payload: OnlyForTypes is not defined at the top of its module"),
        (a_dict, "the first parameter gets the Resume, and resume is not one"),
    ],
)
@pytest.mark.parametrize("place", ["flow", "name", "default", "default()"])
def test_a_signature_that_cannot_be_used_is_refused_at_registration(function: Any, complaint: str, place: str) -> None:
    """Not at the first resume at night, but when the module is loaded, with the function's name and what to do."""
    handlers = Handlers()
    register = {
        "flow": handlers.flow("f"),
        "name": handlers.name("n"),
        "default": handlers.default,
        "default()": handlers.default(),
    }[place]
    with pytest.raises(ValueError, match=complaint):
        register(function)
    assert len(handlers) == 0


# -- payloads ---------------------------------------------------------------------------------------------------


async def a_model(resume: Resume, payload: Reminder) -> Any:
    return retry(payload.tries)


async def a_dataclass(resume: Resume, payload: Point) -> Any:
    assert isinstance(payload, Point)
    return retry(payload.x)


async def a_typed_dict(resume: Resume, payload: Ticket) -> Any:
    return retry(payload["number"])


async def a_list(resume: Resume, payload: list[int]) -> Any:
    return retry(sum(payload))


async def a_union(resume: Resume, payload: Reminder | int) -> Any:
    return retry(payload if isinstance(payload, int) else payload.tries)


def in_a_thread(resume: Resume, payload: Reminder) -> Any:
    assert threading.current_thread() is not threading.main_thread()
    return retry(payload.tries)


@pytest.mark.parametrize(
    ("function", "payload", "delay_ms"),
    [
        (a_model, {"to": "a", "tries": 7}, 7),
        (a_dataclass, {"x": 7, "y": 1}, 7),
        (a_typed_dict, {"number": 7}, 7),
        (a_list, [3, 4], 7),
        (a_union, {"to": "a", "tries": 7}, 7),
        (a_union, 7, 7),
        (in_a_thread, {"to": "a", "tries": 7}, 7),
    ],
)
async def test_a_payload_comes_as_its_type(function: Any, payload: Any, delay_ms: int) -> None:
    """Whatever pydantic can validate: models, dataclasses, TypedDicts, built-in types, unions of them."""
    assert await call(function, payload) == Retry(delay_ms)


@pytest.mark.parametrize(
    ("function", "payload", "complaint"),
    [
        (a_model, {"tries": 1}, "the payload is not of type Reminder: to: Field required"),
        (a_model, {"to": "secret", "tries": "1"}, "tries: Input should be a valid integer"),
        (a_model, None, "not of type Reminder"),
        (a_list, ["x"] * 9, "4: Input should be .*; and 4 more"),
        (in_a_thread, [], "not of type Reminder"),
    ],
)
async def test_a_payload_of_another_type_is_refused(function: Any, payload: Any, complaint: str) -> None:
    """The handler is not called; the reason names the fields and does not repeat the values."""
    with pytest.raises(HandoffRefused, match=complaint) as caught:
        await call(function, payload)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


class Fragile(pydantic.BaseModel):
    n: int

    @pydantic.field_validator("n")
    @classmethod
    def _check(cls, value: int) -> int:
        raise RuntimeError("a mistake in the validator")


async def fragile(resume: Resume, payload: Fragile) -> None: ...


async def test_a_mistake_in_a_validator_is_a_failure() -> None:
    """Code of the handler's author that raises is no verdict on the payload: the resume is handed off again."""
    with pytest.raises(HandlerFailed, match="a mistake in the validator"):
        await call(fragile, {"n": 1})


# -- the context ------------------------------------------------------------------------------------------------


def test_the_logger_knows_the_hand_off() -> None:
    """What a handler logs says to which resume, flow, node and attempt it belongs."""
    with capture_logs() as logs:
        context = context_of(flow="billing", node="pay")
        context.logger.info("reminded", by="mail")
        context_of().logger.info("named")
    resume = context.resume
    assert logs[0] == {
        "event": "reminded", "log_level": "info", "by": "mail",
        "resume_id": resume.resume_id, "flow": "flow:x", "node": "pay", "attempt": 3,
    }  # fmt: skip
    assert "node" not in logs[1]


def test_without_a_time_out_there_is_no_deadline_until_the_process_stops() -> None:
    """A lease is renewed as long as the handler runs, so nothing ends it but the grace at the end."""
    clock = ManualClock(1_000)
    deadline = Deadline(clock)
    context = context_of(deadline=deadline)
    assert (context.deadline_ms, context.remaining_ms, context.stopping) == (None, None, False)
    deadline.stop(500)
    assert (context.deadline_ms, context.remaining_ms, context.stopping) == (1_500, 500, True)
    clock.advance(600)
    assert context.remaining_ms == 0


@pytest.mark.parametrize(("timeout_ms", "grace_ms", "at_ms"), [(300, 500, 1_300), (500, 300, 1_300)])
def test_a_deadline_only_comes_nearer(timeout_ms: int, grace_ms: int, at_ms: int) -> None:
    """Of time-out and grace the earlier counts."""
    deadline = Deadline(ManualClock(1_000))
    deadline.within(timeout_ms)
    deadline.stop(grace_ms)
    assert deadline.at_ms == at_ms


# -- time-outs --------------------------------------------------------------------------------------------------


async def test_a_handler_in_time_is_left_alone() -> None:
    """Its answer counts, and it could see until when it had time."""
    seen: list[int] = []

    async def handler(resume: Resume, context: Context) -> Any:
        seen.append(context.remaining_ms or 0)
        return done()

    assert await call(handler, timeout_ms=60_000) == Done()
    assert 0 < seen[0] <= 60_000


@pytest.mark.parametrize("at_last", ["raises", "answers", "returns", "fails"])
async def test_a_late_handler_is_cancelled_and_has_failed(at_last: str) -> None:
    """It is cancelled at the time-out, and nothing that it says after that counts."""
    cancelled = []

    async def handler(resume: Resume) -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            if at_last == "raises":
                raise
            if at_last == "fails":
                raise RuntimeError("too bad") from None
            return retry(1) if at_last == "answers" else None

    with pytest.raises(HandlerFailed, match="time-out: it took longer than 20 ms"):
        await call(handler, timeout_ms=20)
    assert cancelled == [1]


async def test_a_late_handler_is_waited_for() -> None:
    """While it cleans up, or ignores its cancellation, nobody else may have the resume: the call goes on."""
    release, cleaning = asyncio.Event(), asyncio.Event()

    async def handler(resume: Resume) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaning.set()
            await release.wait()

    attempt = Call(Handler(handler, timeout_ms=20), context_of())
    running = asyncio.create_task(attempt.run())
    await cleaning.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not running.done()
    assert not attempt.ended
    release.set()
    with pytest.raises(HandlerFailed, match="time-out"):
        await running
    assert attempt.ended


@pytest.mark.parametrize("timeout_ms", [0, -1, 1.5, True, "5", 86_400_001])
def test_a_wrong_time_out_is_refused(timeout_ms: Any) -> None:
    """Whole milliseconds, up to a day."""
    with pytest.raises(ValueError, match="timeout_ms is an integer from 1"):
        Handlers().default(timeout_ms=timeout_ms)(plain)


@pytest.mark.parametrize("register", [Handlers().flow, Handlers().name])
def test_a_plain_function_takes_no_time_out(register: Any) -> None:
    """A thread can't be cancelled: promising it would be a lie, so it is refused at registration."""
    with pytest.raises(ValueError, match="in_a_thread runs in a thread, which can't be cancelled"):
        register("x", timeout_ms=5)(in_a_thread)
    register("x", timeout_ms=5)(a_model)


# -- in the relay -----------------------------------------------------------------------------------------------


class Stage:
    def __init__(self) -> None:
        self.outbox, self.handlers, self.sender = MemoryOutbox(), Handlers(), FakeSender()
        policy = Policy(lease_ms=60_000, backoff_initial_ms=1, backoff_max_ms=4)
        self.relay = Relay(self.outbox, self.handlers, self.sender, owner="me", policy=policy)

    async def put(self, name: str, **fields: Any) -> None:
        await self.outbox.insert([new_row(name, **fields)])
        self.relay.wake()

    async def reaches(self, state: State, name: str) -> Any:
        async def there() -> Any:
            row = await self.outbox.get(resume_body(name)["resume_id"])
            return row if row is not None and row.state is state else None

        return await until(there, f"{name} is {state}")


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    running = asyncio.create_task(made.relay.run())
    yield made
    made.relay.stop()
    await running


async def test_a_refused_payload_is_dead_at_once(stage: Stage) -> None:
    """One hand-off, no retry, the reason in the row; nothing is told to the timer service."""
    calls = []

    @stage.handlers.default
    async def handler(resume: Resume, payload: Reminder) -> None:
        calls.append(payload)

    await stage.put("bad", payload={"to": 5})
    row = await stage.reaches(State.DEAD, "bad")
    assert row.attempts == 1
    assert row.last_error == "the payload is not of type Reminder: to: Input should be a valid string"
    assert (calls, stage.sender.sent) == ([], [])
    await stage.put("good", payload={"to": "anna"})
    await stage.reaches(State.DONE, "good")
    assert calls == [Reminder(to="anna")]


async def test_a_time_out_is_a_failed_hand_off(stage: Stage) -> None:
    """The resume is handed off again, as after an exception; attempt tells how often."""
    attempts: list[int] = []

    @stage.handlers.default(timeout_ms=20)
    async def handler(resume: Resume, context: Context) -> None:
        attempts.append(context.attempt)
        if len(attempts) < 3:
            await asyncio.sleep(60)

    await stage.put("slow")
    row = await stage.reaches(State.DONE, "slow")
    assert attempts == [1, 2, 3]
    assert row.attempts == 3
