"""The NATS outbox while its broker restarts, freezes or is not there, and consumers on it that are killed or frozen."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from notify_consumer.errors import LeaseLost, OutboxUnavailable
from notify_consumer.outbox.base import FEEDBACK_LANE, Claim, Feedback, Row, State
from notify_consumer.outbox.nats_kv import NatsOutbox
from tests.support.broker import Broker
from tests.support.cluster import Cluster
from tests.support.notify import new_row, resume_body, until
from tests.support.notify_bench import Bench

LONG_MS = 60_000
FROZEN_S = 10.0
COMPLETE = Feedback("complete", {"v": 1})


def outbox_on(broker: Broker) -> NatsOutbox:
    return NatsOutbox(broker.url, timeout_ms=1_000, max_bytes=2**25)


@pytest.fixture
async def outbox(broker: Broker) -> AsyncIterator[NatsOutbox]:
    made = outbox_on(broker)
    await made.open()
    yield made
    await made.close()


async def works(outbox: NatsOutbox, name: str) -> bool:
    """Whether a row can be taken in now."""
    try:
        await outbox.survey(1)
        return bool(await outbox.insert([new_row(name)]))
    except OutboxUnavailable:
        return False


class Working:
    """Takes rows in and ends them, as a consumer does, whatever the broker does meanwhile."""

    def __init__(self, outbox: NatsOutbox, name: str) -> None:
        self._outbox = outbox
        self._name = name
        self.inserted: list[str] = []
        self.finished: list[str] = []
        self.lost = 0
        self.refused = 0
        self.stopping = False

    async def run(self) -> None:
        while not self.stopping:
            await self._insert()
            await self._work()

    async def _insert(self) -> None:
        row = new_row(f"{self._name}{len(self.inserted)}")
        while True:
            try:
                await self._outbox.insert([row])
                break
            except OutboxUnavailable:
                self.refused += 1
                await asyncio.sleep(0.02)
        self.inserted.append(row.resume_id)

    async def _work(self) -> None:
        try:
            claims = await self._outbox.claim(self._name, {"x": 4, FEEDBACK_LANE: 4}, 3_000)
        except OutboxUnavailable:
            self.refused += 1
            return
        for claim in claims:
            await self._end(claim)

    async def _end(self, claim: Claim) -> None:
        while True:
            try:
                if claim.feedback is None:
                    claim = await self._outbox.store_outcome(claim, COMPLETE)
                await self._outbox.finish(claim, "accepted")
            except OutboxUnavailable:
                self.refused += 1
                await asyncio.sleep(0.02)
            except LeaseLost:
                self.lost += 1
                return
            else:
                self.finished.append(claim.resume_id)
                return


def more_than(workers: list[Working], finished: int) -> bool:
    return sum(len(worker.finished) for worker in workers) > finished


async def test_work_goes_on_through_broker_restarts(broker: Broker, outbox: NatsOutbox) -> None:
    """Two stores in the middle of everything, the broker stopped once and killed once: each row ends, once."""
    other = outbox_on(broker)
    await other.open()
    workers = [Working(outbox, "a"), Working(other, "b")]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    for hard in (False, True):
        done = sum(len(worker.finished) for worker in workers)
        await until(partial(more_than, workers, done + 20), "work is done")
        await asyncio.to_thread(broker.restart, hard=hard)
    done = sum(len(worker.finished) for worker in workers)
    await until(partial(more_than, workers, done + 20), "work is done again")
    for worker in workers:
        worker.stopping = True
    await asyncio.gather(*tasks)
    inserted = {each for worker in workers for each in worker.inserted}

    async def all_done() -> bool:
        for worker in workers:
            await worker._work()
        return (await outbox.counts())[State.DONE] == len(inserted)

    await until(all_done, "every row is done")
    finished = [each for worker in workers for each in worker.finished]
    assert len(finished) == len(set(finished))
    assert {each.resume_id for each in await outbox.browse(State.DONE, 10_000)} == inserted
    await other.close()


async def test_what_others_do_is_known_soon_after_a_restart(broker: Broker, outbox: NatsOutbox) -> None:
    """The index is current again by itself when the broker is back, for foreign rows too."""
    other = outbox_on(broker)
    await other.open()
    await asyncio.to_thread(broker.restart)

    async def takes() -> bool:
        return await works(outbox, "after")

    async def seen() -> bool:
        try:
            return bool((await other.survey(1)).lanes)
        except OutboxUnavailable:
            return False

    await until(takes, "a row is taken in")
    await until(seen, "the other sees it")
    await other.close()


async def test_a_frozen_broker_is_unavailable_and_comes_back(broker: Broker, outbox: NatsOutbox) -> None:
    """For 10 s nothing crashes or hangs while the broker does not answer; then the owner's next write is good (C33)."""
    await outbox.insert([new_row("a"), new_row("b")])
    (claim, _) = await outbox.claim("me", {"x": 2}, LONG_MS)
    loop = asyncio.get_running_loop()
    with broker.paused():
        begun = loop.time()
        while loop.time() - begun < FROZEN_S:
            refused = await asyncio.gather(
                outbox.insert([new_row("c")]),
                outbox.claim("me", {"x": 1}, LONG_MS),
                outbox.renew([claim], LONG_MS),
                outbox.store_outcome(claim, COMPLETE),
                outbox.get(claim.resume_id),
                outbox.counts(),
                return_exceptions=True,
            )
            assert [type(each) for each in refused] == [OutboxUnavailable] * 6
        with pytest.raises(OutboxUnavailable):
            await outbox.survey(1)

    async def takes() -> bool:
        return await works(outbox, "d")

    await until(takes, "it goes on")
    await outbox.finish(await outbox.store_outcome(claim, COMPLETE), "accepted")
    counts = await outbox.counts()
    assert (counts[State.DONE], counts[State.CLAIMED]) == (1, 1)


