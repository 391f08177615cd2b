"""Notify consumer processes that are killed, frozen and stopped, as an operator would run them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from notify_consumer.outbox.base import Row, State
from notify_consumer.outbox.sqlite import SqliteOutbox
from tests.support.broker import Broker
from tests.support.notify import resume_body, until
from tests.support.notify_bench import Bench

# Each hand-off writes what it does into a journal, and ends when its gate is there.
_HANDLERS = """
import asyncio, os, pathlib
from notify_consumer import Handlers

handlers = Handlers()
folder = pathlib.Path(__file__).parent

def note(what, resume):
    with open(folder / "journal", "a") as journal:
        journal.write(f"{what} {resume.timer['name']} {os.environ['WHO']}\\n")

@handlers.default
async def handler(resume):
    note("begin", resume)
    while not (folder / "gate").exists():
        await asyncio.sleep(0.01)
    note("end", resume)

@handlers.name("thread-")
def in_thread(resume):
    import time
    note("begin", resume)
    while not (folder / "gate").exists():
        time.sleep(0.01)

@handlers.name("stubborn-")
async def stubborn(resume):
    note("begin", resume)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
"""


class Consumer:
    """One ``notify-consumer serve`` process."""

    def __init__(self, bench: Bench, who: str, **options: Any) -> None:
        self._bench = bench
        self._log = bench.folder / f"{who}.log"
        self._who = who
        self._options = {
            "nats": bench.url,
            "http": "127.0.0.1:0",
            "instance": who,
            "handlers": "killed_handlers",
            "outbox": f"sqlite:{bench.folder / 'outbox.db'}",
            "lease-ms": 400,
        } | {name.replace("_", "-"): value for name, value in options.items()}
        self.process: asyncio.subprocess.Process

    async def start(self) -> Consumer:
        options = [part for name, value in self._options.items() for part in (f"--{name}", str(value))]
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "notify_consumer", "serve", *options),
                cwd=self._bench.folder,
                env={**os.environ, "WHO": self._who, "PYTHONPATH": str(Path(__file__).parents[2])},
                stderr=log,
            )
        await until(lambda: self.logged("service.ready") or self.process.returncode is not None)
        assert self.process.returncode is None, self._log.read_text()
        return self

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def ready(self) -> bool:
        port = self.logged("http.listening")[-1]["port"]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as reply:
                return bool(reply.status == 200)
        except urllib.error.HTTPError as error:
            with error:
                return False

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ends(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 20)


class Killing(Bench):
    """The bench with processes; all of them are gone at the end."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(url, folder)
        self.consumers: list[Consumer] = []
        (folder / "killed_handlers.py").write_text(_HANDLERS)

    async def consumer(self, who: str, **options: Any) -> Consumer:
        made = Consumer(self, who, **options)
        self.consumers.append(made)
        return await made.start()

    def journal(self) -> list[str]:
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def open_gate(self) -> None:
        (self.folder / "gate").touch()

    async def row(self, name: str) -> Row | None:
        outbox = SqliteOutbox(str(self.folder / "outbox.db"))
        try:
            return await outbox.get(resume_body(name)["resume_id"])
        finally:
            await outbox.close()

    def expire(self, name: str) -> None:
        """Let the lease of a row run out now."""
        resume_id = resume_body(name)["resume_id"]
        with sqlite3.connect(self.folder / "outbox.db") as file:
            file.execute("UPDATE outbox SET claimable_at = 1 WHERE resume_id = ?", (resume_id,))
        file.close()

    async def reaches(self, state: State, name: str) -> Row:
        async def there() -> Row | None:
            row = await self.row(name)
            return row if row is not None and row.state is state else None

        row: Row = await until(there, f"{name} is {state}")
        return row

    async def begun(self, line: str) -> None:
        await until(lambda: line in self.journal(), f"{line} in the journal")


@pytest.fixture
async def bench(broker: Broker, tmp_path: Path) -> AsyncIterator[Killing]:
    made = Killing(broker.url, tmp_path)
    await made.connect()
    await made.provide_streams()
    yield made
    for consumer in made.consumers:
        if consumer.process.returncode is None:
            consumer.process.kill()
            await consumer.process.wait()
    await made.nats.close()


