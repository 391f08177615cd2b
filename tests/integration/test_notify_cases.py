"""Cases C24, C33 and C38 on a real broker: flows that fail, hang or come in thousands, and an outbox that is locked."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner

from notify_consumer import Resume, retention
from notify_consumer.app import App
from notify_consumer.cli import app as command_line
from notify_consumer.outbox.base import State
from notify_consumer.relay import SENDING_LIMIT
from tests.support.notify import resume_body, until
from tests.support.notify_bench import Bench, codes, reaches
from tests.support.outbox_urls import on_all_stores, on_two_stores, outbox_url
from timer_service.jetstream import topology
from timer_service.jetstream.topology import Sizes

__all__ = ["outbox_url"]

CONCURRENCY = 32
SHARE = 16
NEVER_MS = 86_400_000


@pytest.fixture
def short_logs() -> Iterator[None]:
    """Hundreds of exceptions, drawn as they are for people, take half a minute."""
    before = structlog.get_config()
    structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
    yield
    structlog.configure(**before)


async def all_reach(app: App, state: State, count: int) -> None:
    async def there() -> bool:
        return (await app.outbox.counts())[state] == count

    await until(there, f"{count} rows are {state}")


def runs(flow: str, count: int) -> list[str]:
    return [f"{flow}-{n}" for n in range(count)]


# -- C24 ------------------------------------------------------------------------------------------------------


@on_two_stores
@pytest.mark.usefixtures("short_logs")
async def test_c24_a_flow_that_always_fails_leaves_others_alone(bench: Bench, outbox_url: str) -> None:
    """200 resumes of X fail and wait out their backoff, each visible with its reason; Y is handed off meanwhile."""

    @bench.handlers.flow("x")
    async def fails(resume: Resume) -> None:
        raise RuntimeError("x is broken")

    bench.handlers.flow("y")(lambda resume: None)
    async with bench.running(outbox=outbox_url, backoff_initial_ms=NEVER_MS, backoff_max_ms=NEVER_MS) as app:
        await bench.publish(*runs("x", 200), flow="x")
        await bench.publish(*runs("y", 10), flow="y")
        await all_reach(app, State.DONE, 10)

        async def all_failed() -> bool:
            rows = await app.outbox.browse(State.PENDING, 1_000)
            return [row.last_error for row in rows] == ["RuntimeError: x is broken"] * 200

        await until(all_failed, "all of x have failed once")
        rows = await app.outbox.browse(State.PENDING, 1_000)
        assert {(row.flow, row.attempts) for row in rows} == {("flow:x", 1)}
        # It is known until when each of them waits.
        assert all((row.claimable_at_ms or 0) - row.updated_at_ms == NEVER_MS for row in rows)
        await bench.publish("y-late", flow="y")
        await reaches(app, State.DONE, "y-late", flow="y")
    assert {kind for kind, _ in bench.commands} == {"complete"}
    assert len(bench.commands) == 11


@pytest.mark.usefixtures("short_logs")
async def test_c24_with_max_attempts_a_failing_flow_ends_up_dead_and_can_be_revived(
    bench: Bench, outbox_url: str
) -> None:
    """200 resumes of X are put aside after their last attempt, none is lost; the command line brings them back."""
    broken = True

    @bench.handlers.flow("x")
    async def fails(resume: Resume) -> None:
        if broken:
            raise RuntimeError("x is broken")

    async with bench.running(outbox=outbox_url, max_attempts=2) as app:
        await bench.publish(*runs("x", 200), flow="x")
        await all_reach(app, State.DEAD, 200)
        rows = await app.outbox.browse(State.DEAD, 1_000)
        assert {row.last_error for row in rows} == {"attempt 2, the last one: RuntimeError: x is broken"}
        assert not bench.commands
        broken = False
        revived = resume_body("x-7", flow="x")["resume_id"]
        result = await asyncio.to_thread(CliRunner().invoke, command_line, _revive(revived, outbox_url))
        assert result.output == f"{revived} is pending\n"
        row = await reaches(app, State.DONE, "x-7", flow="x")
        assert (row.attempts, row.last_error) == (1, None)
        assert (await app.outbox.counts())[State.DEAD] == 199


def _revive(resume_id: str, outbox_url: str) -> list[str]:
    return ["outbox", "revive", resume_id, "--outbox", outbox_url]


# -- a slow flow, and a long backlog --------------------------------------------------------------------------


@on_all_stores
async def test_c38_a_backlog_of_a_slow_flow_does_not_keep_fresh_ones_waiting(bench: Bench, outbox_url: str) -> None:
    """2,000 resumes at start, none of whose handlers ends: half of the slots, no more in memory; others go through."""
    release, running = asyncio.Event(), 0

    @bench.handlers.flow("slow")
    async def slow(resume: Resume) -> None:
        nonlocal running
        running += 1
        await release.wait()
        running -= 1

    bench.handlers.flow("fresh")(lambda resume: None)
    await bench.publish(*runs("slow", 2_000), flow="slow")
    async with bench.running(outbox=outbox_url) as app:
        await until(lambda: running == SHARE, "the slow flow takes its share")
        for name in runs("fresh", 20):
            await bench.publish(name, flow="fresh")
            await reaches(app, State.DONE, name, flow="fresh")
            assert running == SHARE
            assert app.relay.handling <= SHARE + 1
        counts = await app.outbox.counts()
        assert (counts[State.CLAIMED], counts[State.PENDING]) == (SHARE, 2_000 - SHARE)
        assert len(app.relay._runs) <= CONCURRENCY + SENDING_LIMIT
        release.set()
        await all_reach(app, State.DONE, 2_020)
        await bench.all_read()
    assert len(bench.commands) == 2_020


# -- C33: the file is locked ----------------------------------------------------------------------------------


@pytest.fixture
def quick_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fortieth of the times: SQLite waits 50 ms for a lock, not 2 s, so a lock of 10 s is one of 0.25 s."""
    monkeypatch.setattr("notify_consumer.outbox.thread.BUSY_TIMEOUT_MS", 50)
    monkeypatch.setattr("notify_consumer.consumer.REDELIVER_MS", 50)
    monkeypatch.setattr("notify_consumer.work.RETRY_S", 0.02)
    monkeypatch.setattr("notify_consumer.relay.RETRY_S", 0.02)
    monkeypatch.setattr("notify_consumer.relay.POLL_S", 0.02)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another program is writing to the file; it can be read meanwhile."""
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        locker.execute("ROLLBACK")
        locker.close()


class Refusals:
    """Counts what the outbox could not do."""

    def __init__(self, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        report = app.relay.say_unavailable
        renew = app.outbox.renew

        def counted(reason: str) -> None:
            self.count += 1
            report(reason)

        async def counting(*args: Any) -> Any:
            try:
                return await renew(*args)
            except Exception:
                self.count += 1
                raise

        monkeypatch.setattr(app.relay, "say_unavailable", counted)
        monkeypatch.setattr(app.outbox, "renew", counting)


async def stays_unavailable(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is not ready with the reason, and does not say otherwise while one try after the other fails."""
    await until(lambda: codes(app.readiness()) == {"outbox_unavailable"}, "it says so")
    refusals = Refusals(app, monkeypatch)
    said: set[str] = set()

    def looked_on() -> bool:
        said.update([reason.message.rpartition(": ")[2] for reason in app.readiness().reasons] or ["ready"])
        return refusals.count >= 5

    await until(looked_on, "five more tries")
    assert said == {"database is locked"}