async def test_opening_waits_for_a_broker_to_come(tmp_path: Path) -> None:
    """Without a broker opening fails cleanly, each time anew, until one is there."""
    with Broker(tmp_path / "nats") as broker:
        url = broker.url
        await asyncio.to_thread(broker.stop)
        outbox = NatsOutbox(url, timeout_ms=200)
        for _ in range(2):
            with pytest.raises(OutboxUnavailable):
                await outbox.open()
        await asyncio.to_thread(broker.start)

        async def opened() -> bool:
            try:
                await outbox.open()
            except OutboxUnavailable:
                return False
            return True

        await until(opened, "it opens")
        assert await outbox.insert([new_row()])
        await outbox.close()


@pytest.mark.parametrize("names", [["old"], ["old", "new"]])
async def test_a_store_that_went_back_is_read_anew(
    broker: Broker, outbox: NatsOutbox, tmp_path: Path, names: list[str]
) -> None:
    """A broker restored from an older copy: rows of after it are forgotten, those of before it stand as they stood."""
    old, new = new_row("old", lane="old"), new_row("new")
    await outbox.insert([old])
    await asyncio.to_thread(broker.stop)
    await run("cp", "-a", str(tmp_path / "nats"), str(tmp_path / "copy"))
    await asyncio.to_thread(broker.start)

    async def claims() -> list[Claim]:
        try:
            await outbox.insert([{"old": old, "new": new}[name] for name in names])
            return await outbox.claim("me", {"old": 1}, LONG_MS)
        except OutboxUnavailable:
            return []

    former = await until(claims, "the old row is claimed")
    await outbox.renew(former, LONG_MS)
    await asyncio.to_thread(broker.stop)
    await run("rm", "-r", str(tmp_path / "nats/jetstream"))
    await run("cp", "-a", str(tmp_path / "copy/jetstream"), str(tmp_path / "nats"))
    await asyncio.to_thread(broker.start)

    async def as_it_was() -> bool:
        try:
            return set((await outbox.survey(5)).lanes) == {"old"}
        except OutboxUnavailable:
            return False

    await until(as_it_was, "only the old row waits")
    with pytest.raises(LeaseLost):
        await outbox.finish(former[0], "accepted")
    (claim,) = await outbox.claim("me", {"old": 1}, LONG_MS)
    assert claim.attempts == 1


async def run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == 0


# -- three replicas -------------------------------------------------------------------------------------------


async def test_three_replicas_outlive_one(tmp_path: Path) -> None:
    """On a cluster everything works as on one server, and goes on when the node that leads the bucket is killed."""
    with Cluster(tmp_path / "cluster") as cluster:
        boxes = [NatsOutbox(cluster.url, timeout_ms=2_000, replicas=3, max_bytes=2**25) for _ in range(2)]
        for box in boxes:
            await box.open()
        workers = [Working(box, name) for box, name in zip(boxes, "ab", strict=True)]
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        await until(partial(more_than, workers, 20), "work is done")
        await asyncio.to_thread(lambda: cluster.kill(cluster.leader_of(boxes[0].bucket.stream)))
        done = sum(len(worker.finished) for worker in workers)
        await until(partial(more_than, workers, done + 20), "work is done with two")
        for worker in workers:
            worker.stopping = True
        await asyncio.gather(*tasks)
        inserted = {each for worker in workers for each in worker.inserted}

        async def all_done() -> bool:
            for worker in workers:
                await worker._work()
            return (await boxes[1].counts())[State.DONE] == len(inserted)

        await until(all_done, "every row is done")
        row = await boxes[0].get(workers[0].finished[0])
        assert row is not None
        assert 0 < row.inserted_at_ms <= row.updated_at_ms
        for box in boxes:
            await box.close()


