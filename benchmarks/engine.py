"""Publisher and flow engine in one: starts timers, answers their resumes, counts what ends, asks the broker.

A timer counts as finished when its removal marker passes by on the bucket's subjects. Whether archive and
bucket really stand as that says is read from the broker at the end of a run.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from benchmarks import names
from benchmarks.bare import BareClient, PullLoop

STALL_S = 15.0
"""A wait is given up when nothing has moved for this long; what is missing is then in the result."""
_PAYLOAD = json.dumps({"order": 4711, "customer": "C-102938", "note": "remind " * 20, "amount": 129.95})


@dataclass(slots=True)
class Counts:
    """What the engine has seen since it began."""

    started: int = 0
    created: int = 0  # states of waiting timers seen in the bucket
    resumed: int = 0
    duplicates: int = 0
    removed: int = 0
    unsettled: int = 0  # published, not acknowledged yet
    refused: int = 0


class Engine:
    """Publisher and flow engine on one connection.

    `on_removed` is called after each timer that ends, `on_resume` with due time and arrival (epoch ms).
    """

    def __init__(self, client: BareClient) -> None:
        self.client = client
        self.counts = Counts()
        self.on_removed: Callable[[], None] | None = None
        self.on_resume: Callable[[int, float], None] | None = None
        self._run = uuid4().hex[:12]
        self._answered: set[str] = set()
        self._open: set[str] = set()
        self._acks = f"{client.inbox}.a"

    def begin(self) -> None:
        """Subscribe to acknowledgements and removals, and start pulling resumes."""
        self.client.subscribe(self._acks, self._on_ack)
        self.client.subscribe(names.STATE_PREFIX + ">", self._on_state)
        PullLoop(self.client, names.RESUMES_STREAM, names.RESUME_CONSUMER, self._on_resume)

    def start(self, due: str) -> None:
        """Publish one Start; `due` is the JSON of its due field."""
        number = self.counts.started
        self.counts.started += 1
        self._command(
            names.START_SUBJECT,
            f'{{"v":1,"command_id":"s{number}","timer":{{"name":"bench-{self._run}-{number}"}},'
            f'"due":{due},"payload":{_PAYLOAD}}}',
        )

    def _command(self, subject: str, body: str) -> None:
        self.counts.unsettled += 1
        self.client.publish(subject.encode(), body.encode(), self._acks.encode())

    def _on_ack(self, _subject: bytes, _reply: bytes, _header: bytes, body: bytes) -> None:
        self.counts.unsettled -= 1
        if b'"seq"' not in body:
            self.counts.refused += 1

    def _on_resume(self, _subject: bytes, reply: bytes, _header: bytes, body: bytes) -> None:
        arrived_ms = time.time() * 1000
        resume = json.loads(body)
        self.client.publish(reply, b"+ACK")
        if resume["resume_id"] in self._answered:
            self.counts.duplicates += 1
            return
        self._answered.add(resume["resume_id"])
        self._open.add(resume["timer_ref"])
        self.counts.resumed += 1
        self._complete(resume)
        if self.on_resume is not None:
            self.on_resume(resume["due_at_ms"], arrived_ms)

    def _complete(self, resume: dict[str, Any]) -> None:
        ref, generation, fence = resume["timer_ref"], resume["generation"], resume["fence"]
        self._command(
            names.COMPLETE_SUBJECT,
            f'{{"v":1,"command_id":"c{generation}","timer_ref":"{ref}","generation":{generation},"fence":{fence}}}',
        )

    def _on_state(self, subject: bytes, _reply: bytes, header: bytes, body: bytes) -> None:
        """Every write to the bucket passes here; only removals are looked at more closely."""
        if b"KV-Operation" in header:
            self._on_removal(subject[len(names.STATE_PREFIX) :].decode())
        elif b'"waiting"' in body:
            self.counts.created += 1

    def _on_removal(self, ref: str) -> None:
        if ref not in self._open:
            return  # a second marker, or one that is not ours
        self._open.remove(ref)
        self.counts.removed += 1
        if self.on_removed is not None:
            self.on_removed()

    async def settle(self) -> float:
        """Wait until everything started is removed, or nothing moves any more; the seconds that took."""
        begun = moved = time.monotonic()
        seen = (-1, -1)
        while self.counts.removed < self.counts.started and time.monotonic() - moved < STALL_S:
            self.client.check()
            if seen != (seen := (self.counts.resumed, self.counts.removed)):
                moved = time.monotonic()
            await asyncio.sleep(0.02)
        return time.monotonic() - begun


# --- what the broker holds ------------------------------------------------------------------------------


async def stored_writes(client: BareClient) -> int:
    """Messages ever stored in the account's streams: the sum of their last sequences."""
    answer = await client.request("$JS.API.STREAM.LIST")
    return sum(int(stream["state"]["last_seq"]) for stream in answer["streams"])


async def archived(client: BareClient) -> int:
    """Number of archive records."""
    answer = await client.request(f"$JS.API.STREAM.INFO.{names.TERMINALS_STREAM}")
    return int(answer["state"]["messages"])


async def live_entries(client: BareClient) -> int:
    """Entries of the state bucket that are not removal markers, by a scan of the headers."""
    create = f"$JS.API.CONSUMER.CREATE.{names.STATE_STREAM}"
    config = {"deliver_policy": "all", "ack_policy": "none", "headers_only": True, "mem_storage": True}
    config["inactive_threshold"] = 5_000_000_000
    created = await client.request(create, {"stream_name": names.STATE_STREAM, "config": config})
    return await _count_live(client, created["name"], int(created["num_pending"]))


async def _count_live(client: BareClient, consumer: str, pending: int) -> int:
    if pending == 0:
        return 0
    seen = live = 0
    all_seen = asyncio.Event()

    def count(_subject: bytes, _reply: bytes, header: bytes, _body: bytes) -> None:
        nonlocal seen, live
        seen += 1
        live += b"KV-Operation" not in header
        if seen == pending:
            all_seen.set()

    PullLoop(client, names.STATE_STREAM, consumer, count, pulls=2, batch=5000)
    await asyncio.wait_for(all_seen.wait(), STALL_S)
    return live
