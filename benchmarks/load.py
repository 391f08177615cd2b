"""The load: one scenario against whichever service answers, the same for every contender.

It stands on the bare client, so that it uses a fraction of what any contender uses. Run as a program it
prints one JSON object:

    python -m benchmarks.load throughput --nats URL --seconds 6 --window 512 --watch service=PID
    python -m benchmarks.load paced      --nats URL --seconds 6 --rate 1000
    python -m benchmarks.load burst      --nats URL --count 10000 --lead 10
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.bare import BareClient
from benchmarks.engine import Engine, archived, live_entries, stored_writes
from benchmarks.measure import cpu_seconds, percentile

_PACE_S = 0.005
_BURST_START_RATE = 4000


@dataclass(slots=True)
class Lateness:
    """How long after its due time each resume arrived here, in milliseconds; below zero is early."""

    samples: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """p50, p99 and max in milliseconds, number of samples, and how many were early (must be 0)."""
        ordered = sorted(self.samples)
        return {
            "samples": len(ordered),
            "p50_ms": percentile(ordered, 50),
            "p99_ms": percentile(ordered, 99),
            "max_ms": percentile(ordered, 100),
            "early": sum(1 for sample in ordered if sample < 0),
        }


@dataclass(slots=True)
class Sample:
    """Counters and clocks at one moment."""

    at: float
    removed: int
    cpu: dict[str, float]


class Meter:
    """Takes samples of an engine and of the watched processes, always including this one."""

    def __init__(self, engine: Engine, pids: dict[str, int]) -> None:
        self._engine = engine
        self._pids = {**pids, "load": os.getpid()}

    def sample(self) -> Sample:
        """Now."""
        cpu = {name: cpu_seconds(pid) for name, pid in self._pids.items()}
        return Sample(time.perf_counter(), self._engine.counts.removed, cpu)


def rates(first: Sample, last: Sample) -> dict[str, Any]:
    """Lifecycles a second and processor milliseconds a lifecycle between two samples."""
    finished = last.removed - first.removed
    cpu = {name: (last.cpu[name] - first.cpu[name]) * 1000 / max(1, finished) for name in first.cpu}
    return {
        "lifecycles_per_s": finished / (last.at - first.at),
        "cpu_ms_per_lifecycle": cpu,
    }


async def throughput(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Keep `window` timers open, each due 1 ms after its start; measure the middle of the run.

    The run is bounded by time and not by a number of timers, so that contenders of any speed are measured
    equally long. Starts stop after the measurement, and then everything must end.
    """
    meter = Meter(engine, options.watch)
    due = '{"delay_ms":1}'
    engine.on_removed = lambda: engine.start(due)
    for _ in range(options.window):
        engine.start(due)
    await asyncio.sleep(options.warm_up)
    first = meter.sample()
    await asyncio.sleep(options.seconds)
    last = meter.sample()
    engine.on_removed = None
    return {**rates(first, last), "settle_s": await engine.settle()}


async def paced(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Start `rate` timers a second with random delays of 0.1 to 2 s; lateness after the warm-up."""
    lateness = Lateness()
    begun_ms = time.time() * 1000
    engine.on_resume = _record_after(lateness, begun_ms + options.warm_up * 1000)
    chance = random.Random(7)
    await _pace(
        lambda: engine.start(f'{{"delay_ms":{chance.randint(100, 2000)}}}'),
        int(options.rate * (options.seconds + options.warm_up)),
        options.rate,
    )
    settle_s = await engine.settle()
    return {"lateness": lateness.summary(), "settle_s": settle_s}


async def burst(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Start `count` timers due at one instant, `lead` seconds ahead; time until the last has resumed."""
    lateness = Lateness()
    engine.on_resume = _record_after(lateness, 0)
    due_ms = int((time.time() + options.lead) * 1000)
    await _pace(lambda: engine.start(f'{{"at_ms":{due_ms}}}'), options.count, _BURST_START_RATE)
    await asyncio.sleep(max(0.0, due_ms / 1000 - time.time()))
    armed = engine.counts.created
    settle_s = await engine.settle()
    return {"lateness": lateness.summary(), "armed_before_due": armed, "settle_s": settle_s}


def _record_after(lateness: Lateness, from_ms: float) -> Callable[[int, float], None]:
    def record(due_at_ms: int, arrived_ms: float) -> None:
        if due_at_ms >= from_ms:
            lateness.samples.append(arrived_ms - due_at_ms)

    return record


async def _pace(act: Callable[[], None], total: int, rate: float) -> None:
    """Call `act` `total` times, evenly at `rate` a second, whatever the other side does (an open loop)."""
    begun = time.perf_counter()
    done = 0
    while done < total:
        target = min(total, int((time.perf_counter() - begun) * rate) + 1)
        for _ in range(target - done):
            act()
        done = target
        await asyncio.sleep(_PACE_S)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """One scenario from connection to final check against the broker."""
    client = await BareClient.connect(options.nats)
    writes_before, archived_before = await stored_writes(client), await archived(client)
    engine = Engine(client)
    engine.begin()
    scenario = {"throughput": throughput, "paced": paced, "burst": burst}[options.scenario]
    result = await scenario(engine, options)
    client.check()
    result |= await _verdict(engine, writes_before, archived_before)
    client.close()
    return result


async def _verdict(engine: Engine, writes_before: int, archived_before: int) -> dict[str, Any]:
    """What the engine counted beside what the broker holds; `lost` must be 0."""
    counts = engine.counts
    writes = await stored_writes(engine.client) - writes_before
    in_archive = await archived(engine.client) - archived_before
    live = await live_entries(engine.client)
    return {
        "started": counts.started,
        "finished": min(counts.removed, in_archive),
        "lost": counts.started - min(counts.removed, in_archive),
        "live_left": live,
        "duplicates": counts.duplicates,
        "refused": counts.refused,
        "writes_per_lifecycle": writes / max(1, counts.removed),
    }


def _watched(text: str) -> tuple[str, int]:
    name, _, pid = text.partition("=")
    return name, int(pid)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="load for a timer service; prints one JSON object")
    parser.add_argument("scenario", choices=["throughput", "paced", "burst"])
    parser.add_argument("--nats", required=True, metavar="URL")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of the measurement, after the warm-up")
    parser.add_argument("--warm-up", type=float, default=1.5, help="seconds before it")
    parser.add_argument("--window", type=int, default=512, help="timers open at a time (throughput)")
    parser.add_argument("--rate", type=float, default=200.0, help="starts a second (paced)")
    parser.add_argument("--count", type=int, default=10_000, help="timers due at once (burst)")
    parser.add_argument("--lead", type=float, default=10.0, help="seconds from the first start to due (burst)")
    parser.add_argument("--watch", type=_watched, action="append", default=[], metavar="NAME=PID")
    options = parser.parse_args()
    options.watch = dict(options.watch)
    return options


def main() -> None:
    """Command line entry."""
    print(json.dumps(asyncio.run(run(_options()))))


if __name__ == "__main__":
    main()
