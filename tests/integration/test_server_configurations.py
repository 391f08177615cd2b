"""The configurations in nats/: valid, least permissions, and what a cluster of them survives."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from notify_consumer.errors import OutboxUnavailable
from notify_consumer.outbox.base import Feedback, State
from notify_consumer.outbox.nats_kv import NatsOutbox
from tests.support.broker import Broker
from tests.support.cli import Cli
from tests.support.cluster import Cluster
from tests.support.notify import new_row, until
from tests.support.notify_bench import Bench
from tests.support.service import Desk, Engine, Service, eventually, name_ref, unique
from timer_service.embedded import find_nats_server
from timer_service.jetstream import topology

CONFIGURATIONS = Path(__file__).parents[2] / "nats"
USERS = ("publisher", "engine", "notify-consumer", "timer-service", "operator", "system")
FORBIDDEN = [
    topology.state_subject("x"),
    "$KV.DURABLE_TIMER_LEASES.driver",
    topology.wake_subject("x"),
    "durable_timer.schedule.v1.x",
    topology.terminal_subject("x"),
    topology.snapshot_subject("x", 0),
    topology.rejected_subject("start"),
    topology.RESUME_SUBJECT,
]


def variable(user: str) -> str:
    return f"{user.upper().replace('-', '_')}_PASSWORD"


PASSWORDS = {variable(user): f"secret-of-{user}" for user in USERS}


@pytest.mark.parametrize("name", ["single.conf", *(f"three-nodes/node{n}.conf" for n in (1, 2, 3))])
@pytest.mark.parametrize("accounts", [False, True])
def test_configurations_are_valid(name: str, accounts: bool, tmp_path: Path) -> None:
    """`nats-server -t` takes each of them, alone and with the accounts."""
    config = CONFIGURATIONS / name
    if accounts:
        config = tmp_path / "with-accounts.conf"
        common = (CONFIGURATIONS / "three-nodes/common.conf").read_text()
        (tmp_path / "common.conf").write_text(common.replace('# include "../accounts.conf"', 'include "accounts.conf"'))
        (tmp_path / "accounts.conf").write_text((CONFIGURATIONS / "accounts.conf").read_text())
        own = 'include "accounts.conf"\n' if name == "single.conf" else ""
        config.write_text((CONFIGURATIONS / name).read_text() + own)
    done = subprocess.run(
        [find_nats_server(), "-c", config, "-t"], capture_output=True, text=True, env={**os.environ, **PASSWORDS}
    )
    assert done.returncode == 0, done.stderr


# -- accounts -------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A broker with the accounts, on which the streams are there."""
    for name, password in PASSWORDS.items():
        monkeypatch.setenv(name, password)
    (tmp_path / "nats").mkdir()
    (tmp_path / "nats/accounts.conf").write_text((CONFIGURATIONS / "accounts.conf").read_text())
    with Broker(tmp_path / "nats", extra_config='include "accounts.conf"') as broker:
        done = Cli(url_of(broker, "operator")).run("provision")
        assert done.returncode == 0, done.stderr
        yield broker


def url_of(broker: Broker, user: str) -> str:
    return broker.url.replace("nats://", f"nats://{user}:{PASSWORDS[variable(user)]}@")


@pytest.mark.parametrize("driver", ["heap", "native"])
async def test_each_may_do_its_own(guarded: Broker, tmp_path: Path, driver: str) -> None:
    """A publisher starts and cancels, an engine answers, the service serves without creating anything, all ready."""
    with Service(url_of(guarded, "timer-service"), tmp_path, "--no-provision", "--driver", driver) as service:
        await service.ready()
        assert Cli(url_of(guarded, "timer-service")).json("doctor", "--driver", driver)["ok"]
        publisher = Cli(url_of(guarded, "publisher"))
        started = publisher.json(
            "start", "--name", (name := unique()), "--delay", "50ms", "--payload", '"' + "x" * 3_000 + '"'
        )
        assert started["status"] == "accepted"
        assert publisher.json("start", "--name", (other := unique()), "--delay", "1h")["status"] == "accepted"
        async with Desk.at(url_of(guarded, "operator")) as desk:
            if driver == "native":
                await eventually(lambda: desk.subjects(topology.SCHEDULES, topology.SCHEDULE_FILTER))
            assert publisher.json("cancel", name_ref(other))["status"] == "accepted"
            await eventually(partial(_no_schedule, desk))
        async with Desk.at(url_of(guarded, "engine")) as desk, Engine(desk) as engine:
            resume = await engine.resume_of(name_ref(name))
            assert (await engine.reply(resume, "complete"))["status"] == "accepted"
        assert Cli(url_of(guarded, "operator")).json("get", name_ref(name))["status"] == "completed"


