"""Many whole lives, one after another: does anything grow that should not?

    python -m benchmarks.cycles [--cycles 100000] [--tombstone-ttl 5]

Starts and completes timers, each with a payload of its own in the snapshot stream, keeping a window of them open. Then
it waits until the removal markers have run out, and looks: what is left in each stream, what lies on the disk, what the
idle service takes of the processor and of memory, and how long a restart takes until it is ready. What may stay is the
archive: a record for each life. Exit code 1 when anything else did, or when a timer was lost.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import names
from benchmarks.bare import BareClient
from benchmarks.contenders import DURABLE_TIMER, serving
from benchmarks.engine import Engine, archived
from benchmarks.measure import cpu_seconds
from timer_service.embedded import EmbeddedBroker

_WINDOW = 512
_IDLE_S = 10.0
_PATIENCE_S = 60.0
_SNAPSHOTS_STREAM = "DURABLE_TIMER_SNAPSHOTS"
_MUST_BE_EMPTY = (
    names.STATE_STREAM,
    names.COMMANDS_STREAM,
    names.RESUMES_STREAM,
    _SNAPSHOTS_STREAM,
)


async def live(client: BareClient, cycles: int) -> dict[str, Any]:
    """Start and complete so many timers."""
    engine = Engine(client)
    engine.begin()
    due, begun = '{"delay_ms":1}', time.monotonic()

    def next_one() -> None:
        if engine.counts.started < cycles:
            engine.start(due)

    engine.on_removed = next_one
    for _ in range(min(_WINDOW, cycles)):
        engine.start(due)
    await engine.settle()
    took_s = time.monotonic() - begun
    return {"cycles": engine.counts.removed, "lost": cycles - engine.counts.removed, "per_s": cycles / took_s}


async def stored(client: BareClient) -> dict[str, int]:
    """Messages in each stream."""
    answer = await client.request("$JS.API.STREAM.LIST")
    return {stream["config"]["name"]: int(stream["state"]["messages"]) for stream in answer["streams"]}


async def emptied(client: BareClient) -> dict[str, Any]:
    """Wait until what must not stay is gone; the seconds that took, and what stands then."""
    begun = time.monotonic()
    while True:
        left = await stored(client)
        waited_s = time.monotonic() - begun
        if not any(left[name] for name in _MUST_BE_EMPTY) or waited_s > _PATIENCE_S:
            return {"emptied_s": waited_s, "left": {name: left[name] for name in _MUST_BE_EMPTY}}
        await asyncio.sleep(0.2)


async def idle(pid: int) -> dict[str, float]:
    """What a process takes while nothing happens."""
    before = cpu_seconds(pid)
    await asyncio.sleep(_IDLE_S)
    share = (cpu_seconds(pid) - before) / _IDLE_S
    return {"cpu_percent": 100 * share, "memory_mib": memory_mib(pid)}


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def on_disk(folder: Path) -> float:
    """MiB under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


async def run(options: argparse.Namespace, broker: EmbeddedBroker) -> dict[str, Any]:
    """The whole measurement."""
    settings = {
        "DURABLE_TIMER_TOMBSTONE_TTL_S": str(options.tombstone_ttl),
        "DURABLE_TIMER_INLINE_PAYLOAD_MAX_BYTES": "0",
    }
    client = await BareClient.connect(broker.url)
    with serving(DURABLE_TIMER, broker.url, settings=settings) as pid:
        fresh = await idle(pid)
        result: dict[str, Any] = await live(client, options.cycles)
        result |= await emptied(client)
        result |= {"archived": await archived(client), "idle_before": fresh, "idle_after": await idle(pid)}
    result["store_mib"] = on_disk(broker.data_dir / "jetstream")
    begun = time.monotonic()
    with serving(DURABLE_TIMER, broker.url, settings=settings) as pid:
        result["ready_again_s"] = time.monotonic() - begun
        result["remembering"] = await idle(pid)  # it reads the archive's keys beside its work, once
        result["idle_restarted"] = await idle(pid)
    client.check()
    client.close()
    return result


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="many whole lives: does anything grow that should not?")
    parser.add_argument("--cycles", type=int, default=100_000)
    parser.add_argument("--tombstone-ttl", type=int, default=5, metavar="S", help="seconds that removal markers stay")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="durable-timer-cycles-") as folder, EmbeddedBroker(folder) as broker:
        result = asyncio.run(run(options, broker))
    print(json.dumps(result, indent=2))
    grew = any(result["left"].values()) or result["archived"] != options.cycles
    return 1 if grew or result["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
