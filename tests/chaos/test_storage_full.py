"""No room: only starts wait, what lives goes on, and after room was made everything goes on by itself, once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import nats
import pytest

from tests.support.broker import Broker
from tests.support.cluster import Cluster
from tests.support.commands import command
from tests.support.service import (
    CLI,
    Asked,
    Desk,
    Engine,
    Service,
    encoded,
    eventually,
    lineage_key,
    name_ref,
    now_ms,
    shown_on_failure,
    unique,
)
from timer_service.domain.machine import Write, decide
from timer_service.errors import StorageFull, WrongRevision
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.publish import Publisher
from timer_service.jetstream.stores import JetStreamState

KIB = 1024
DAY_MS = 86_400_000
START = "durable_timer.commands.start.v1"
ACCOUNTS = """
accounts {
  A { jetstream { max_file: %d }, users: [{ user: a, password: a }] }
  SYS { users: [{ user: s, password: s }] }
}
no_auth_user: a
system_account: SYS
"""
REPLICAS = pytest.mark.parametrize("replicas", [1, 3])


class Play:
    """A service with little room, an engine that answers when told to, and a desk."""

    def __init__(self, service: Service, desk: Desk, url: str) -> None:
        self.service, self.desk, self.url = service, desk, url
        self.answering = False
        self.engine = Engine(desk, lambda _: ("complete", {}) if self.answering else None)

    async def start(self, count: int, *, delay_ms: int, size: int = 1_000) -> dict[str, Asked]:
        """Ask for so many named timers, without waiting for outcomes."""
        asked = {}
        for _ in range(count):
            name = unique()
            body = {"timer": {"name": name}, "due": {"delay_ms": delay_ms}, "payload": name.ljust(size, "x")}
            asked[name] = await self.desk.asked(START, encoded(body))
        return asked

    async def closed_for(self, resource: str, within: float = 20.0) -> None:
        """Wait until it is plain everywhere that starts are held, and why."""

        def plain() -> bool:
            found = self.service.details()
            told = (found["admission"], found["admission_resource"]) == ("closed", resource)
            return told and self.service.metric("durable_timer_admission_open") == 0  # it may open in between

        await eventually(plain, within, what=f"admission closed for {resource}")
        assert any(event["resource"] == resource for event in self.service.events("admission.closed"))

    async def full(self, resource: str) -> None:
        """Wait until /readyz says 503, since this resource is really full."""

        def told() -> bool:
            code, body = self.service.readyz()
            return code == 503 and {"storage_full"} == {
                reason["code"] for reason in body["reasons"] if reason["resource"] == resource
            }

        await eventually(told, 20, what=f"503 storage_full of {resource}")

    async def reopened(self) -> None:
        await eventually(lambda: self.service.details()["admission"] == "open", 20, what="admission to open by itself")
        assert self.service.metric("durable_timer_admission_open") == 1

    async def settle(self) -> None:
        """Wait until the service has looked at everything that is queued."""
        await eventually(self._all_seen, 30, what="all commands to have been looked at")

    async def _all_seen(self) -> bool:
        info = await self.desk.js.consumer_info(topology.COMMANDS, topology.COMMAND_CONSUMER)
        return not info.num_pending and not self.service.details()["in_flight"]

    async def every_step(self, elapsed: list[str], waiting: str) -> None:
        """Complete, retry and fail three timers that elapsed, and cancel one that waits: all of it must work now."""
        resumes = [await self.engine.resume_of(name_ref(name)) for name in elapsed[:3]]
        answers: list[tuple[str, dict[str, Any]]] = [
            ("complete", {}),
            ("retry", {"due": {"delay_ms": DAY_MS}}),
            ("fail", {"failure_code": "no"}),
        ]
        for resume, (kind, body) in zip(resumes, answers, strict=True):
            assert (await self.engine.reply(resume, kind, **body))["status"] == "accepted", kind
        assert (await self.desk.ask("cancel", timer_ref=name_ref(waiting)))["status"] == "accepted"
        ends = {elapsed[0]: "completed", elapsed[1]: "failed", elapsed[2]: "failed", waiting: "cancelled"}
        for name, status in ends.items():
            assert (await self.desk.ended(name_ref(name)))["status"] == status

    async def complete_all(self, names: list[str]) -> None:
        """Complete what has elapsed or will, each exactly once."""
        self.answering = True
        for one in list(self.engine.received):
            if await self.desk.state(one.resume["timer_ref"]) is not None:
                await self.engine.give(one.resume, "complete")
        for name in names:
            await self.desk.ended(name_ref(name), 30)
            assert await self.desk.records_of(name_ref(name)) == 1
            assert len({one.data for one in self.engine.of(name_ref(name))}) == 1, "one resume, if perhaps repeated"


@asynccontextmanager
async def played(url: str, folder: Path, **settings: object) -> AsyncIterator[Play]:
    """The play on a broker that runs already."""
    with Service(url, folder, policy_check_interval_ms=500, **settings) as service:
        await service.ready()
        async with Desk.at(url) as desk:
            play = Play(service, desk, url)
            with shown_on_failure(service):
                yield play


@asynccontextmanager
async def brokers(replicas: int, folder: Path, extra_config: str = "") -> AsyncIterator[str]:
    """The URL of one broker, or of one of a cluster of three."""
    if replicas == 1:
        with Broker(folder / "nats", extra_config=extra_config) as broker:
            yield broker.url
    else:
        with Cluster(folder / "cluster", extra_config=extra_config) as cluster:
            yield cluster.nodes[0].url


def accepted(asked: dict[str, Asked]) -> list[str]:
    """The names of those starts that have an outcome already."""
    return [name for name, one in asked.items() if not one.queue.empty()]


async def used(desk: Desk, stream: str) -> int:
    return (await desk.js.stream_info(stream)).state.bytes


# -- each resource --------------------------------------------------------------------------------------------


@REPLICAS
async def test_state(tmp_path: Path, replicas: int) -> None:
    """The bucket short of room: starts wait without an outcome, everything else works; ends make room for them."""
    limit = 128 * KIB
    async with (
        brokers(replicas, tmp_path) as url,
        played(url, tmp_path, replicas=replicas, state_max_bytes=limit) as play,
        play.engine,
    ):
        waiting = await play.start(1, delay_ms=DAY_MS)
        asked = await play.start(70, delay_ms=300)
        await play.closed_for(topology.STATE_STREAM)
        await play.settle()
        assert await used(play.desk, topology.STATE_STREAM) <= limit // 2 + 20 * KIB, "what elapsed has grown a little"
        live = accepted(asked)
        assert 20 < len(live) < 60
        assert play.service.readyz()[0] == 200
        await play.every_step(live, *waiting)
        if replicas == 3:
            await _full_to_the_brim(play, live[3])
        await play.complete_all(live[3:] + [name for name in asked if name not in live])
        assert [(await one.outcome())["status"] for one in asked.values()] == ["accepted"] * len(asked)
        await play.reopened()


async def _full_to_the_brim(play: Play, name: str) -> None:
    """Not even an end finds room: it waits, /readyz says why, and it goes through when there is some again."""
    resume = await play.engine.resume_of(name_ref(name))
    await _cram(play.desk, topology.state_subject("junk.%d"), {"KV-Operation": "PURGE"})
    await play.full(topology.STATE_STREAM)
    fields = {key: resume[key] for key in ("timer_ref", "generation", "fence")}
    held = await play.desk.asked("durable_timer.commands.complete.v1", encoded(fields))
    await eventually(lambda: play.service.details()["held"])
    assert held.queue.empty()
    await play.desk.js.purge_stream(topology.STATE_STREAM, subject=topology.state_subject("junk.*"))
    assert (await held.outcome())["status"] == "accepted"
    await play.desk.ended(name_ref(name))
    await play.service.ready(10)


async def test_an_end_leaves_a_full_bucket(tmp_path: Path) -> None:
    """Three replicas refuse even removal markers when full: the entry goes without one, a newer one stays."""
    decision = decide(None, command("start", now_ms()))
    assert isinstance(decision, Write)
    timer = decision.timer
    async with brokers(3, tmp_path) as url, Desk.at(url) as desk:
        spec = next(spec for spec in topology.streams(topology.Sizes(state_bytes=64 * KIB)))
        await desk.client.request(f"$JS.API.STREAM.CREATE.{spec.name}", json.dumps(spec.config(3)).encode(), timeout=10)
        connection = Connection(url, name="test")
        await connection.open()
        publisher = Publisher(connection)
        await publisher.start()
        state = JetStreamState(publisher, replicas=3, tombstone_ttl_s=3_600)
        first = await state.put(timer, 0)
        second = await state.put(timer, first)
        await _cram(desk, topology.state_subject("junk.%d"))
        with pytest.raises(StorageFull):
            await state.put(timer, second)
        with contextlib.suppress(WrongRevision):
            await state.remove(timer, first)
        assert (await state.get(timer.timer_ref)).revision == second, "it is another one by now"
        await state.remove(timer, second)
        assert (await state.get(timer.timer_ref)).timer is None
        await publisher.stop()
        await connection.close()


async def _cram(desk: Desk, subject: str, headers: dict[str, str] | None = None, sizes: tuple[int, ...] = ()) -> None:
    """Publish ever smaller messages until none is taken any more."""
    n = 0
    for size in sizes or (4_000, 200, 1):
        while True:
            n += 1
            name = subject % n if "%" in subject else subject
            reply = await desk.client.request(name, b"x" * size, headers=headers, timeout=20)
            if "error" in json.loads(reply.data):
                break


@REPLICAS
async def test_resumes(tmp_path: Path, replicas: int) -> None:
    """The engine is away and the resume stream fills up: nothing is lost, and all of it goes out when it returns."""
    async with (
        brokers(replicas, tmp_path) as url,
        played(url, tmp_path, replicas=replicas, resumes_max_bytes=64 * KIB) as play,
    ):
        asked = await play.start(70, delay_ms=2_000)
        await play.full(topology.RESUMES)
        await play.closed_for(topology.RESUMES)
        later = await play.start(5, delay_ms=10)
        await play.settle()
        assert not accepted(later)
        async with play.engine:
            await play.complete_all(list(asked | later))
            await play.reopened()
            await play.service.ready()


@REPLICAS
async def test_commands(tmp_path: Path, replicas: int) -> None:
    """Starts pile up: over half the command stream they are refused; those in it, and what lives, go on."""
    sizes = {"state_max_bytes": 64 * KIB, "commands_max_bytes": 64 * KIB}
    async with (
        brokers(replicas, tmp_path) as url,
        played(url, tmp_path, replicas=replicas, **sizes) as play,
        play.engine,
    ):
        waiting = await play.start(1, delay_ms=DAY_MS)
        asked = await play.start(20, delay_ms=300)
        await play.closed_for(topology.STATE_STREAM)
        await play.settle()
        first = accepted(asked)
        refused: list[str] = []
        deadline = time.monotonic() + 30
        while not refused:
            if len(asked) < 75:
                asked |= await play.start(5, delay_ms=300)
            await asyncio.sleep(0.2)
            refused = [name for name in accepted(asked) if name not in first]
            assert time.monotonic() < deadline, "nothing was refused"
        for name in refused:
            outcome = await asked.pop(name).outcome()
            assert (outcome["status"], outcome["code"]) == ("rejected", "storage_full")
            assert topology.STATE_STREAM in outcome["message"]
        await play.every_step(first, *waiting)
        codes = {outcome["code"] for outcome in await play.desk.rejections("start")}
        assert codes == {"storage_full"}
        play.answering = True
        for name in first[3:]:
            await play.engine.give(await play.engine.resume_of(name_ref(name)), "complete")
        for name, one in asked.items():
            outcome = await one.outcome(20)
            assert outcome["status"] == "accepted" or outcome["code"] == "storage_full"
            if outcome["status"] == "accepted" and name not in first[:3]:
                await play.desk.ended(name_ref(name), 20)
                assert await play.desk.records_of(name_ref(name)) == 1


@REPLICAS
async def test_snapshots(tmp_path: Path, replicas: int) -> None:
    """Large payloads fill their stream: starts wait until ends remove some, and no payload is left over."""
    async with (
        brokers(replicas, tmp_path) as url,
        played(url, tmp_path, replicas=replicas, snapshots_max_bytes=256 * KIB) as play,
        play.engine,
    ):
        asked = await play.start(20, delay_ms=300, size=20_000)
        await play.closed_for(topology.SNAPSHOTS)
        await play.settle()
        assert 4 <= len(accepted(asked)) <= 7
        await play.complete_all(list(asked))
        for name in asked:
            assert play.engine.of(name_ref(name))[0].resume["payload"] == name.ljust(20_000, "x")
        await eventually(lambda: _empty(play.desk, topology.SNAPSHOTS), 20, what="no payload to be left")


async def _empty(desk: Desk, stream: str) -> bool:
    return await desk.count(stream) == 0


@REPLICAS
async def test_archive(tmp_path: Path, replicas: int) -> None:
    """A full archive: ends are accepted and wait for their records; a larger limit by `provision` mends all of it."""
    async with (
        brokers(replicas, tmp_path) as url,
        played(url, tmp_path, replicas=replicas, terminals_max_bytes=64 * KIB) as play,
        play.engine,
    ):
        asked = await play.start(150, delay_ms=DAY_MS)
        await play.settle()
        for name in asked:
            assert (await play.desk.ask("cancel", timer_ref=name_ref(name)))["status"] == "accepted"
        await play.full(topology.TERMINALS)
        await play.closed_for(topology.TERMINALS)
        held = await play.start(2, delay_ms=10)
        await play.settle()
        assert not accepted(held)
        assert await play.desk.count(topology.TERMINALS) < len(asked)
        assert "widened" in await _raise(url, "terminals", 4 * KIB * KIB)
        for name in asked:
            assert (await play.desk.ended(name_ref(name)))["status"] == "cancelled"
            assert await play.desk.records_of(name_ref(name)) == 1
        await play.complete_all(list(held))
        await play.service.ready()


@REPLICAS
async def test_account(tmp_path: Path, replicas: int) -> None:
    """Somebody else's stream fills the account: starts wait; full, nothing is lost; when it goes, all goes on."""
    sizes = {f"{name}_max_bytes": KIB * KIB for name in ("state", "snapshots", "commands", "resumes", "terminals")}
    async with brokers(replicas, tmp_path, ACCOUNTS % (replicas * 8 * KIB * KIB)) as url:
        await _create_small(url, replicas)
        async with played(url, tmp_path, replicas=replicas, **sizes) as play, play.engine:
            waiting = await play.start(1, delay_ms=DAY_MS)
            elapsed = await play.start(8, delay_ms=100)
            for name in elapsed:
                await play.engine.resume_of(name_ref(name))
            await play.desk.js.add_stream(name="FOREIGN", subjects=["foreign"], num_replicas=replicas)
            while await used(play.desk, "FOREIGN") < 4.5 * KIB * KIB:
                await play.desk.js.publish("foreign", b"x" * 100_000)
            await play.closed_for("account")
            held = await play.start(5, delay_ms=10)
            await play.settle()
            assert not accepted(held)
            assert play.service.readyz()[0] == 200
            names = list(elapsed)
            await play.every_step(names, *waiting)
            due = await _due_while_full(play)
            await _cram(play.desk, "foreign", sizes=(100_000, 1_000, 1))
            await play.full("account")
            refused = await eventually(lambda: play.service.events("storage.refused"), what="a wake to be refused")
            assert {event["resource"] for event in refused} == {"account"}
            await play.desk.js.purge_stream("FOREIGN")
            await play.reopened()  # before that an answer could not even be published
            await play.complete_all([*names[3:], due, *held])
            await play.service.ready()