@pytest.mark.usefixtures("quick_to_give_up")
async def test_c33_locked_while_a_handler_runs(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock for several leases: not ready with the reason, the handler runs on, its answer is stored afterwards."""
    release, calls = asyncio.Event(), []

    @bench.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(resume.resume_id)
        await release.wait()

    async with bench.running(lease_ms=150) as app:
        await bench.publish("order-1")
        await until(lambda: calls)
        await bench.all_read()
        with locked(tmp_path / "outbox.db"):
            await stays_unavailable(app, monkeypatch)
            release.set()
            await stays_unavailable(app, monkeypatch)
            assert not bench.commands
        row = await reaches(app, State.DONE)
        await until(lambda: app.readiness().ready, "ready again")
    assert (row.attempts, len(calls), len(bench.commands)) == (1, 1, 1)


@pytest.mark.usefixtures("quick_to_give_up")
async def test_c33_locked_while_resumes_come_in(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing else to do: what can't be put away makes the process not ready, and is not acknowledged."""
    monkeypatch.setattr("notify_consumer.relay.POLL_S", 3_600)  # the relay finds nothing out by itself
    bench.handlers.default(lambda resume: None)
    async with bench.running() as app:
        with locked(tmp_path / "outbox.db"):
            assert app.readiness().ready  # nobody has needed to write
            await bench.publish("order-1")
            await stays_unavailable(app, monkeypatch)
            assert await bench.unread() == 1
        await reaches(app, State.DONE)
        await until(lambda: app.readiness().ready, "ready again")


@pytest.mark.usefixtures("quick_to_give_up")
async def test_c33_it_is_ready_again_although_nothing_comes(bench: Bench, tmp_path: Path) -> None:
    """Whoever failed need not succeed: the relay finds out by itself that the outbox can be written again."""
    async with bench.running() as app:
        with locked(tmp_path / "outbox.db"):
            app.relay.say_unavailable("somebody could not write")
            await until(lambda: "locked" in (app.relay.unavailable or ""), "the relay looks for itself")
        await until(lambda: app.readiness().ready, "ready again")


# -- how long done rows are kept ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("archive_s", "kept_s"),
    [(90 * 86_400, 7 * 86_400), (10 * 86_400, 5 * 86_400), (60, 30), (0, 7 * 86_400)],
)
async def test_done_rows_are_kept_for_half_the_archive_at_most(bench: Bench, archive_s: int, kept_s: int) -> None:
    """The setting counts, unless the archive (0: never) forgets the timer sooner: then rows go at half that age."""
    async with bench.running() as app:
        for spec in topology.streams(Sizes(archive_max_age_s=archive_s)):
            if spec.name == topology.TERMINALS:
                await bench.api(f"STREAM.CREATE.{spec.name}", spec.config(1))
        assert await retention.kept_ms(app.connection, 7 * 86_400_000) == kept_s * 1_000


