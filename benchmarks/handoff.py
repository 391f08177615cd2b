"""How long a resume takes from its publishing to its handler, alone and beside flows that are slow.

    python -m benchmarks.handoff                     # three rounds, then 20,000 resumes of a limited flow at start
    python -m benchmarks.handoff --rounds 5 --backlog 2000

Broker and notify consumer (default settings, SQLite) are its own; feedback is answered by a stand-in. Prints one JSON
object. ``alone``, ``beside_slow``: 100 resumes of one flow, one after the other, while nothing else is to be done, and
while 200 of another wait whose handlers take 2 s. ``backlog``: a flow limited to 50 a second has that many waiting
when the consumer starts; fresh resumes of another flow come all the while.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import nats

from benchmarks.broker import running_broker
from benchmarks.measure import median, percentile
from timer_service.domain.identity import LineageKey, derive_timer_ref
from timer_service.jetstream import topology
from timer_service.jetstream.topology import Sizes
from timer_service.wire.canonical import canonical_json, payload_sha256

RESUMES = 100
WAITING = 200
PAUSE_S = 0.05
FRESH_S = 20.0
_NOTHING = dict.fromkeys(("code", "message", "timer_ref", "generation", "fence", "phase", "due_at_ms"))


def resume(flow: str, number: int) -> bytes:
    """A resume of the run ``number`` of ``flow``, as the timer service publishes it, stamped with the present."""
    key = LineageKey(flow, "1", f"run-{number}", "wait")
    timer_ref = derive_timer_ref(key)
    payload = {"sent_ns": time.time_ns()}
    return canonical_json(
        {
            "v": 1,
            "resume_id": f"{timer_ref}.0",
            "timer_ref": timer_ref,
            "timer": {name: getattr(key, name) for name in key.__struct_fields__},
            "generation": 0,
            "fence": 2,
            "retries_used": 0,
            "max_retries": 0,
            "edges": None,
            "runtime_sha256": None,
            "due_at_ms": 1_000,
            "elapsed_at_ms": 1_002,
            "payload": payload,
            "payload_sha256": payload_sha256(payload),
        }
    )


class Desk:
    """Publishes resumes and answers every feedback with ``accepted``."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._stream = client.jetstream()
        self._number = 0

    @classmethod
    @asynccontextmanager
    async def at(cls, url: str) -> AsyncIterator["Desk"]:
        client = await nats.connect(url, name="handoff")
        feedback = await client.subscribe("durable_timer.commands.>", cb=cls._answer)
        desk = cls(client)
        for spec in topology.streams(Sizes()):
            await client.request(f"$JS.API.STREAM.CREATE.{spec.name}", json.dumps(spec.config(1)).encode())
        try:
            yield desk
        finally:
            await feedback.unsubscribe()
            await client.close()

    @staticmethod
    async def _answer(message: Any) -> None:
        reply = (message.headers or {}).get("Durable-Timer-Reply")
        if reply:
            outcome = {"command_id": json.loads(message.data)["command_id"], "status": "accepted", **_NOTHING}
            await message._client.publish(reply, json.dumps(outcome).encode())

    async def publish(self, flow: str, count: int = 1) -> None:
        for first in range(0, count, 1000):
            await asyncio.gather(*(self._one(flow) for _ in range(min(1000, count - first))))

    async def _one(self, flow: str) -> None:
        self._number += 1
        await self._stream.publish(topology.RESUME_SUBJECT, resume(flow, self._number), timeout=30)


