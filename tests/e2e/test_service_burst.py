"""More deadlines at one instant than any page or window holds."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.support.service import Desk, Engine, Service, complete, eventually, name_ref, now_ms, unique
from timer_service.jetstream import topology

SETTINGS = {"reconcile_interval_ms": 1_000}
HOUR_MS = 3_600_000


async def test_ten_thousand_identical_deadlines(desk: Desk, service: Service, record_property: Any) -> None:
    """C29: all once, none left behind; a new command is answered within two seconds, while scans run too."""
    at_ms = now_ms() + 6_000
    names = [unique() for _ in range(10_000)]
    async with Engine(desk, complete) as engine:
        await desk.send_many("start", [{"timer": {"name": name}, "due": {"at_ms": at_ms}} for name in names])
        await eventually(lambda: service.details()["armed"] >= len(names), 40)
        await eventually(lambda: engine.received, 20)
        answered_ms = []
        while len(engine.received) < len(names):
            begun = now_ms()
            outcome = await desk.ask("start", timer={"name": unique()}, due={"delay_ms": HOUR_MS})
            answered_ms.append(now_ms() - begun)
            assert outcome["status"] == "accepted"
            assert now_ms() < at_ms + 60_000, f"only {len(engine.received)} have fired"
            await asyncio.sleep(0.1)
        refs = {name_ref(name) for name in names}
        assert all(len(engine.of(ref)) == 1 for ref in refs)
        fired_ms = max(received.stored_at_ms for received in engine.received) - at_ms
        assert min(engine.of(ref)[0].stored_at_ms for ref in refs) >= at_ms
        await eventually(lambda: _nothing_queued(desk), 30)
        for name in random.Random(1).sample(names, 50):
            assert (await desk.ended(name_ref(name)))["status"] == "completed"
    assert not service.events("reconcile.evidence"), "its own writes made the service distrust itself"
    repairs = {key: value for key, value in service.metrics().items() if key[0] == "durable_timer_repairs_total"}
    assert not repairs, "a scan took what happened meanwhile for something to mend"
    record_property("burst_ms", round(fired_ms))
    record_property("slowest_answer_ms", max(answered_ms))
    print(f"10,000 at once: all fired after {fired_ms:.0f} ms; slowest answer meanwhile {max(answered_ms)} ms")


async def _nothing_queued(desk: Desk) -> bool:
    return await desk.count(topology.COMMANDS) == 0
