"""The notify consumer on a real broker: resumes in, handlers, feedback out, and what goes wrong between."""

from __future__ import annotations

import asyncio
import sqlite3
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from notify_consumer import Resume, fail, retry
from notify_consumer.consumer import BATCH, WINDOW
from notify_consumer.outbox.base import State
from tests.support.broker import Broker
from tests.support.notify import resume_body, resume_bytes, until
from tests.support.notify_bench import Bench, codes, reaches
from timer_service.jetstream.topology import LEASE_STREAM, RESUME_CONSUMER, RESUME_SERVICE, RESUMES

# -- the way through ------------------------------------------------------------------------------------------


async def test_a_resume_goes_all_the_way(bench: Bench) -> None:
    """Resume, handler, Retry command with the resume's generation and fence, outcome, done; the message is acked."""
    seen: list[Resume] = []

    @bench.handlers.flow("billing", node="wait")
    async def handler(resume: Resume) -> Any:
        seen.append(resume)
        return retry(delay_ms=60_000)

    async with bench.running() as app:
        await bench.publish("run-1", flow="billing", payload={"big": 2**70}, generation=4, fence=11)
        row = await reaches(app, State.DONE, "run-1", flow="billing", generation=4)
        await bench.all_read()
    assert [resume.payload for resume in seen] == [{"big": 2**70}]
    assert bench.commands == [
        (
            "retry",
            {
                "v": 1,
                "command_id": f"notify:{row.resume_id}",
                "timer_ref": seen[0].timer_ref,
                "generation": 4,
                "fence": 11,
                "due": {"delay_ms": 60_000},
            },
        )
    ]


