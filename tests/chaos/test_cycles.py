"""C41: thousands of lives leave nothing behind but their records, and an idle service is idle."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from tests.support.broker import Broker
from tests.support.cpu import rests
from tests.support.service import Desk, Engine, Service, complete, eventually, unique
from timer_service.jetstream import topology

CYCLES = 3_000
IDLE_SHARE = 0.15
"""Measured: 0.02. The rest is for a machine that does other things meanwhile."""
READY_S = 20.0
SETTINGS: dict[str, object] = {"tombstone_ttl_s": 1, "snapshot_grace_ms": 1_000, "reconcile_interval_ms": 1_000}
MUST_BE_EMPTY = (topology.STATE_STREAM, topology.SNAPSHOTS, topology.COMMANDS, topology.RESUMES)


async def _all_empty(desk: Desk) -> bool:
    return not any([await desk.count(stream) for stream in MUST_BE_EMPTY])


async def ready_after(service: Service) -> float:
    """Start a service; the seconds until it is ready."""
    begun = time.monotonic()
    service.start()
    await service.ready()
    return time.monotonic() - begun


async def test_thousands_of_lives_leave_their_records_only(broker: Broker, tmp_path: Path) -> None:
    """No state, marker, payload, command or resume is left; the service idles, and starts as fast as on nothing."""
    async with Desk.at(broker.url) as desk, Engine(desk, complete) as engine:
        with Service(broker.url, tmp_path, **SETTINGS) as service:
            await service.ready()
            due = {"delay_ms": 5}
            await desk.send_many("start", [
                {"timer": {"name": unique()}, "due": due, "payload": "x" * (1_500 if n % 3 == 0 else 10)}
                for n in range(CYCLES)
            ])  # fmt: skip
            await eventually(partial(_archived, desk, CYCLES), 60, what="all records")
            await eventually(partial(_all_empty, desk), 20, what="nothing to be left")
            assert len({received.resume_id for received in engine.received}) == CYCLES
            assert service.details()["armed"] == 0
            await eventually(partial(_no_wakes, desk), 20, what="no wake to be left")
            await rests(service.pid, IDLE_SHARE)
            assert service.stop() == 0
            assert await ready_after(service) < READY_S
            assert service.details()["armed"] == 0
            assert await desk.count(topology.TERMINALS) == CYCLES


async def _archived(desk: Desk, count: int) -> bool:
    return await desk.count(topology.TERMINALS) == count


async def _no_wakes(desk: Desk) -> bool:
    """Every wake is settled: those that stand run out by themselves (120 s) and wait for nobody."""
    info = await desk.js.consumer_info(topology.SCHEDULES, topology.WAKE_CONSUMER)
    return bool(info.num_pending == 0 and info.num_ack_pending == 0)


async def test_a_bucket_of_markers_only_is_as_good_as_empty(broker: Broker, tmp_path: Path) -> None:
    """An empty bucket, then one that holds nothing but thousands of removal markers: ready at once in both."""
    async with Desk.at(broker.url) as desk:
        with Service(broker.url, tmp_path, tombstone_ttl_s=3600) as service:
            await service.ready()
            assert service.stop() == 0
            empty_s = await ready_after(service)
            marker = {"KV-Operation": "PURGE", "Nats-TTL": "3600s"}
            for first in range(0, CYCLES, 500):
                for _ in range(first, first + 500):
                    ref = unique("").strip("-").ljust(26, "a")
                    await desk.js.publish_async(topology.state_subject(ref), b'{"v":1}', headers=marker)
                await desk.js.publish_async_completed()
            assert await desk.count(topology.STATE_STREAM) == CYCLES
            assert service.stop() == 0
            marked_s = await ready_after(service)
            print(f"ready after {empty_s:.2f} s with nothing, {marked_s:.2f} s with {CYCLES} markers")
            assert marked_s < READY_S
            assert (service.details()["armed"], service.details()["problems"]) == (0, 0)
            await rests(service.pid, IDLE_SHARE)