# -- consumers ------------------------------------------------------------------------------------------------

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
"""


class Scene(Bench):
    """A broker, the streams, and ``notify-consumer serve --outbox nats`` processes, all gone at the end."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(url, folder)
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        (folder / "nats_outbox_handlers.py").write_text(_HANDLERS)

    async def consumer(self, who: str, lease_ms: int = 1_000) -> asyncio.subprocess.Process:
        options = f"--nats {self.url} --http 127.0.0.1:0 --instance {who} --outbox nats --lease-ms {lease_ms}"
        with self._log(who).open("ab") as log:
            process = self.processes[who] = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "notify_consumer", "serve", *options.split(), "--handlers", "nats_outbox_handlers"),
                cwd=self.folder,
                env={**os.environ, "WHO": who, "PYTHONPATH": str(Path(__file__).parents[2])},
                stderr=log,
            )
        await until(lambda: self.logged(who, "service.ready") or process.returncode is not None)
        assert process.returncode is None, self._log(who).read_text()
        return process

    def _log(self, who: str) -> Path:
        return self.folder / f"{who}.log"

    def lost(self, who: str) -> list[dict[str, Any]]:
        """What it says about leases of rows that it has lost; one on its name may be lost before that."""
        return [line for line in self.logged(who, "lease.lost") if "resume_id" in line]

    def logged(self, who: str, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._log(who).read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def journal(self) -> list[str]:
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    async def begun(self, line: str) -> None:
        await until(lambda: line in self.journal(), f"{line} in the journal")

    async def command(self, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "notify_consumer", "outbox", *arguments, "--outbox", "nats", "--nats", self.url),
            cwd=Path(__file__).parents[2],
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, out
        return out.decode()


@pytest.fixture
async def scene(broker: Broker, tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(broker.url, tmp_path)
    await made.connect()
    await made.provide_streams()
    yield made
    for process in made.processes.values():
        if process.returncode is None:
            process.kill()
            await process.wait()
    await made.nats.close()


async def done(outbox: NatsOutbox, name: str) -> Row:
    async def there() -> Row | None:
        row = await outbox.get(resume_body(name)["resume_id"])
        return row if row is not None and row.state is State.DONE else None

    row: Row = await until(there, f"{name} is done")
    return row


async def test_a_consumer_that_dies_or_freezes_in_a_hand_off_is_replaced(scene: Scene, outbox: NatsOutbox) -> None:
    """SIGKILL in mid hand-off, then SIGSTOP past the lease: another takes over, the frozen one is refused."""
    first = await scene.consumer("first")
    await scene.publish("a-1")
    await scene.begun("begin a-1 first")
    first.kill()
    await first.wait()
    second = await scene.consumer("second")
    await scene.begun("begin a-1 second")
    second.send_signal(signal.SIGSTOP)
    await scene.consumer("third", lease_ms=60_000)
    await scene.begun("begin a-1 third")
    second.send_signal(signal.SIGCONT)
    await until(lambda: scene.lost("second"), "the second one notices")
    (scene.folder / "gate").touch()
    assert (await done(outbox, "a-1")).attempts == 3
    assert scene.journal() == ["begin a-1 first", "begin a-1 second", "begin a-1 third", "end a-1 third"]
    assert len(scene.commands) == 1
    listed = json.loads(await scene.command("list", "--json"))
    assert (listed["counts"]["done"], listed["rows"][0]["settled"]) == (1, "accepted")
    assert "removed 1" in await scene.command("purge", "--older-than-s", "0")
    assert (await outbox.counts())[State.DONE] == 0


async def test_a_consumer_hands_off_before_and_after_its_broker_restarts(scene: Scene, broker: Broker) -> None:
    """The whole way with one broker for resumes and outbox alike: what is published is answered, once."""
    (scene.folder / "gate").touch()
    await scene.consumer("first")
    await scene.publish("a-1")
    await until(lambda: len(scene.commands) == 1)
    await asyncio.to_thread(broker.restart)

    async def published() -> bool:
        try:
            await scene.publish("b-1")
        except Exception:
            return False
        return True

    await until(published, "the resume is stored")
    await until(lambda: "end b-1 first" in scene.journal(), "it is handed off")
    assert scene.journal().count("end a-1 first") == 1
    await scene.all_read()