async def _due_while_full(play: Play) -> str:
    """A timer that has got in before, and becomes due while nothing can be written."""
    await play.desk.js.purge_stream("FOREIGN")
    await play.reopened()
    asked = await play.start(1, delay_ms=4_000)
    [(name, one)] = asked.items()
    await one.outcome()
    return name


async def _create_small(url: str, replicas: int) -> None:
    """Streams of fixed size, made beforehand smaller than the service would: the account here has little room."""
    client = await nats.connect(url)
    for spec in topology.streams(topology.Sizes()):
        if spec.name in (topology.SCHEDULES, topology.REJECTIONS):
            body = json.dumps({**spec.config(replicas), "max_bytes": KIB * KIB // 2}).encode()
            reply = await client.request(f"$JS.API.STREAM.CREATE.{spec.name}", body, timeout=10)
            assert "error" not in json.loads(reply.data), reply.data
    await client.close()


# -- many -----------------------------------------------------------------------------------------------------


async def test_thousands_of_held_starts(broker: Broker, tmp_path: Path) -> None:
    """A burst stops at the watermark, also after a kill; held ones cost little, let others pass, keep their order."""
    limit, count = 1024 * KIB, 4_000
    async with played(broker.url, tmp_path, state_max_bytes=limit) as play:
        [living] = await play.start(1, delay_ms=DAY_MS)
        key = lineage_key()
        refs, bodies = [], []
        for _ in range(count):
            refs.append(name_ref(name := unique()))
            bodies.append({"timer": {"name": name}, "due": {"delay_ms": DAY_MS}, "payload": "x" * 300})
        await play.desk.send_many("start", bodies)
        racing = [await play.desk.asked(START, _racing(key, n)) for n in range(3)]
        await play.closed_for(topology.STATE_STREAM)
        await play.settle()
        assert limit * 0.3 < await used(play.desk, topology.STATE_STREAM) <= limit // 2
        play.service.kill()
        play.service.start()
        await play.service.ready()
        await play.settle()
        await _costs_little(play.service)
        assert limit * 0.48 < await used(play.desk, topology.STATE_STREAM) <= limit // 2, "none slips through"
        assert (await play.desk.ask("cancel", within=10, timer_ref=name_ref(living)))["status"] == "accepted"
        await _raise(broker.url, "state", 64 * KIB * KIB)
        await eventually(lambda: _count_is(play.desk, topology.COMMANDS, 0), 30, what="all held starts to be settled")
        for ref in refs:
            assert await play.desk.state(ref) is not None
        outcomes = [await one.outcome() for one in racing]
        assert [outcome["code"] for outcome in outcomes] == [None, "conflict", "conflict"], "the first one wins"


def _racing(key: dict[str, str], n: int) -> bytes:
    return encoded({"timer": key, "due": {"delay_ms": DAY_MS}, "payload": n})


async def _count_is(desk: Desk, stream: str, wanted: int) -> bool:
    return await desk.count(stream) == wanted


async def _raise(url: str, what: str, limit: int) -> str:
    command = [str(CLI), "provision", "--nats", url, f"--{what}-max-bytes", str(limit)]
    run = partial(subprocess.run, command, check=True, timeout=60, capture_output=True, text=True)
    return (await asyncio.to_thread(run)).stdout


async def _costs_little(service: Service) -> None:
    """Three seconds (longer than a held start waits at least) take less than half a core."""
    before_s = _cpu_s(service.pid)
    await asyncio.sleep(3)
    assert _cpu_s(service.pid) - before_s < 1.5


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_a_cancel_waits_behind_its_held_start(broker: Broker, tmp_path: Path) -> None:
    """A cancel of a start that waits for room takes effect after it, and the timer never fires."""
    async with played(broker.url, tmp_path, state_max_bytes=64 * KIB) as play, play.engine:
        asked = await play.start(30, delay_ms=300)
        await play.closed_for(topology.STATE_STREAM)
        await play.settle()
        held = next(name for name in asked if name not in accepted(asked))
        cancel = await play.desk.asked(
            "durable_timer.commands.cancel.v1", encoded({"timer_ref": name_ref(held), "wait_ms": 0})
        )
        await play.settle()
        assert cancel.queue.empty()
        await play.complete_all([name for name in asked if name != held])
        assert (await asked[held].outcome(20))["status"] == "accepted"
        outcome = await cancel.outcome(20)
        assert (outcome["status"], outcome["code"]) == ("accepted", None)
        assert (await play.desk.ended(name_ref(held)))["status"] == "cancelled"
        assert not play.engine.of(name_ref(held)), "its due time has passed long ago, and still it never fires"


# -- a disk that is really full -------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


async def test_disk(small_disk: Path, tmp_path: Path) -> None:
    """The disk itself is full: /readyz says that the broker can't store; with room and a restart all fires once."""
    with Broker(small_disk / "nats") as broker:
        async with played(broker.url, tmp_path, request_timeout_ms=1_000) as play, play.engine:
            asked = await play.start(30, delay_ms=3_000)
            for one in asked.values():
                await one.outcome()
            filler = small_disk / "filler"
            with filler.open("wb") as file:
                try:
                    while True:
                        file.write(b"x" * 65_536)
                        file.flush()
                except OSError:
                    pass
            await eventually(partial(_silent, play.service), 30, what="503 and the stream that can't be written")
            filler.unlink()
            broker.restart()
            await play.service.ready()
            await eventually(lambda: play.desk.client.is_connected)
            await play.complete_all(list(asked))
            await play.service.ready()


def _silent(service: Service) -> bool:
    code, body = service.readyz()
    return code == 503 and any(
        reason["code"] == "writes_unanswered" and reason["resource"] == topology.SCHEDULES for reason in body["reasons"]
    )