async def test_claims_of_a_killed_process_are_recovered_at_their_expiry(bench: Killing) -> None:
    """SIGKILL with a claim held: the next process under the same name leaves it until the lease runs out."""
    first = await bench.consumer("first", lease_ms=600_000, instance="same-name")
    await bench.publish("a-1")
    await bench.begun("begin a-1 first")
    first.signal(signal.SIGKILL)
    await first.ends()
    await bench.consumer("second", lease_ms=600_000, instance="same-name")
    await bench.publish("b-1")
    await bench.begun("begin b-1 second")
    row = await bench.row("a-1")
    assert row is not None
    assert f"/{first.process.pid}/" in (row.owner or "")
    bench.expire("a-1")
    await bench.begun("begin a-1 second")
    bench.open_gate()
    row = await bench.reaches(State.DONE, "a-1")
    assert row.attempts == 2
    assert bench.journal().count("begin a-1 second") == 1
    await until(lambda: len(bench.commands) == 2)


async def test_a_frozen_process_that_comes_back_changes_nothing(bench: Killing) -> None:
    """SIGSTOP past the lease; another takes over; the frozen one goes on and is refused, its handler ended."""
    first = await bench.consumer("first")
    await bench.publish("a-1")
    await bench.begun("begin a-1 first")
    first.signal(signal.SIGSTOP)
    await bench.consumer("second")
    await bench.begun("begin a-1 second")
    first.signal(signal.SIGCONT)
    await until(lambda: first.logged("lease.lost"), "the first one notices")
    bench.open_gate()
    row = await bench.reaches(State.DONE, "a-1")
    assert row.attempts == 2
    assert bench.journal() == ["begin a-1 first", "begin a-1 second", "end a-1 second"]
    assert len(bench.commands) == 1


async def test_a_stop_during_a_long_hand_off_finishes_it(bench: Killing) -> None:
    """SIGTERM while a handler runs for more than its lease, two processes: not ready, one hand-off, exit 0."""
    first = await bench.consumer("first")
    await bench.publish("a-1")
    await bench.begun("begin a-1 first")
    await bench.consumer("second")
    first.signal(signal.SIGTERM)
    await until(lambda: first.logged("service.draining"))
    assert not await asyncio.to_thread(first.ready)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await until(lambda: loop.time() - begun > 1.0)  # more than two leases
    assert first.process.returncode is None
    assert not await asyncio.to_thread(first.ready)  # still answered: HTTP goes last
    bench.open_gate()
    assert await first.ends() == 0
    assert (await bench.reaches(State.DONE, "a-1")).attempts == 1
    assert bench.journal() == ["begin a-1 first", "end a-1 first"]
    assert len(bench.commands) == 1


async def test_after_the_grace_the_work_goes_to_another(bench: Killing) -> None:
    """A handler that outlasts the grace is cut off and its row given back at once: no lease has to run out."""
    first = await bench.consumer("first", drain_grace_ms=100, lease_ms=600_000)
    await bench.publish("a-1")
    await bench.begun("begin a-1 first")
    first.signal(signal.SIGTERM)
    assert await first.ends() == 0
    bench.open_gate()
    await bench.consumer("second", lease_ms=600_000)
    await bench.reaches(State.DONE, "a-1")
    assert bench.journal()[-1] == "end a-1 second"


@pytest.mark.parametrize("name", ["thread-1", "stubborn-1"])
async def test_what_cannot_be_stopped_does_not_hold_up_the_exit(bench: Killing, name: str) -> None:
    """A thread that hangs, and a handler that ignores its cancellation: exit 0 after the grace all the same."""
    first = await bench.consumer("first", drain_grace_ms=100, lease_ms=600_000)
    await bench.publish(name)
    await bench.begun(f"begin {name} first")
    first.signal(signal.SIGTERM)
    assert await first.ends() == 0
    row = await bench.row(name)
    assert row is not None
    assert row.state is State.CLAIMED


async def test_a_second_signal_ends_at_once(bench: Killing) -> None:
    """The first signal drains; the second kills, whatever runs."""
    first = await bench.consumer("first", drain_grace_ms=600_000)
    await bench.publish("a-1")
    await bench.begun("begin a-1 first")
    first.signal(signal.SIGTERM)
    await until(lambda: first.logged("service.draining"))
    first.signal(signal.SIGTERM)
    assert await first.ends() == -signal.SIGTERM


async def test_an_idle_process_stops_cleanly(bench: Killing) -> None:
    """SIGINT without work: exit 0, and nothing on the log above a warning."""
    first = await bench.consumer("first")
    first.signal(signal.SIGINT)
    assert await first.ends() == 0
    assert first.logged("service.stopped")
    assert not [line for event in ("work.failed",) for line in first.logged(event)]
