"""The shop: an order has a window to be paid; the payment cancels the timer."""

from __future__ import annotations

import asyncio
import os

from timer_service.client import TimerClient
from timer_service.errors import CommandRejected

NATS_URL = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
WINDOW_MS = int(os.environ.get("PAYMENT_WINDOW_MS", "30000"))


def window_of(order: str) -> dict[str, str]:
    """The key of the timer that guards an order."""
    return {"name": f"payment-window/{order}"}


async def place(timers: TimerClient, order: str) -> None:
    """From here on the order is cancelled when it is not paid in time, whatever becomes of this process."""
    await timers.start(window_of(order), delay_ms=WINDOW_MS, payload={"order": order})
    print(f"order {order} placed; {WINDOW_MS / 1000:g} s to pay", flush=True)


async def pay(timers: TimerClient, order: str) -> bool:
    """Whether the payment came in time. If not, the order is cancelled already: give the money back."""
    try:
        outcome = await timers.cancel(window_of(order), reason="paid")
    except CommandRejected:
        return False  # it has ended
    return outcome is not None and outcome.code != "too_late"


async def main() -> None:
    async with await TimerClient.connect(NATS_URL) as timers:
        await place(timers, "A-1")
        await place(timers, "B-2")
        in_time = await pay(timers, "A-1")
        print(f"order A-1 paid {'in time' if in_time else 'too late'}; nobody pays B-2", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
