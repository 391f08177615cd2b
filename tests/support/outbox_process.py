"""An outbox in a process of its own, which does as it is told: to be frozen, killed, or given another clock."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

from tests.support.outboxes import Store

_PROGRAM = """
import asyncio, json, sys, time
real = time.time
time.time = lambda: real() + {shift_s}
{source}
from notify_consumer.errors import OutboxError
from notify_consumer.outbox.base import Feedback

held = {{}}
COMPLETE = Feedback("complete", {{"from": "the process"}})
WRITES = {{
    "store_outcome": lambda claim: outbox.store_outcome(claim, COMPLETE),
    "finish": lambda claim: outbox.finish(claim, "accepted"),
    "back_off": lambda claim: outbox.back_off(claim, 1, "late"),
    "kill": lambda claim: outbox.kill(claim, "late"),
    "release": lambda claim: outbox.release(claim),
}}

async def claim(owner, lane, count, lease_ms):
    claims = await outbox.claim(owner, {{lane: count}}, lease_ms)
    held.update((each.resume_id, each) for each in claims)
    return [each.resume_id for each in claims]

async def write(name, resume_id):
    await WRITES[name](held[resume_id])

async def renew(lease_ms):
    return sorted(await outbox.renew([*held.values()], lease_ms))

async def next_in_ms():
    return (await outbox.survey(1)).next_in_ms

async def contend(owner, lane, count, loops):
    async def loop(name):
        got = []
        while ids := [each.resume_id for each in await outbox.claim(name, {{lane: count}}, 600_000)]:
            got += ids
        return got
    return sum(await asyncio.gather(*(loop(f"{{owner}}.{{at}}") for at in range(loops))), [])

async def main():
    await outbox.open()
    print(json.dumps("open"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *arguments = json.loads(line)
        try:
            answer = await globals()[name](*arguments)
        except OutboxError as error:
            answer = type(error).__name__
        print(json.dumps(answer), flush=True)
    await outbox.close()

asyncio.run(main())
"""


class OutboxProcess:
    """Use as an async context manager: it is open when the block begins, and gone when it ends."""

    def __init__(self, store: Store, *, clock_ahead_s: int = 0) -> None:
        assert store.source is not None
        self._program = _PROGRAM.format(source=store.source, shift_s=clock_ahead_s)

    async def __aenter__(self) -> OutboxProcess:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", self._program, stdin=pipe, stdout=pipe, limit=2**20
        )
        assert await self.answer() == "open"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
        await self._process.communicate()

    async def ask(self, *request: Any) -> Any:
        """What it answers: the result, or the name of the OutboxError."""
        self.tell(*request)
        return await self.answer()

    def tell(self, *request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    async def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(await self._process.stdout.readline())

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
