"""Dispatching rides: a driver has a window to answer an offer; then, or after a "no", the next one is asked."""

from __future__ import annotations

import asyncio
import os

from timer_service.client import TimerClient

NATS_URL = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
WINDOW_MS = int(os.environ.get("ANSWER_WINDOW_MS", "15000"))


async def offer(timers: TimerClient, ride: str, driver: str) -> None:
    """Offer a ride. An offer that is still open is replaced in one step: its window can't pass any more."""
    payload = {"ride": ride, "driver": driver}
    key = {"name": f"ride-offer/{ride}"}
    outcome = await timers.start(key, delay_ms=WINDOW_MS, payload=payload, if_exists="replace")
    assert outcome is not None
    print(f"ride {ride} offered to {driver} for {WINDOW_MS / 1000:g} s (offer {outcome.generation})", flush=True)


async def accepted(timers: TimerClient, ride: str, driver: str) -> None:
    """The driver takes the ride: the window is closed."""
    await timers.delete({"name": f"ride-offer/{ride}"}, reason=f"accepted by {driver}")
    print(f"ride {ride} accepted by {driver}", flush=True)


async def main() -> None:
    async with await TimerClient.connect(NATS_URL) as timers:
        await offer(timers, "R7", "Ada")
        await asyncio.sleep(WINDOW_MS / 3000)
        print("Ada says no", flush=True)
        await offer(timers, "R7", "Ben")
        await accepted(timers, "R7", "Ben")
        await offer(timers, "R8", "Cleo")
        print("Cleo says nothing", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
