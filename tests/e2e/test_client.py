"""``TimerClient`` and a running service: deleting, other reply prefixes, and every metric by its name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from prometheus_client.parser import text_string_to_metric_families

from tests.support.broker import Broker
from tests.support.cli import Cli
from tests.support.service import Desk, Engine, Service, complete, eventually, name_ref, unique
from tests.support.stage import Stage
from timer_service.client import TimerClient
from timer_service.errors import CommandRejected, OutcomeUnknown

DAY_MS = 86_400_000


@pytest.fixture
async def timers(desk: Desk, stage: Stage) -> AsyncIterator[TimerClient]:
    async with await TimerClient.connect(stage.broker.url) as client:
        yield client


# -- deleting -------------------------------------------------------------------------------------------------


async def test_deleting_what_is_there_and_what_is_not(desk: Desk, timers: TimerClient) -> None:
    """True for a waiting timer, which then never fires; False when it has ended, and where there never was one."""
    key, after = {"name": unique()}, await desk.last_seq("DURABLE_TIMER_REJECTIONS")
    await timers.start(key, delay_ms=DAY_MS)
    assert await timers.delete(key, reason="not needed") is True
    record = await desk.ended(name_ref(key["name"]))
    assert (record["status"], record["message"]) == ("cancelled", "not needed")
    async with asyncio.timeout(10):
        assert await timers.delete(key) is False
        assert await timers.delete({"name": unique()}) is False
        assert await timers.delete(name_ref(unique())) is False
    codes = [one["code"] for one in await desk.rejections("cancel", after=after)]
    assert codes == ["already_terminal", "unknown_timer", "unknown_timer"]
    assert await desk.records_of(name_ref(key["name"])) == 1


async def test_deleting_a_timer_that_has_elapsed(desk: Desk, timers: TimerClient) -> None:
    """It is there, so True: its resume stands, and a retry ends it instead of arming it again."""
    key = {"name": unique()}
    async with Engine(desk) as engine:
        await timers.start(key, delay_ms=1, max_retries=3)
        resume = await engine.resume_of(name_ref(key["name"]))
        assert await timers.delete(key) is True
        assert await timers.delete(key) is True
        await timers.retry(key, resume["generation"], resume["fence"], delay_ms=1)
        assert (await desk.ended(name_ref(key["name"])))["status"] == "cancelled"
    assert await timers.delete(key) is False


async def test_another_refusal_of_a_delete_is_raised(desk: Desk, timers: TimerClient) -> None:
    """What can't be read is not "not there"."""
    ref = name_ref(unique())
    await desk.js.publish(f"$KV.DURABLE_TIMER_STATE.{ref}", b"{")
    with pytest.raises(CommandRejected, match="state_unreadable"):
        await timers.delete(ref)
    await desk.js.publish(f"$KV.DURABLE_TIMER_STATE.{ref}", headers={"KV-Operation": "PURGE"})


# -- where outcomes go ----------------------------------------------------------------------------------------


async def test_another_reply_prefix(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes go below the prefix that is set, for the client, the command line and raw publishers; a reply to
    ``_INBOX.`` is ignored and counted then, and its command takes effect all the same."""
    with Service(broker.url, tmp_path, reply_prefix="replies.timers.") as service:
        await service.ready()
        async with await TimerClient.connect(broker.url, reply_prefix="replies.timers.") as timers:
            outcome = await timers.start({"name": "told"}, delay_ms=DAY_MS)
            assert outcome is not None
            assert outcome.status == "accepted"
        async with await TimerClient.connect(broker.url, timeout_ms=500) as timers:
            assert service.metric("durable_timer_replies_ignored_total") == 0
            with pytest.raises(OutcomeUnknown):
                await timers.start({"name": "untold"}, delay_ms=DAY_MS)
            assert service.metric("durable_timer_replies_ignored_total") == 1
            assert service.events("command.reply_ignored")[0]["reply_to"].startswith("_INBOX.")
        async with Desk.at(broker.url) as desk:
            assert await desk.state(name_ref("untold")) is not None
        monkeypatch.setenv("DURABLE_TIMER_REPLY_PREFIX", "replies.timers.")
        done = await asyncio.to_thread(Cli(broker.url).json, "cancel", "--name", "told")
        assert done["status"] == "accepted"


# -- metrics --------------------------------------------------------------------------------------------------

METRICS = {
    "durable_timer_armed": ("gauge", set()),
    "durable_timer_problems": ("gauge", set()),
    "durable_timer_lateness_seconds": ("histogram", {"le"}),
    "durable_timer_commands": ("counter", {"kind", "status", "code"}),
    "durable_timer_resumes": ("counter", set()),
    "durable_timer_repairs": ("counter", {"kind"}),
    "durable_timer_admission_open": ("gauge", set()),
}
"""Section 7 of the contract; the parser takes ``_total`` off."""


async def test_every_metric_of_the_contract(desk: Desk, service: Service, timers: TimerClient) -> None:
    """Each is there under its name, of its kind, with its labels, and shows what has happened."""
    key = {"name": unique()}
    before = service.metrics()
    async with Engine(desk, complete):
        await timers.start({"name": unique()}, delay_ms=DAY_MS)
        await timers.start(key, delay_ms=1)
        await desk.ended(name_ref(key["name"]))
    with pytest.raises(CommandRejected):
        await timers.complete(key, 0, 1)
    text = service.http("/metrics")[1].decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, (kind, labels) in METRICS.items():
        assert families[name].type == kind, name
        assert families[name].documentation
        seen = {label for sample in families[name].samples for label in sample.labels}
        assert seen <= labels, name
        assert seen == labels or not families[name].samples, name

    def grown(*sample: str) -> float:
        return service.metric(*sample) - before.get(sample, 0.0)

    assert grown("durable_timer_commands_total", "", "start", "accepted") == 2
    assert grown("durable_timer_commands_total", "already_terminal", "complete", "rejected") == 1
    assert grown("durable_timer_resumes_total") == 1
    assert grown("durable_timer_lateness_seconds_count") == 1
    assert service.metric("durable_timer_armed") >= 1
    assert service.metric("durable_timer_admission_open") == 1
    await eventually(lambda: service.metric("durable_timer_problems") == 0)


async def test_no_command_carries_a_message_id(desk: Desk, timers: TimerClient) -> None:
    """TimerClient leaves Nats-Msg-Id alone: a command that is sent again within the broker's window is told."""
    seen: list[dict[str, str]] = []

    async def hear(message: Msg) -> None:
        seen.append(dict(message.headers or {}))

    subscription = await desk.client.subscribe("durable_timer.commands.>", cb=hear)
    for _ in range(2):  # the first ping overtakes what the client has still to send
        await desk.client.flush()
    key = {"name": unique()}
    for _ in range(2):
        await timers.start(key, delay_ms=DAY_MS, command_id="the same")
    await timers.cancel(key)
    await eventually(lambda: len(seen) >= 3)
    assert [name for headers in seen for name in headers if name.lower() == "nats-msg-id"] == []
    await subscription.unsubscribe()
