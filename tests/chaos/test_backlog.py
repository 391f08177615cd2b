"""C38, the timer service's part: thousands are overdue when it starts, and nobody answers them."""

from __future__ import annotations

from tests.support.service import Desk, Engine, Service, eventually, name_ref, now_ms, unique

OVERDUE = 4_000
FRESH = 20
WINDOW = 1_024


async def test_c38_thousands_are_overdue_at_the_start(desk: Desk, service: Service) -> None:
    """C38: killed while they wait, started when all are overdue: what is under way stays bounded, commands are answered
    and fresh timers fire meanwhile, and each fires once."""
    due_ms = now_ms() + 3_000
    names = [unique() for _ in range(OVERDUE)]
    await desk.send_many("start", [{"timer": {"name": name}, "due": {"at_ms": due_ms}} for name in names])
    service.kill()
    await eventually(lambda: now_ms() > due_ms)
    service.start()
    async with Engine(desk) as engine:
        await eventually(lambda: engine.received, 30, every=0.005)
        fresh, most = [], 0
        for _ in range(FRESH):
            fresh.append(unique())
            outcome = await desk.ask("start", timer={"name": fresh[-1]}, due={"delay_ms": 50})
            assert outcome["status"] == "accepted"
            most = max(most, service.details()["in_flight"])
        for name in fresh:
            await engine.resume_of(name_ref(name), within=60)
            (received,) = engine.of(name_ref(name))
            assert 0 <= received.stored_at_ms - received.due_at_ms < 60_000
        await eventually(lambda: all(engine.of(name_ref(name)) for name in names), 60, every=0.1)
        assert most <= 2 * WINDOW, "more in hand than two readers may take"
        assert all(len(engine.of(name_ref(name))) == 1 for name in names)
        assert min(received.stored_at_ms for received in engine.received) >= due_ms