async def _no_schedule(desk: Desk) -> bool:
    return not await desk.subjects(topology.SCHEDULES, topology.SCHEDULE_FILTER)


@pytest.mark.parametrize("user", ["publisher", "engine", "notify-consumer", "operator"])
async def test_nobody_but_the_service_writes(guarded: Broker, user: str) -> None:
    """State, leases, wakes, schedules, snapshots, resumes, records: refused to all others, and nothing is stored."""
    refused: list[str] = []
    client = await connected(guarded, user, refused)
    for subject in FORBIDDEN:
        await client.publish(subject, b"{}")
    await client.flush()
    await eventually(lambda: len(refused) == len(FORBIDDEN), what=f"{len(FORBIDDEN)} refusals")
    await client.close()
    async with Desk.at(url_of(guarded, "operator")) as desk:
        for spec in topology.streams(topology.Sizes()):
            assert await desk.count(spec.name) == 0, spec.name


@pytest.mark.parametrize("user", ["publisher", "engine", "notify-consumer", "timer-service"])
async def test_only_operators_change_streams(guarded: Broker, user: str) -> None:
    """Nobody else may create, change or delete a stream."""
    refused: list[str] = []
    client = await connected(guarded, user, refused)
    for request in (
        "STREAM.CREATE.X",
        "STREAM.DELETE.DURABLE_TIMER_COMMANDS",
        f"STREAM.UPDATE.{topology.STATE_STREAM}",
    ):
        await client.publish(f"$JS.API.{request}", b"{}")
    await client.flush()
    await eventually(lambda: len(refused) == 3)
    await client.close()


async def connected(broker: Broker, user: str, refused: list[str]) -> Client:
    async def note(error: Exception) -> None:
        refused.append(str(error))

    return await nats.connect(url_of(broker, user), error_cb=note)


# -- the outbox of the notify consumer ------------------------------------------------------------------------


def outbox_of(broker: Broker, user: str) -> NatsOutbox:
    return NatsOutbox(url_of(broker, user), timeout_ms=3_000, max_bytes=2**25)


async def test_the_notify_consumer_keeps_its_outbox_but_may_not_make_it(guarded: Broker) -> None:
    """Who may create a stream could forge state by it: an operator makes the bucket, and then everything works."""
    outbox = outbox_of(guarded, "notify-consumer")
    with pytest.raises(OutboxUnavailable, match=r"publish on \$JS\.API\.STREAM\.CREATE\.KV_NOTIFY.*outbox create"):
        await outbox.open()
    assert await asyncio.to_thread(_create_outbox, url_of(guarded, "operator")) == "nats?max_bytes=33554432 is there\n"
    await outbox.open()
    assert len(await outbox.insert([new_row("a"), new_row("b")])) == 2
    first, second = await outbox.claim("me", {"x": 2}, 60_000)
    assert await outbox.renew([first], 60_000) == set()
    await outbox.finish(await outbox.store_outcome(first, Feedback("complete", {})), "accepted")
    await outbox.kill(second, "enough")
    assert await outbox.revive(second.resume_id)
    assert len(await outbox.browse(None, 5)) == 2

    async def pruned() -> bool:
        return await outbox.prune_done(0) == 1

    await until(pruned, "the done row is old enough")
    assert (await outbox.counts())[State.PENDING] == 1
    await outbox.close()


