"""Timed actions: how they are defined, deferred, found, called, repeated; and the kit that tests them."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pydantic
import pytest
from structlog.testing import capture_logs

from notify_consumer import Done, Effect, Handlers, Resume, Retry, TimedAction, TimerScheduler, action
from notify_consumer.actions import Deferred, TimedActionTestKit, effects
from notify_consumer.actions.dispatch import NAMESPACE, retry_delay_ms
from notify_consumer.calls import Call
from notify_consumer.context import Context
from notify_consumer.errors import HandoffRefused
from notify_consumer.resume import read_resume
from tests.support.notify import resume_bytes
from timer_service.domain.model import MAX_DELAY_MS
from timer_service.wire.canonical import exact_json


class Line(pydantic.BaseModel):
    """One line of an order."""

    article: str
    count: int = pydantic.Field(alias="n")


class OrderTimers(TimedAction):
    """As a user writes it."""

    name = "order-timers"

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @action("expire")
    async def expire(self, order_id: str) -> Effect:
        self.seen.append((order_id, self.timer_name, self.previous_attempts))
        return self.effects.done()

    @action("nothing")
    async def nothing(self) -> None:
        self.seen.append("nothing")

    @action("anything")
    async def anything(self, argument) -> Effect:
        self.seen.append(argument)
        return effects.done()

    @action("line")
    def line(self, line: Line) -> Effect:
        assert threading.current_thread() is not threading.main_thread()
        self.seen.append((line, self.timer_name))
        return effects.done()

    @action("defaults")
    async def defaults(self, count: int = 3) -> None:
        self.seen.append(count)

    @action("fails")
    async def fails(self, argument: str) -> Effect:
        self.context.logger.info("trying")
        return self.effects.fail(f"no luck with {argument}")

    @action("raises")
    async def raises(self, what: str) -> None:
        errors: dict[str, BaseException] = {
            "error": RuntimeError("boom"),
            "cancelled": asyncio.CancelledError(),
            "exit": SystemExit(1),
        }
        raise errors[what]

    @action("wrong")
    async def wrong(self) -> Any:
        return True

    @action("slow", timeout_ms=20)
    async def slow(self) -> None:
        await asyncio.sleep(60)


# -- definition -------------------------------------------------------------------------------------------------


class Unnamed(TimedAction):
    @action("go")
    async def go(self) -> None: ...


class Heir(OrderTimers):
    name = "heir"

    @action("more")
    async def more(self) -> None: ...


def test_a_deferred_call_names_action_and_method() -> None:
    """The wire names stand in it, not the Python ones; without one the class's name; an heir has its own."""
    assert OrderTimers.expire.deferred("o-1") == Deferred("order-timers", "expire", b'"o-1"')
    assert Unnamed.go.deferred() == Deferred("Unnamed", "go", b"null")
    assert Heir.expire.deferred("o-1").action == "heir"
    assert Heir.more.deferred().payload == {"v": 1, "action": "heir", "handler": "more", "argument": None}


async def test_a_method_can_be_called_directly() -> None:
    """Through an object it is an ordinary method; only what belongs to a timer is not there."""
    order_timers = OrderTimers()
    await order_timers.nothing()
    assert order_timers.seen == ["nothing"]
    with pytest.raises(RuntimeError, match="no timer is calling; in tests use TimedActionTestKit"):
        await order_timers.expire("o-1")


def two_of_one_name() -> None:
    class Twice(TimedAction):
        @action("go")
        async def first(self) -> None: ...

        @action("go")
        async def second(self) -> None: ...

    Handlers().actions(Twice())


def two_arguments() -> None:
    @action("go")
    async def go(self: Unnamed, one: str, two: str) -> None: ...


def by_keyword() -> None:
    @action("go")
    async def go(self: Unnamed, *, one: str) -> None: ...


def opaque() -> None:
    @action("go")
    async def go(self: Unnamed, one: threading.Thread) -> None: ...


def unresolved() -> None:
    class Local: ...

    @action("go")
    async def go(self: Unnamed, one: Local) -> None: ...


def plain_with_time_out() -> None:
    class Plain(TimedAction):
        @action("go", timeout_ms=5)
        def go(self) -> None: ...

    Handlers().actions(Plain())