class Consumer:
    """``notify-consumer serve`` as a child, with the journal of what reached its handlers."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path, port: int) -> None:
        self._journal = folder / "journal"
        self._port = port
        self.pid = process.pid

    def delays_ms(self, flow: str) -> list[float]:
        """From publishing to handler, for each resume of ``flow`` that was handed off, in that order."""
        lines = [line.split() for line in self._journal.read_text().splitlines()] if self._journal.exists() else []
        return [(int(seen) - int(sent)) / 1e6 for name, sent, seen in lines if name == flow]

    async def handed_off(self, flow: str, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.delays_ms(flow)) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{flow} was not handed off: {len(self.delays_ms(flow))} of {count}")
            await asyncio.sleep(0.01)

    def details(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz") as reply:
            return dict(json.loads(reply.read())["details"])

    def memory_mib(self) -> float:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1024


@contextmanager
def consumer_at(url: str) -> Iterator[Consumer]:
    with tempfile.TemporaryDirectory(prefix="durable-timer-bench-") as name:
        folder = Path(name)
        log = folder / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "notify_consumer", "serve", "--nats", url, "--http", "127.0.0.1:0",
                 "--handlers", "benchmarks.handoff_handlers", "--outbox", f"sqlite:{folder / 'outbox.db'}",
                 "--drain-grace-ms", "0"],
                stderr=file, env={**os.environ, "HANDOFF_JOURNAL": str(folder / "journal")},
            )  # fmt: skip
        try:
            yield Consumer(process, folder, _port_when_ready(process, log))
        finally:
            process.kill()
            process.wait()


def _port_when_ready(process: "subprocess.Popen[bytes]", log: Path) -> int:
    deadline = time.monotonic() + 30
    while b'"service.ready"' not in (text := log.read_bytes()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the consumer did not get ready: {text.decode()}")
        time.sleep(0.02)
    found = re.search(rb'"port": ?(\d+)', text)
    assert found is not None
    return int(found[1])


async def _one_by_one(desk: Desk, consumer: Consumer, seconds: float = 0.0) -> list[float]:
    """The delays of quick resumes, published with a pause between them: 100, or as many as go into ``seconds``."""
    before, sent, end = len(consumer.delays_ms("quick")), 0, time.monotonic() + seconds
    while sent < RESUMES or time.monotonic() < end:
        await desk.publish("quick")
        sent += 1
        await asyncio.sleep(PAUSE_S)
    await consumer.handed_off("quick", before + sent)
    return consumer.delays_ms("quick")[before:]


async def round_of(url: str) -> dict[str, list[float]]:
    async with Desk.at(url) as desk:
        with consumer_at(url) as consumer:
            await _one_by_one(desk, consumer)  # everything has been imported and opened once
            alone = await _one_by_one(desk, consumer)
            await desk.publish("slow", WAITING)
            await consumer.handed_off("slow", 1)
            beside = await _one_by_one(desk, consumer)
            assert len(consumer.delays_ms("slow")) < WAITING
    return {"alone": alone, "beside_slow": beside}


class Watch:
    """The most handlers at work, and the most memory of the consumer, while it runs."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self.handlers = 0
        self.memory_mib = 0.0

    async def run(self) -> None:
        while True:
            self.handlers = max(self.handlers, self._consumer.details()["handling"])
            self.memory_mib = max(self.memory_mib, self._consumer.memory_mib())
            await asyncio.sleep(0.1)


async def backlog_of(url: str, count: int) -> dict[str, Any]:
    async with Desk.at(url) as desk:
        await desk.publish("limited", count)
        with consumer_at(url) as consumer:
            begun, at_start_mib = time.monotonic(), consumer.memory_mib()
            watch = Watch(consumer)
            watching = asyncio.create_task(watch.run())
            await desk.publish("quick")
            await consumer.handed_off("quick", 1)
            behind_it_ms = consumer.delays_ms("quick")[0]
            fresh = await _one_by_one(desk, consumer, FRESH_S)
            handled = len(consumer.delays_ms("limited")) / (time.monotonic() - begun)
            watching.cancel()
    return {
        "waiting": count,
        "published_behind_it_ms": round(behind_it_ms, 1),
        "fresh": _summary(fresh),
        "limited_per_s": round(handled, 1),
        "most_handlers": watch.handlers,
        "memory_mib": [round(at_start_mib), round(watch.memory_mib)],
    }


def _summary(delays_ms: list[float]) -> dict[str, float]:
    ordered = sorted(delays_ms)
    figures = {"p50_ms": percentile(ordered, 50), "p99_ms": percentile(ordered, 99)}
    return {"count": len(ordered), **{name: round(value, 2) for name, value in figures.items()}}


def _rounds(count: int) -> dict[str, Any]:
    rounds = []
    for _ in range(count):
        with running_broker() as broker:
            rounds.append(asyncio.run(round_of(broker.url)))
    p99 = [{name: percentile(sorted(delays), 99) for name, delays in each.items()} for each in rounds]
    return {
        **{name: _summary([delay for each in rounds for delay in each[name]]) for name in rounds[0]},
        "p99_ratio_of_rounds": [round(each["beside_slow"] / each["alone"], 2) for each in p99],
        "p99_ratio_median": round(median(each["beside_slow"] / each["alone"] for each in p99), 2),
    }


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="latency of hand-offs; prints one JSON object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backlog", type=int, default=20_000, help="resumes that wait at the start (0: leave it out)")
    options = parser.parse_args()
    result = _rounds(options.rounds) if options.rounds else {}
    if options.backlog:
        with running_broker() as broker:
            result["backlog"] = asyncio.run(backlog_of(broker.url, options.backlog))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