def _create_outbox(url: str) -> str:
    options = ["outbox", "create", "--outbox", f"nats?max_bytes={2**25}", "--nats", url]
    return subprocess.run(
        [sys.executable, "-m", "notify_consumer", *options], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("user", ["publisher", "engine", "timer-service", "operator"])
async def test_the_outbox_is_the_notify_consumers_alone(guarded: Broker, user: str) -> None:
    """Nobody else writes a row."""
    refused: list[str] = []
    client = await connected(guarded, user, refused)
    await client.publish("$KV.NOTIFY_CONSUMER_OUTBOX.x", b"{}")
    await client.flush()
    await eventually(lambda: len(refused) == 1)
    await client.close()


async def test_a_notify_consumer_may_do_what_it_needs(guarded: Broker, tmp_path: Path) -> None:
    """Ready with its own user, and at once again after a crash under the same name: it may ask who was there."""
    bench = Bench(url_of(guarded, "operator"), tmp_path)
    url = url_of(guarded, "notify-consumer")
    async with bench.crashing(nats=url):
        pass
    async with bench.running(nats=url) as app:
        assert app.connection.denials == {}


# -- the level in force ---------------------------------------------------------------------------------------


async def test_doctor_and_stats_show_the_level(guarded: Broker) -> None:
    """Where the account may ask, how often the disk is flushed; elsewhere that it can't be seen."""
    found = Cli(url_of(guarded, "operator")).json("stats")["durability"]
    assert (found["replicas"], found["flush_s"], found["servers"]) == (1, 1.0, 1)
    doctor = Cli(url_of(guarded, "timer-service")).json("doctor")
    [text] = [check["message"] for check in doctor["checks"] if check["resource"] == "durability"]
    assert text == found["text"]
    assert "up to 1 s of acknowledged work is lost" in text
    assert "durability: 1 replica" in Cli(url_of(guarded, "operator")).run("stats").stdout


async def test_the_level_is_not_visible_everywhere(shared_broker: Broker) -> None:
    """Without a system account's leave the answer is honest."""
    cli = Cli(shared_broker.url)
    cli.run("provision")
    found = cli.json("stats")["durability"]
    assert (found["flush_s"], found["servers"]) == (None, 0)
    assert "not visible from here; the server's default is 2 minutes" in found["text"]


async def test_three_nodes_survive_the_loss_of_one(tmp_path: Path) -> None:
    """The node that leads the state is killed while timers wait: all fire once, and clients find another node."""
    settings = {"replicas": 3, "resume_timeout_ms": 2_000}  # an answer that is lost heals by the next resume
    with Cluster(tmp_path / "cluster") as cluster, Service(cluster.url, tmp_path, **settings) as service:
        await service.ready()
        lost = await asyncio.to_thread(cluster.leader_of, topology.STATE_STREAM)
        others = [node.url for n, node in enumerate(cluster.nodes) if n != lost]
        async with Desk.at(others[0]) as desk, Engine(desk, lambda _: ("complete", {})) as engine:
            names = [unique() for _ in range(20)]
            bodies = [{"timer": {"name": name}, "due": {"delay_ms": 300 + 150 * n}} for n, name in enumerate(names)]
            await desk.send_many("start", bodies)
            await eventually(lambda: len(engine.received) > 2)
            cluster.kill(lost)
            await eventually(lambda: {name_ref(name) for name in names} == set(engine._by_ref), 40, what="all resumes")
            level = Cli(",".join([cluster.nodes[lost].url, *others])).json("stats")["durability"]
            assert level["replicas"] == 3, "also by way of an address where nobody is"
            await asyncio.to_thread(cluster.restart, lost)
            for name in names:
                assert (await desk.ended(name_ref(name), 60))["status"] == "completed"
                assert await desk.records_of(name_ref(name)) == 1
                assert len({one.data for one in engine.of(name_ref(name))}) == 1
