"""A quiet service must not be late: one start now and then, each due soon after, for a long time.

    python -m benchmarks.steady                      # 20 minutes, one start every 7 s, due 1.5 s later
    python -m benchmarks.steady --minutes 2 --every 1.7 --pause 7 --pause-each 8

It brings broker and service along, or measures those at ``--nats``. Prints one JSON object: how late each resume was
stored, by the broker's clock, how many came twice or not at all, and how long the machine kept an idle process waiting
(``stall_ms``: on a busy one lateness means little). Ends with 1 when p99 is 50 ms or more, or when
one is an outlier the size of a fetch time-out (500 ms).
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nats

from benchmarks.broker import running_broker
from benchmarks.measure import percentile
from timer_service.jetstream import topology

DUE_MS = 1_500
OUTLIER_MS = 500
P99_MS = 50
_PATIENCE_S = 15.0
_TICK_S = 0.02
_NAMED = ("timer_ref", "generation", "fence")


class Reader:
    """Reads every resume, answers it, and notes when the broker had stored it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.late_ms: dict[str, list[float]] = {}

    async def run(self) -> None:
        inbox = self._client.new_inbox()
        await self._client.subscribe(inbox, cb=self._on_message)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{topology.RESUMES}.{topology.RESUME_CONSUMER}"
        while True:
            await self._client.publish(subject, b'{"batch":100,"expires":5000000000}', inbox)
            await asyncio.sleep(5)

    async def _on_message(self, message: Any) -> None:
        if not message.reply.startswith("$JS.ACK."):
            return
        resume = json.loads(message.data)
        stored_ms = int(message.reply.split(".")[7]) / 1e6
        self.late_ms.setdefault(resume["timer_ref"], []).append(stored_ms - resume["due_at_ms"])
        await message.ack()
        answer = {
            "v": 1,
            "command_id": uuid.uuid4().hex,
            **{k: resume[k] for k in ("timer_ref", "generation", "fence")},
        }
        await self._client.publish(topology.command_subject("complete"), json.dumps(answer).encode())


class Stall:
    """How long this process, which has nothing to do, had to wait for a processor: what the machine adds to all."""

    def __init__(self) -> None:
        self.worst_ms = 0.0

    async def watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            self.worst_ms = max(self.worst_ms, (time.perf_counter() - before - _TICK_S) * 1000)


async def measure(url: str, seconds: float, every_s: float, pause_s: float, pause_each: int) -> dict[str, Any]:
    """Start a timer every ``every_s`` for ``seconds``, with a pause after each ``pause_each`` of them (0: none)."""
    client = await nats.connect(url, name="steady")
    stream = client.jetstream()
    reader = Reader(client)
    stall = Stall()
    helpers = [asyncio.create_task(reader.run()), asyncio.create_task(stall.watch())]
    started, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        body = {"v": 1, "command_id": "s", "timer": {"name": uuid.uuid4().hex}, "due": {"delay_ms": DUE_MS}}
        await stream.publish(topology.command_subject("start"), json.dumps(body).encode())
        started += 1
        await asyncio.sleep(pause_s if pause_each and started % pause_each == 0 else every_s)
    deadline = time.monotonic() + _PATIENCE_S
    while len(reader.late_ms) < started and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    for helper in helpers:
        helper.cancel()
    await client.close()
    return {**_summary(started, reader.late_ms), "stall_ms": round(stall.worst_ms, 1)}


def _summary(started: int, late_ms: dict[str, list[float]]) -> dict[str, Any]:
    ordered = sorted(late for lates in late_ms.values() for late in lates)
    return {
        "started": started,
        "fired": len(late_ms),
        "twice": sum(len(lates) > 1 for lates in late_ms.values()),
        "early": sum(late < 0 for late in ordered),
        "p50_ms": round(percentile(ordered, 50), 2),
        "p99_ms": round(percentile(ordered, 99), 2),
        "max_ms": round(percentile(ordered, 100), 2),
        "outliers": sum(late >= OUTLIER_MS for late in ordered),
    }


@contextmanager
def service_at(url: str) -> Iterator[None]:
    """``durable-timer serve`` as a child, ready within seconds."""
    program = Path(sys.executable).with_name("durable-timer")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [program, "serve", "--nats", url, "--http", "127.0.0.1:0"], stdout=log, stderr=log,
            env={**os.environ, "DURABLE_TIMER_INSTANCE": f"steady-{os.getpid()}"},
        )  # fmt: skip
        try:
            _await_ready(process, log)
            yield
        finally:
            process.terminate()
            process.wait(20)


def _await_ready(process: "subprocess.Popen[bytes]", log: Any) -> None:
    deadline = time.monotonic() + 30
    while True:
        log.seek(0)
        if b'"service.ready"' in log.read():
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the service did not get ready")
        time.sleep(0.05)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="lateness of a quiet service; prints one JSON object")
    parser.add_argument("--nats", metavar="URL", help="measure a running service instead of one of its own")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=7.0, metavar="S", help="seconds between two starts")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="a longer pause now and then")
    parser.add_argument("--pause-each", type=int, default=0, metavar="N", help="after each N starts")
    options = parser.parse_args()
    arguments = (options.minutes * 60, options.every, options.pause, options.pause_each)
    if options.nats:
        result = asyncio.run(measure(options.nats, *arguments))
    else:
        with running_broker() as broker, service_at(broker.url):
            result = asyncio.run(measure(broker.url, *arguments))
    print(json.dumps(result))
    whole = result["fired"] == result["started"] and not result["twice"] and not result["early"]
    sys.exit(0 if whole and result["p99_ms"] < P99_MS and not result["outliers"] else 1)


if __name__ == "__main__":
    main()