async def test_without_an_archive_the_setting_counts(bench: Bench) -> None:
    """Where the archive is not there, or can't be asked, nothing goes sooner than is set."""
    async with bench.running() as app:
        assert await retention.kept_ms(app.connection, 1_234) == 1_234


async def test_done_rows_are_removed_while_it_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process forgets settled rows by itself when their time has come, and only those."""
    monkeypatch.setattr("notify_consumer.app.PRUNE_S", 0.02)
    monkeypatch.setattr("notify_consumer.app.RETRY_S", 0.02)
    release, asked = asyncio.Event(), []

    async def age(connection: Any, wanted_ms: int) -> int:
        asked.append(wanted_ms)
        return -1 if release.is_set() else wanted_ms

    monkeypatch.setattr("notify_consumer.app.kept_ms", age)

    @bench.handlers.flow("x")
    async def fails(resume: Resume) -> None:
        raise RuntimeError("stays")

    bench.handlers.default(lambda resume: None)
    async with bench.running(backoff_initial_ms=NEVER_MS, backoff_max_ms=NEVER_MS) as app:
        await bench.publish("order-1")
        await bench.publish("run-1", flow="x")
        await reaches(app, State.DONE)
        seen = len(asked)
        await until(lambda: len(asked) > seen + 2, "it has looked")
        assert set(asked) == {7 * 86_400_000}
        assert (await reaches(app, State.DONE)).settled == "accepted"
        release.set()
        await all_reach(app, State.DONE, 0)
        assert sum((await app.outbox.counts()).values()) == 1