async def test_a_resume_does_not_wait_for_a_poll(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes in is handed off at once: it takes no periodic look at the outbox."""
    monkeypatch.setattr("notify_consumer.relay.POLL_S", 3_600)
    bench.handlers.default(lambda resume: None)
    async with bench.running() as app:
        for name in ("a-1", "a-2", "a-3"):
            await bench.publish(name)
            await reaches(app, State.DONE, name)


async def test_what_arrives_together_is_handled_once_each(bench: Bench) -> None:
    """More resumes than the window: each is handed off once, all are acknowledged."""
    calls: list[str] = []
    bench.handlers.default(lambda resume: calls.append(resume.resume_id))
    names = [f"r-{n}" for n in range(600)]
    for name in names:
        await bench.nats.publish("triggers.v2.durable_timer.resume.v1", resume_bytes(name))
    await bench.nats.flush()
    async with bench.running() as app:

        async def all_done() -> bool:
            return (await app.outbox.counts())[State.DONE] == len(names)

        await until(all_done, "all are done")
        await bench.all_read()
    assert len(calls) == len(set(calls)) == len(names)


async def test_the_consumer_is_made_when_missing(bench: Bench) -> None:
    """Where nobody has provisioned the durable consumer the notify consumer does, to the letter of the policy."""
    bench.handlers.default(lambda resume: None)
    async with bench.running():
        info = await bench.api(f"CONSUMER.INFO.{RESUMES}.{RESUME_CONSUMER}")
    wanted = RESUME_SERVICE.config()
    assert {field: info["config"].get(field) for field in wanted} == wanted


# -- duplicates -----------------------------------------------------------------------------------------------


async def test_a_repeated_resume_heals_a_lost_answer(bench: Bench) -> None:
    """A resume whose row is done is not handed off again; its stored feedback is sent once more, the same."""
    calls: list[str] = []

    @bench.handlers.default
    async def handler(resume: Resume) -> Any:
        calls.append(resume.resume_id)
        return fail("broken", "why")

    async with bench.running() as app:
        await bench.publish("order-1")
        await reaches(app, State.DONE)
        bench.answer = {"status": "duplicate", "code": None}
        await bench.publish("order-1")
        await until(lambda: len(bench.commands) == 2)
        assert (await reaches(app, State.DONE)).settled == "duplicate"
        await bench.all_read()
    assert len(calls) == 1
    assert bench.commands[0] == bench.commands[1]


async def test_a_repeated_resume_of_a_row_at_work_changes_nothing(bench: Bench) -> None:
    """While the first hand-off runs, further copies are acknowledged and dropped."""
    release, calls = asyncio.Event(), []

    @bench.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(resume.resume_id)
        await release.wait()

    async with bench.running() as app:
        await bench.publish("order-1")
        await until(lambda: calls)
        await bench.publish("order-1", "order-1")
        await bench.all_read()
        release.set()
        await reaches(app, State.DONE)
    assert len(calls) == 1
    assert len(bench.commands) == 1


# -- poison ---------------------------------------------------------------------------------------------------


async def test_poison_is_put_aside_and_never_delivered_again(bench: Bench) -> None:
    """Unreadable resumes are acknowledged; those with an id stay visible as dead; others go through meanwhile."""
    bench.handlers.default(lambda resume: None)
    future = resume_bytes("future", v=2)
    async with bench.running() as app:
        for data in (b"", b"{", b"\xff\xfe", b"[1]", b'{"v":1}', future, resume_bytes("bad", fence=0)):
            await bench.publish_bytes(data)
        await bench.publish("order-1")
        await reaches(app, State.DONE)
        row = await reaches(app, State.DEAD, "future")
        await reaches(app, State.DEAD, "bad")
        await bench.all_read()
        info = await bench.api(f"CONSUMER.INFO.{RESUMES}.{RESUME_CONSUMER}")
        counts = await app.outbox.counts()
        metrics = await asyncio.to_thread(_get, app.http.port, "/metrics")
    assert (row.body, row.flow) == (future, "unreadable")
    assert "version 2" in (row.last_error or "")
    assert info["num_redelivered"] == 0
    assert counts[State.DEAD] == 2
    assert 'notify_consumer_resumes_total{result="unreadable"} 7.0' in metrics


# -- crashes --------------------------------------------------------------------------------------------------


async def test_a_crash_between_answer_and_feedback_repeats_only_the_feedback(bench: Bench) -> None:
    """The answer is on disk before it is sent: after a crash the next process sends it and asks no handler."""
    calls: list[str] = []
    bench.handlers.default(lambda resume: calls.append(resume.resume_id))
    bench.answer = None
    async with bench.crashing(lease_ms=300, request_timeout_ms=60_000):
        await bench.publish("order-1")
        await until(lambda: bench.commands)
    bench.answer = {"status": "accepted", "code": None}
    async with bench.running(lease_ms=300) as app:
        await reaches(app, State.DONE)
    assert len(calls) == 1
    assert bench.commands[0] == bench.commands[-1]


async def test_a_crash_during_the_hand_off_repeats_it(bench: Bench) -> None:
    """What was acknowledged is in the outbox: after a crash in the handler it is handed off again."""
    calls, hang = [], asyncio.Event()

    @bench.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(resume.resume_id)
        if len(calls) == 1:
            await hang.wait()

    async with bench.crashing(lease_ms=300):
        await bench.publish("order-1")
        await until(lambda: calls)
        await bench.all_read()
    async with bench.running(lease_ms=300) as app:
        row = await reaches(app, State.DONE)
    assert calls == [row.resume_id] * 2
    assert row.attempts == 2


async def test_two_consumers_share_the_work(bench: Bench) -> None:
    """Two processes' worth of consumer on one outbox: every resume is handed off once."""
    calls: list[str] = []

    @bench.handlers.default
    async def handler(resume: Resume) -> None:
        calls.append(resume.resume_id)
        await asyncio.sleep(0)

    async with bench.running(instance="one") as app, bench.running(instance="two"):
        await bench.publish(*(f"r-{n}" for n in range(100)))

        async def all_done() -> bool:
            return (await app.outbox.counts())[State.DONE] == 100

        await until(all_done, "all are done")
    assert len(calls) == len(set(calls)) == 100


# -- something is away ----------------------------------------------------------------------------------------


async def test_without_an_outcome_the_feedback_is_repeated(bench: Bench) -> None:
    """While the timer service is away the row stays answered; when it is back, the same command settles it."""
    calls: list[str] = []
    bench.handlers.default(lambda resume: calls.append(resume.resume_id))
    bench.answer = None
    async with bench.running(request_timeout_ms=100) as app:
        await bench.publish("order-1")
        await until(lambda: len(bench.commands) >= 2)
        assert (await reaches(app, State.ANSWERED)).feedback is not None
        bench.answer = {"status": "accepted", "code": None}
        await reaches(app, State.DONE)
    assert len(calls) == 1
    assert len({str(command) for command in bench.commands}) == 1


async def test_before_the_stream_exists_it_is_alive_and_waits(broker: Broker, tmp_path: Path) -> None:
    """Without the resume stream the process is alive, not ready, and says why; with it, it works by itself."""
    bench = Bench(broker.url, tmp_path)
    await bench.connect()
    bench.handlers.default(lambda resume: None)
    async with bench.running(ready=False) as app:
        await until(lambda: codes(app.readiness()) == {"lease_unavailable"})
        status, body = await asyncio.to_thread(_status, app.http.port, "/readyz")
        assert status == 503
        assert "KV_DURABLE_TIMER_LEASES is not there, or nobody leads it; run durable-timer provision" in body
        await bench.provide_streams(LEASE_STREAM)
        await until(lambda: codes(app.readiness()) == {"stream_missing"})
        status, body = await asyncio.to_thread(_status, app.http.port, "/readyz")
        assert status == 503
        assert '"resource":"DURABLE_TIMER_RESUMES"' in body
        assert await asyncio.to_thread(_get, app.http.port, "/healthz") == "alive\n"
        await bench.provide_streams()
        await until(lambda: app.readiness().ready)
        await bench.publish("order-1")
        await reaches(app, State.DONE)
    await bench.nats.close()


async def test_a_deleted_consumer_is_made_again(bench: Bench) -> None:
    """When somebody deletes the durable consumer, it comes back and resumes go on."""
    bench.handlers.default(lambda resume: None)
    async with bench.running() as app:
        await bench.publish("order-1")
        await reaches(app, State.DONE)
        await bench.api(f"CONSUMER.DELETE.{RESUMES}.{RESUME_CONSUMER}")
        await bench.publish("order-2")
        await reaches(app, State.DONE, "order-2")


async def test_a_consumer_that_would_lose_resumes_is_refused(bench: Bench) -> None:
    """A consumer with max_deliver (resumes would vanish) keeps the process not ready; the reason says what must be."""
    config = RESUME_SERVICE.config() | {"max_deliver": 3}
    await bench.api(f"CONSUMER.DURABLE.CREATE.{RESUMES}.{RESUME_CONSUMER}", {"stream_name": RESUMES, "config": config})
    bench.handlers.default(lambda resume: None)
    async with bench.running(ready=False) as app:
        await until(lambda: codes(app.readiness()) == {"consumer_policy"})
        (reason,) = app.readiness().reasons
    assert "max_deliver is 3 and must be -1" in reason.message


async def test_a_broker_that_comes_later_is_waited_for(broker: Broker, tmp_path: Path) -> None:
    """Started without a broker the process is alive and not ready; once the broker is there it works."""
    bench = Bench(broker.url, tmp_path)
    await bench.connect()
    await bench.provide_streams()
    broker.stop()
    bench.handlers.default(lambda resume: None)
    async with bench.running(ready=False) as app:
        await until(lambda: codes(app.readiness()) == {"broker_unreachable"})
        broker.start()
        await until(lambda: app.readiness().ready)
        await until(lambda: bench.nats.is_connected)
        await bench.publish("order-1")
        await reaches(app, State.DONE)
    await bench.nats.close()


async def test_a_broker_restart_loses_nothing(bench: Bench, broker: Broker) -> None:
    """Work goes on after the broker was killed and came back: what was running is fed back, what is new comes in."""
    release = asyncio.Event()

    @bench.handlers.default
    async def handler(resume: Resume) -> None:
        await release.wait()

    async with bench.running() as app:
        await bench.publish("order-1")
        await reaches(app, State.CLAIMED)
        broker.kill()
        await until(lambda: codes(app.readiness()) == {"broker_unreachable"})
        release.set()
        await reaches(app, State.ANSWERED)
        broker.start()
        await until(lambda: app.readiness().ready)
        await until(lambda: bench.nats.is_connected)
        await bench.publish("order-2")
        await reaches(app, State.DONE)
        await reaches(app, State.DONE, "order-2")


async def test_a_locked_outbox_delays_and_loses_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another program holds the file resumes are not acknowledged, and the process says why; then they come."""
    monkeypatch.setattr("notify_consumer.outbox.thread.BUSY_TIMEOUT_MS", 50)
    monkeypatch.setattr("notify_consumer.consumer.REDELIVER_MS", 50)
    calls: list[str] = []
    bench.handlers.default(lambda resume: calls.append(resume.resume_id))
    names = [f"r-{n}" for n in range(WINDOW + BATCH)]
    async with bench.running() as app:
        locker = sqlite3.connect(tmp_path / "outbox.db", isolation_level=None)
        locker.execute("BEGIN IMMEDIATE")
        await bench.publish(*names)

        async def redelivered() -> bool:
            info = await bench.api(f"CONSUMER.INFO.{RESUMES}.{RESUME_CONSUMER}")
            return bool(info["num_redelivered"])

        await until(redelivered, "they are delivered again")
        assert await bench.unread() == len(names)
        assert not calls
        locker.execute("ROLLBACK")
        locker.close()

        async def all_done() -> bool:
            return (await app.outbox.counts())[State.DONE] == len(names)

        await until(all_done, "all are done")
        await bench.all_read()
        await until(lambda: app.readiness().ready)
    assert len(calls) == len(set(calls)) == len(names)


async def test_an_outbox_that_cannot_be_opened_is_waited_for(bench: Bench, tmp_path: Path) -> None:
    """A file that can't be opened keeps the process not ready with the reason; mended, it works."""
    bench.handlers.default(lambda resume: None)
    (tmp_path / "outbox.db").mkdir()
    async with bench.running(ready=False) as app:
        await until(lambda: "unable to open" in app.readiness().reasons[0].message)
        assert "outbox_unavailable" in codes(app.readiness())
        (tmp_path / "outbox.db").rmdir()
        await until(lambda: app.readiness().ready)
        await bench.publish("order-1")
        await reaches(app, State.DONE)


# -- the end --------------------------------------------------------------------------------------------------


async def test_stopping_takes_readiness_first_and_finishes_work(bench: Bench) -> None:
    """After stop /readyz is 503 while the handler finishes; its answer is fed back before the end; HTTP goes last."""
    release = asyncio.Event()

    @bench.handlers.default
    async def handler(resume: Resume) -> None:
        await release.wait()

    async with bench.running() as app:
        await bench.publish("order-1")
        await reaches(app, State.CLAIMED)
        app.stop()
        status, body = await asyncio.to_thread(_status, app.http.port, "/readyz")
        assert (status, '"draining"' in body) == (503, True)
        await bench.publish("order-2")
        release.set()
    assert len(bench.commands) == 1
    assert await bench.unread() == 1
    bench.handlers.name("order")(lambda resume: None)
    async with bench.running() as again:
        assert (await again.outbox.get(resume_body("order-1")["resume_id"])).state is State.DONE  # type: ignore[union-attr]
        await reaches(again, State.DONE, "order-2")


async def test_what_arrived_before_the_stop_is_put_away(bench: Bench) -> None:
    """Resumes that were delivered but not yet stored when the stop came are stored and acknowledged before the end."""
    bench.handlers.default(lambda resume: None)
    inserting, gate = asyncio.Event(), asyncio.Event()
    async with bench.running() as app:
        insert = app.outbox.insert

        async def slow(rows: Any) -> set[str]:
            inserting.set()
            await gate.wait()
            return await insert(rows)

        app.outbox.insert = slow  # type: ignore[method-assign]
        await bench.publish("order-1")
        await inserting.wait()
        await bench.publish("order-2")
        await until(lambda: app.consumer._deliveries)
        app.stop()
        gate.set()
    assert await bench.unread() == 0


async def test_stopping_needs_no_broker(bench: Bench, broker: Broker) -> None:
    """With the broker away the process still ends within its grace, and what it had is kept for the next one."""
    release = asyncio.Event()

    @bench.handlers.default
    async def handler(resume: Resume) -> None:
        await release.wait()

    async with bench.running(drain_grace_ms=500, request_timeout_ms=200) as app:
        await bench.publish("order-1")
        await reaches(app, State.CLAIMED)
        broker.stop()
        release.set()
    broker.start()
    async with bench.running() as again:
        row = await reaches(again, State.DONE)
    assert row.attempts == 1


async def test_health_and_metrics_are_served(bench: Bench) -> None:
    """/readyz tells role, instance and rows; /metrics has counters of hand-offs and feedback, none per timer."""
    bench.handlers.default(lambda resume: None)
    async with bench.running() as app:
        await bench.publish("order-1")
        await reaches(app, State.DONE)
        ready = await asyncio.to_thread(_get, app.http.port, "/readyz")
        metrics = await asyncio.to_thread(_get, app.http.port, "/metrics")
    assert '"ready":true' in ready
    assert '"instance":"test"' in ready
    assert 'notify_consumer_handoffs_total{result="complete"} 1.0' in metrics
    assert 'notify_consumer_feedbacks_total{kind="complete",result="settled"} 1.0' in metrics
    assert resume_body("order-1")["timer_ref"] not in metrics


def _status(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _get(port: int, path: str) -> str:
    status, body = _status(port, path)
    assert status == 200, body
    return body
