"""The flow engine: a run of the flow "contract" reaches the node where it waits for a signature."""

from __future__ import annotations

import asyncio
import os

from timer_service.client import TimerClient

NATS_URL = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
PAUSE_MS = int(os.environ.get("REMINDER_PAUSE_MS", "86400000"))


def waiting(run: str) -> dict[str, str]:
    """The key of the timer: one node of one run of one version of the flow."""
    return {
        "flow_id": "contract",
        "flow_version": "1",
        "root_execution_id": run,
        "node_id": "wait_for_signature",
    }


async def ask(timers: TimerClient, run: str, signer: str) -> None:
    """Ask for a signature; from here on somebody is reminded. Asking again changes nothing, so a crash is no harm."""
    payload = {"contract": run, "signer": signer, "manager": "mia"}
    await timers.start(waiting(run), delay_ms=PAUSE_MS, payload=payload, max_retries=3, command_id=f"ask-{run}")
    print(f"{run}: {signer} was asked to sign", flush=True)


async def signed(timers: TimerClient, run: str) -> None:
    """The signature is there: no more reminders. One that is being sent just now still arrives."""
    await timers.delete(waiting(run), reason="signed")
    print(f"{run}: signed", flush=True)


async def main() -> None:
    async with await TimerClient.connect(NATS_URL) as timers:
        await ask(timers, "C-1", "anna")
        await ask(timers, "C-2", "ben")
        await signed(timers, "C-1")
        print("ben does not answer", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