def static() -> None:
    class Static(TimedAction):
        @action("go")  # type: ignore[type-var]
        @staticmethod
        def go(one: str) -> None: ...


def of_the_class() -> None:
    class OfTheClass(TimedAction):
        @action("go")  # type: ignore[type-var]
        @classmethod
        def go(cls, one: str) -> None: ...


def without_self() -> None:
    class Selfless(TimedAction):
        @action("go")  # type: ignore[arg-type]
        def go() -> None: ...


def empty_name() -> None:
    class Nameless(TimedAction):
        name = ""


def without_methods() -> None:
    class Empty(TimedAction): ...

    Handlers().actions(Empty())


def registered_twice() -> None:
    Handlers().actions(OrderTimers(), OrderTimers())


@pytest.mark.parametrize(
    ("define", "complaint"),
    [
        (two_of_one_name, "Twice has two actions named 'go'"),
        (two_arguments, "an action takes one argument or none"),
        (by_keyword, "an action takes one argument or none"),
        (opaque, "one: pydantic can't validate Thread"),
        (unresolved, "Local is not defined at the top of its module"),
        (plain_with_time_out, "runs in a thread, which can't be cancelled"),
        (static, "an action is a method with self"),
        (of_the_class, "an action is a method with self"),
        (without_self, "an action is a method with self"),
        (empty_name, "the name of a timed action has 1 to 128"),
        (lambda: action("new\nline"), "the name of an action has 1 to 128"),
        (lambda: action(5), "the name of an action has 1 to 128"),  # type: ignore[arg-type]
        (without_methods, "Empty has no @action method"),
        (registered_twice, "there is a timed action 'order-timers' already"),
    ],
)
def test_what_cannot_be_called_is_refused_when_it_is_defined(define: Any, complaint: str) -> None:
    """At the class or at its registration, not when the first timer fires."""
    with pytest.raises(ValueError, match=complaint):
        define()


def test_a_class_is_not_an_action() -> None:
    """Forgetting the brackets is told."""
    with pytest.raises(TypeError, match="give an object of a TimedAction"):
        Handlers().actions(OrderTimers)  # type: ignore[arg-type]


# -- arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fits", "too_long"),
    [
        ("x" * 1022, "x" * 1023),
        ("ü" * 511, "ü" * 511 + "x"),
        ("€" * 340 + "xx", "€" * 340 + "xxx"),
        ("😀" * 255 + "xx", "😀" * 256),
        ('"' * 511, '"' * 512),
        ([1] * 510 + [22], [1] * 510 + [222]),
        ({"k": "x" * 1016}, {"k": "x" * 1017}),
        (10**1023, 10**1024),
    ],
)
def test_c42_an_argument_has_1024_bytes_at_most(fits: Any, too_long: Any) -> None:
    """C42: 1,024 bytes of JSON pass, one more is refused where it is deferred; bytes of UTF-8, not characters."""
    assert len(exact_json(fits)) == 1024
    assert OrderTimers.anything.deferred(fits).payload["argument"] == fits
    with pytest.raises(ValueError, match=r"the argument has 102[5-9] bytes of JSON; 1024 is the most: give an id"):
        OrderTimers.anything.deferred(too_long)


