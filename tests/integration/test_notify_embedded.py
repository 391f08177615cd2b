"""The notify consumer within another asyncio program: start, stop, health, failures; it leaves the program alone."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import structlog

from notify_consumer import Context, Resume
from notify_consumer.app import NotifyConsumer
from notify_consumer.outbox.base import State
from tests.support.notify import until
from tests.support.notify_bench import Bench, codes, gets_ready, reaches


def program_settings() -> list[Any]:
    """What a library has no business changing."""
    root = logging.getLogger()
    return [
        [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
        [root.level, list(root.handlers), logging.getLogger("nats.aio.client").level],
        structlog.get_config(),
        asyncio.get_running_loop().get_exception_handler(),
    ]


async def test_it_works_within_another_program(bench: Bench) -> None:
    """A block in which resumes are handed off; at its end all is drained. Signals and logging stay as they were."""
    before, tasks = program_settings(), asyncio.all_tasks()
    release = asyncio.Event()

    @bench.handlers.default
    async def handler(resume: Resume) -> None:
        await release.wait()

    async with NotifyConsumer(bench.settings(), bench.handlers) as consumer:
        assert "outbox_unavailable" in codes(consumer.health)
        await gets_ready(consumer)
        assert consumer.health.ready
        assert consumer.health.details["instance"] == "test"
        assert program_settings() == before
        await bench.publish("order-1")
        await reaches(consumer, State.CLAIMED)
        asyncio.get_running_loop().call_later(0.05, release.set)
    assert len(bench.commands) == 1
    assert codes(consumer.health) == {"draining"}
    assert program_settings() == before
    assert asyncio.all_tasks() - tasks == set()
    await consumer.wait()


async def test_http_is_served_only_when_asked_for(bench: Bench) -> None:
    """The address in the settings may be taken by somebody else: it is not touched. With http=True it raises."""
    bench.handlers.default(lambda resume: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = bench.settings(http=f"127.0.0.1:{taken.getsockname()[1]}")
        async with NotifyConsumer(settings, bench.handlers) as consumer:
            await gets_ready(consumer)
        refused = NotifyConsumer(settings, bench.handlers, http=True)
        with pytest.raises(OSError, match="in use"):
            await refused.start()
        await refused.stop()


async def test_several_in_one_process(bench: Bench, tmp_path: Path) -> None:
    """Each with its own name; together they hand every resume off once, and one goes on when the other ends."""
    calls: list[str] = []

    @bench.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(resume.resume_id)
        await asyncio.sleep(0)

    first = NotifyConsumer(bench.settings(instance="one"), bench.handlers)
    async with NotifyConsumer(bench.settings(instance="two"), bench.handlers) as second:
        async with first:
            await gets_ready(first)
            await gets_ready(second)
            await bench.publish(*(f"r-{n}" for n in range(40)))
            await until(lambda: len(calls) == 40)
        await bench.publish("last")
        await reaches(second, State.DONE, "last")
    assert len(calls) == len(set(calls)) == 41


async def test_stopping_can_be_awaited_or_not(bench: Bench) -> None:
    """stop() begins to drain at once; what it returns can be awaited for the end, any number of times."""
    stopping = asyncio.Event()

    @bench.handlers.default
    async def handler(resume: Resume, context: Context) -> None:
        await until(lambda: context.stopping)
        assert 0 < (context.remaining_ms or 0) <= 5_000
        stopping.set()

    consumer = NotifyConsumer(bench.settings(), bench.handlers)
    await consumer.stop()  # not started: nothing to wait for
    consumer = NotifyConsumer(bench.settings(), bench.handlers)
    await consumer.start()
    await gets_ready(consumer)
    await bench.publish("order-1")
    await reaches(consumer, State.CLAIMED)
    consumer.stop()
    await stopping.wait()
    await asyncio.gather(consumer.stop(), consumer.stop(), consumer.wait())
    assert len(bench.commands) == 1
    with pytest.raises(RuntimeError, match="works once: make a new one"):
        await consumer.start()


async def test_stopping_before_it_is_ready(bench: Bench, tmp_path: Path) -> None:
    """Whoever waits for it to get ready hears that it will not."""
    (tmp_path / "outbox.db").mkdir()
    bench.handlers.default(lambda resume: None)
    async with NotifyConsumer(bench.settings(), bench.handlers) as consumer:
        await until(lambda: "outbox_unavailable" in codes(consumer.health))
        waiting = asyncio.create_task(consumer.until_ready())
        await asyncio.sleep(0)
        consumer.stop()
        with pytest.raises(RuntimeError, match="stopped before it was ready"):
            await waiting


class Broken(Exception):
    """Not foreseen."""


async def failing(bench: Bench) -> NotifyConsumer:
    """A consumer that was ready, and then fails by itself."""
    bench.handlers.default(lambda resume: None)
    consumer = NotifyConsumer(bench.settings(), bench.handlers)

    async def survey(limit: int) -> Any:
        raise Broken("the unforeseen")

    await consumer.start()
    await gets_ready(consumer)
    consumer.outbox.survey = survey  # type: ignore[method-assign]
    consumer.relay.wake()
    return consumer


async def test_a_failure_after_the_start_surfaces(bench: Bench) -> None:
    """wait() raises it, failure and health tell it, and everything is closed; nothing is left running."""
    tasks = asyncio.all_tasks()
    consumer = await failing(bench)
    with pytest.raises(Broken, match="the unforeseen"):
        await consumer.wait()
    assert isinstance(consumer.failure, Broken)
    (reason,) = consumer.health.reasons
    assert (reason.code, reason.message) == ("failed", "Broken: the unforeseen")
    with pytest.raises(Broken):
        await consumer.until_ready()
    await consumer.stop()
    assert not consumer.connection.connected
    assert asyncio.all_tasks() - tasks == set()


async def test_a_failure_leaves_the_block(bench: Bench) -> None:
    """A program that only uses the block learns of it at its end; its own error comes first."""
    consumer = await failing(bench)
    await until(lambda: consumer.failure is not None)
    with pytest.raises(Broken):
        await consumer.__aexit__(None, None, None)
    own = RuntimeError("the program's own")
    assert await consumer.__aexit__(type(own), own, None) is None  # type: ignore[func-returns-value]


async def test_outbox_and_hand_offs_are_measured(bench: Bench) -> None:
    """Depth by state, age of what waits, how long handlers run: each name tells its unit."""
    release = asyncio.Event()

    @bench.handlers.name("slow")
    async def slow(resume: Resume) -> None:
        await release.wait()

    bench.handlers.name("fast")(lambda resume: None)

    async with NotifyConsumer(bench.settings(), bench.handlers) as consumer:
        registry = consumer.metrics.registry

        def value(name: str, **labels: str) -> float:
            return registry.get_sample_value(f"notify_consumer_{name}", labels) or 0.0

        await gets_ready(consumer)
        await bench.publish("fast-1", "slow-1")
        await reaches(consumer, State.DONE, "fast-1")
        await until(lambda: value("rows", state="claimed") == 1 and value("longest_handler_seconds") > 0)
        assert value("rows", state="done") == 1
        assert value("handler_seconds_count") == 1
        assert value("wait_seconds_count") >= 2
        assert value("oldest_ready_seconds", state="pending") == 0
        release.set()
        await until(lambda: value("handler_seconds_count") == 2)
        assert value("handler_seconds_sum") >= 0