def test_c42_a_typed_argument_is_counted_as_it_is_kept() -> None:
    """C42: what counts is the JSON that the timer carries, aliases included."""
    around = len(b'{"article":"","n":1}')
    call = OrderTimers.line.deferred(Line(article="é" * ((1024 - around) // 2), n=1))
    assert len(call.argument) == 1024
    with pytest.raises(ValueError, match="the argument has 1025 bytes"):
        OrderTimers.line.deferred(Line(article="é" * ((1024 - around) // 2) + "x", n=1))


@pytest.mark.parametrize(
    ("defer", "error", "complaint"),
    [
        (lambda: OrderTimers.anything.deferred({1, 2}), ValueError, "not JSON: a set is not a JSON value"),
        (lambda: OrderTimers.anything.deferred(float("nan")), ValueError, "not JSON"),
        (lambda: OrderTimers.anything.deferred("\ud800"), ValueError, "not JSON"),
        (lambda: OrderTimers.expire.deferred(5), ValueError, "not what it takes: Input should be a valid string"),  # type: ignore[arg-type]
        (OrderTimers.expire.deferred, TypeError, "order_id"),
        (lambda: OrderTimers.nothing.deferred(1), TypeError, "too many"),  # type: ignore[call-arg]
        (lambda: OrderTimers.expire.deferred("a", "b"), TypeError, "too many"),  # type: ignore[call-arg]
    ],
)
def test_a_wrong_argument_is_refused_where_it_is_given(defer: Any, error: type[Exception], complaint: str) -> None:
    """The caller learns of it, and no timer is made that could only fail."""
    with pytest.raises(error, match=complaint):
        defer()


async def test_arguments_arrive_as_they_were_given() -> None:
    """Through JSON and back: any value, big integers too; models as models; a default as it was when deferred."""
    timers = OrderTimers()
    kit = TimedActionTestKit(timers)
    for argument in (None, 2**70, 1.5, [True, {"a": None}], "ü"):
        await kit.call(OrderTimers.anything.deferred(argument))
    assert timers.seen == [None, 2**70, 1.5, [True, {"a": None}], "ü"]
    timers.seen.clear()
    await kit.call(OrderTimers.line.deferred(Line(article="a", n=2)), timer_name="t")
    await kit.call("defaults")
    await kit.call("defaults", 4)
    await kit.call(OrderTimers.expire.deferred(order_id="o-1"), timer_name="expire-o-1", previous_attempts=7)
    assert timers.seen == [(Line(article="a", n=2), "t"), 3, 4, ("o-1", "expire-o-1", 7)]


# -- what comes of a call ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("previous", "delay_ms"),
    [(0, 3_000), (1, 6_000), (2, 12_000), (3, 24_000), (4, 30_000), (5, 30_000), (1_500, 30_000), (10**9, 30_000)],
)
async def test_a_failure_waits_3_s_doubling_to_30(previous: int, delay_ms: int) -> None:
    """However often it has failed, the numbers don't overflow."""
    assert retry_delay_ms(previous) == delay_ms
    run = await TimedActionTestKit(OrderTimers()).call("fails", "it", previous_attempts=previous)
    assert (run.done, run.again_in_ms) == (False, delay_ms)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (OrderTimers.fails.deferred("it"), "no luck with it"),
        (OrderTimers.raises.deferred("error"), "RuntimeError: boom"),
        (OrderTimers.raises.deferred("cancelled"), "CancelledError: the handler was cancelled from within"),
        (OrderTimers.raises.deferred("exit"), "SystemExit: 1"),
        (OrderTimers.wrong.deferred(), "TypeError: a timed action returns effects.done()"),
        (OrderTimers.slow.deferred(), "time-out: it took longer than 20 ms"),
    ],
)
async def test_every_failure_is_a_retry(call: Deferred, error: str) -> None:
    """A failure told, an exception, its own CancelledError, nonsense, a time-out: all wait again and are logged."""
    with capture_logs() as logs:
        run = await TimedActionTestKit(OrderTimers()).call(call, timer_name="t", previous_attempts=1)
    assert (run.done, run.again_in_ms) == (False, 6_000)
    (failed,) = [entry for entry in logs if entry["event"] == "action.failed"]
    assert failed["error"].startswith(error)
    assert (failed["timer"], failed["previous_attempts"], failed["again_in_ms"]) == ("t", 1, 6_000)


@pytest.mark.parametrize("call", [OrderTimers.expire.deferred("o-1"), OrderTimers.nothing.deferred()])
async def test_nothing_to_do_is_success(call: Deferred) -> None:
    """done() and None complete the timer."""
    assert (await TimedActionTestKit(OrderTimers()).call(call)).done


def test_a_failure_has_a_message() -> None:
    """Checked where it is made."""
    with pytest.raises(TypeError, match="the message of a failure is a str, not NoneType"):
        effects.fail(None)  # type: ignore[arg-type]


async def test_calls_at_the_same_time_see_their_own_timer() -> None:
    """One object serves all calls; name and attempts belong to each call, in tasks as in threads."""
    gate, seen = asyncio.Event(), []

    class Waiting(TimedAction):
        @action("go")
        async def go(self, expected: str) -> None:
            await gate.wait()
            seen.append((expected, self.timer_name, self.previous_attempts))

    kit = TimedActionTestKit(Waiting())
    async with asyncio.TaskGroup() as tasks:
        for n in range(3):
            tasks.create_task(kit.call("go", f"t{n}", timer_name=f"t{n}", previous_attempts=n))
        await asyncio.sleep(0)
        gate.set()
    assert sorted(seen) == [(f"t{n}", f"t{n}", n) for n in range(3)]


async def test_the_kit_knows_what_there_is() -> None:
    """A mistyped name is told, with those that exist; so is a call of another action."""
    kit = TimedActionTestKit(Unnamed())
    with pytest.raises(ValueError, match=r"Unnamed has no action 'gone', but \['go'\]"):
        await kit.call("gone")
    with pytest.raises(HandoffRefused, match="no timed action 'order-timers'"):
        await kit.call(OrderTimers.nothing.deferred())


async def test_a_cancelled_call_is_no_failure() -> None:
    """When the process stops the call is cancelled, not answered: the resume is handed off again elsewhere."""
    entered = asyncio.Event()

    class Waiting(TimedAction):
        @action("go")
        async def go(self) -> None:
            entered.set()
            await asyncio.sleep(60)

    running = asyncio.create_task(TimedActionTestKit(Waiting()).call("go"))
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


# -- beside other handlers --------------------------------------------------------------------------------------


def resume_of(payload: Any, name: str = "expire-o-1") -> Resume:
    from timer_service.domain.identity import NameKey, derive_timer_ref

    timer_ref = derive_timer_ref(NameKey(name, NAMESPACE))
    key = {"namespace": NAMESPACE, "name": name}
    return read_resume(resume_bytes(timer=key, timer_ref=timer_ref, resume_id=f"{timer_ref}.0", payload=payload))


PAYLOAD = OrderTimers.expire.deferred("o-1").payload


@pytest.fixture
def handlers() -> Handlers:
    table = Handlers()
    table.name("")(lambda resume: None)
    table.default(lambda resume: None)
    table.actions(OrderTimers(), Unnamed())
    return table


async def answer(handlers: Handlers, resume: Resume) -> Any:
    handler = handlers.find(resume)
    assert handler is not None
    return await Call(handler, Context(resume, flow="x", attempt=1)).run()


async def test_timed_actions_run_beside_other_handlers(handlers: Handlers) -> None:
    """Their timers go to them, whatever prefixes and defaults there are, and nobody else's do."""
    assert await answer(handlers, resume_of(PAYLOAD)) == Done()
    assert await answer(handlers, resume_of(OrderTimers.fails.deferred("x").payload)) == Retry(3_000)
    plain = handlers.find(read_resume(resume_bytes("expire-o-1", payload=PAYLOAD)))
    assert plain is not None
    assert "lambda" in plain.name
    assert len(handlers) == 2 + 9 + 1


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({**PAYLOAD, "action": "gone"}, "no timed action 'gone' with 'expire' is registered here"),
        ({**PAYLOAD, "handler": "gone"}, "no timed action 'order-timers' with 'gone' is registered here"),
        ({**PAYLOAD, "v": 2}, "not a timed action of version 1: v is 2"),
        ({**PAYLOAD, "v": True}, "not a timed action: "),
        ({**PAYLOAD, "more": 1}, "not a timed action: Object contains unknown field `more`"),
        ({"v": 1}, "not a timed action: Object missing required field `action`"),
        ({**PAYLOAD, "argument": 5}, "the argument is not of type str: Input should be a valid string"),
        (None, "not a timed action of version 1: v is None"),
        ([], "not a timed action of version 1: v is None"),
    ],
)
async def test_an_unknown_call_is_refused_with_the_reason(handlers: Handlers, payload: Any, reason: str) -> None:
    """What this process can't call goes to the dead state: it can be looked at, and revived by a newer program."""
    with pytest.raises(HandoffRefused, match=reason):
        await answer(handlers, resume_of(payload))


async def test_without_actions_their_timers_are_refused_too() -> None:
    """They never reach a default that knows nothing of them."""
    handlers = Handlers()
    handlers.default(lambda resume: None)
    with pytest.raises(HandoffRefused, match="no timed action 'order-timers'"):
        await answer(handlers, resume_of(PAYLOAD))


def test_each_action_has_its_own_share(handlers: Handlers) -> None:
    """One that keeps failing takes slots from no other; unknown ones are together, whatever they are called."""
    assert handlers.flow_of(resume_of(PAYLOAD)) == "action:order-timers/expire"
    assert handlers.flow_of(resume_of(Unnamed.go.deferred().payload)) == "action:Unnamed/go"
    assert handlers.flow_of(resume_of({**PAYLOAD, "action": "gone"})) == "action:"
    assert handlers.flow_of(resume_of(7)) == "action:"


# -- the scheduler ----------------------------------------------------------------------------------------------


class FakeTimers:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.state: dict[str, Any] | None = None

    async def start(self, timer: Any, **options: Any) -> None:
        self.calls.append(("start", dict(timer), options))

    async def delete(self, timer: Any) -> bool:
        self.calls.append(("delete", dict(timer), {}))
        return False

    async def get(self, timer: Any, *, payload: bool = True) -> dict[str, Any] | None:
        self.calls.append(("get", dict(timer), {"payload": payload}))
        return self.state


KEY = {"namespace": NAMESPACE, "name": "expire-o-1"}


@pytest.mark.parametrize(
    ("delay", "delay_ms"),
    [(1, 1), (60_000, 60_000), (timedelta(hours=1), 3_600_000), (timedelta(microseconds=1), 1),
     (timedelta(milliseconds=5, microseconds=1), 6), (MAX_DELAY_MS, MAX_DELAY_MS)],
)  # fmt: skip
async def test_a_timer_is_started_so_that_it_replaces_and_retries_without_end(delay: Any, delay_ms: int) -> None:
    """Start with if_exists replace and max_retries null, in the namespace of timed actions."""
    timers = FakeTimers()
    await TimerScheduler(timers).create_single_timer("expire-o-1", delay, OrderTimers.expire.deferred("o-1"))
    options = {"delay_ms": delay_ms, "payload": PAYLOAD, "max_retries": None, "if_exists": "replace"}
    assert timers.calls == [("start", KEY, options)]


@pytest.mark.parametrize(
    "delay",
    [0, -1, 1.5, True, timedelta(0), timedelta(seconds=-1), timedelta.max, timedelta.min, MAX_DELAY_MS + 1, "1"],
)
async def test_a_wrong_delay_is_refused(delay: Any) -> None:
    """Before anything is sent."""
    timers = FakeTimers()
    with pytest.raises((ValueError, TypeError), match=r"a delay is a timedelta|not supported"):
        await TimerScheduler(timers).create_single_timer("x", delay, OrderTimers.nothing.deferred())
    assert timers.calls == []


async def test_what_is_not_deferred_is_refused() -> None:
    """Passing the method, or calling it, is told."""
    with pytest.raises(TypeError, match=r"give Action.method.deferred\(argument\)"):
        await TimerScheduler(FakeTimers()).create_single_timer("x", 1, OrderTimers.nothing)  # type: ignore[arg-type]


async def test_deleting_what_is_not_there_is_fine() -> None:
    """delete() passes on whether there was one."""
    timers = FakeTimers()
    assert await TimerScheduler(timers).delete("expire-o-1") is False
    assert timers.calls == [("delete", KEY, {})]


@pytest.mark.parametrize(
    ("state", "exists"),
    [
        (None, False),
        ({"phase": "waiting"}, True),
        ({"phase": "elapsed"}, True),
        ({"phase": "elapsed", "cancel_requested": True}, False),
        ({"phase": "completed", "status": "completed"}, False),
    ],
)
async def test_a_timer_exists_until_it_is_done_or_deleted(state: dict[str, Any] | None, exists: bool) -> None:
    """Also while its call is being made; no longer once it was deleted, though the call may still run."""
    timers = FakeTimers()
    timers.state = state
    assert await TimerScheduler(timers).exists("expire-o-1") is exists
    assert timers.calls == [("get", KEY, {"payload": False})]
