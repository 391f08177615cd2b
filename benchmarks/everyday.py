"""The contender to beat: one timer's life in the client library's everyday calls.

What a competent engineer writes on day one: `fetch(100)`, pydantic models, `kv.get` and `kv.update`,
`js.publish`, tasks for concurrency. It takes the same steps with the same stored writes as the real service
and gives none of its guarantees: timers wait in memory, nothing is reconciled, repetition goes unnoticed.

    python -m benchmarks.everyday provision --nats URL
    python -m benchmarks.everyday serve --nats URL --http 127.0.0.1:PORT
"""

import argparse
import asyncio
import base64
import hashlib
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, KeyValueConfig, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import KeyNotFoundError
from nats.js.kv import KeyValue
from pydantic import BaseModel

from benchmarks import names

IN_FLIGHT = 64
_FETCH = 100
_MAX_BYTES = 4 << 30


class TimerKey(BaseModel):
    """The key of a named timer."""

    name: str
    namespace: str = "default"


class Due(BaseModel):
    """When: a delay after the broker stored the command, or an instant."""

    delay_ms: int | None = None
    at_ms: int | None = None


class Start(BaseModel):
    """The start command, as far as the benchmark uses it."""

    v: Literal[1]
    command_id: str
    timer: TimerKey
    due: Due
    payload: Any = None


class Complete(BaseModel):
    """The complete command."""

    v: Literal[1]
    command_id: str
    timer_ref: str
    generation: int
    fence: int


class Wake(BaseModel):
    """What the driver publishes when an occurrence is due."""

    timer_ref: str
    generation: int


class State(BaseModel):
    """The stored state, and with `status` and `ended_at_ms` the archive record."""

    v: Literal[1] = 1
    timer_ref: str
    timer: TimerKey
    phase: Literal["waiting", "elapsed", "completed"] = "waiting"
    generation: int = 0
    fence: int = 1
    due_at_ms: int
    retries_used: int = 0
    max_retries: int = 0
    payload: Any = None
    payload_sha256: str
    accepted_at_ms: int
    elapsed_at_ms: int | None = None
    status: str | None = None
    ended_at_ms: int | None = None
    command_ids: list[str] = []


class Resume(BaseModel):
    """The resume message."""

    v: Literal[1] = 1
    resume_id: str
    timer_ref: str
    timer: TimerKey
    generation: int
    fence: int
    retries_used: int
    max_retries: int
    edges: None = None
    runtime_sha256: None = None
    due_at_ms: int
    elapsed_at_ms: int | None
    payload: Any
    payload_sha256: str


def now_ms() -> int:
    """Epoch milliseconds."""
    return int(time.time() * 1000)


def timer_ref(key: TimerKey) -> str:
    """The reference that the contract derives from a named key."""
    parts = [part.encode() for part in ("name", key.namespace, key.name)]
    digest = hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).digest()
    return base64.b32encode(digest).decode().lower()[:26]


def payload_hash(payload: Any) -> str:
    """SHA-256 of the payload as canonical JSON (good enough for the benchmark's payload)."""
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


class EverydayService:
    """Commands and wakes in, state in KV, resumes and archive records out."""

    def __init__(self, js: JetStreamContext, kv: KeyValue) -> None:
        self._js = js
        self._kv = kv
        self._tasks: set[asyncio.Task[None]] = set()
        self.failures = 0

    async def consume(self, stream: str, durable: str, subject: str, handle: Callable[[Msg], Awaitable[None]]) -> None:
        """Fetch for ever and handle up to `IN_FLIGHT` messages at a time; what fails is handed back."""
        subscription = await self._js.pull_subscribe(subject, durable=durable, stream=stream)
        room = asyncio.Semaphore(IN_FLIGHT)
        while True:
            try:
                messages = await subscription.fetch(_FETCH, timeout=1)
            except TimeoutError:
                continue
            for message in messages:
                await room.acquire()
                self._spawn(self._guarded(message, handle, room))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, message: Msg, handle: Callable[[Msg], Awaitable[None]], room: asyncio.Semaphore) -> None:
        try:
            await handle(message)
            await message.ack()
        except Exception as error:
            self.failures += 1
            print(f"failed: {error!r}", file=sys.stderr)
            await message.nak(delay=1)
        finally:
            room.release()

    async def on_command(self, message: Msg) -> None:
        """Start or Complete."""
        if message.subject == names.START_SUBJECT:
            await self._start(Start.model_validate_json(message.data), _stored_ms(message))
        else:
            await self._complete(Complete.model_validate_json(message.data))

    async def _start(self, command: Start, stored_ms: int) -> None:
        ref = timer_ref(command.timer)
        due = command.due
        state = State(
            timer_ref=ref,
            timer=command.timer,
            due_at_ms=due.at_ms if due.at_ms is not None else stored_ms + (due.delay_ms or 0),
            payload=command.payload,
            payload_sha256=payload_hash(command.payload),
            accepted_at_ms=now_ms(),
            command_ids=[command.command_id],
        )
        try:
            await self._kv.get(ref)
        except KeyNotFoundError:
            await self._kv.create(ref, state.model_dump_json().encode())
            await self._arm(state)

    async def _arm(self, state: State) -> None:
        """Publish the wake: at once when it is due, else from a task that sleeps until then."""
        if state.due_at_ms <= now_ms():
            await self._publish_wake(state)
        else:
            self._spawn(self._wake_later(state))

    async def _wake_later(self, state: State) -> None:
        await asyncio.sleep((state.due_at_ms - now_ms()) / 1000 + 0.001)
        await self._publish_wake(state)

    async def _publish_wake(self, state: State) -> None:
        wake = Wake(timer_ref=state.timer_ref, generation=state.generation)
        await self._js.publish(names.WAKE_PREFIX + state.timer_ref, wake.model_dump_json().encode())

    async def on_wake(self, message: Msg) -> None:
        """Waiting and due: elapsed, then the resume."""
        wake = Wake.model_validate_json(message.data)
        entry = await self._kv.get(wake.timer_ref)
        state = State.model_validate_json(entry.value or b"")
        if state.phase != "waiting" or state.generation != wake.generation or state.due_at_ms > now_ms():
            return
        state.phase, state.fence, state.elapsed_at_ms = "elapsed", state.fence + 1, now_ms()
        await self._kv.update(state.timer_ref, state.model_dump_json().encode(), last=entry.revision)
        await self._resume(state)

    async def _resume(self, state: State) -> None:
        resume = Resume(
            resume_id=f"{state.timer_ref}.{state.generation}",
            **state.model_dump(
                include={"timer_ref", "timer", "generation", "fence", "retries_used", "max_retries"}
                | {"due_at_ms", "elapsed_at_ms", "payload", "payload_sha256"}
            ),
        )
        await self._js.publish(names.RESUME_SUBJECT, resume.model_dump_json().encode())

    async def _complete(self, command: Complete) -> None:
        """Receipt into the state, archive, removal."""
        entry = await self._kv.get(command.timer_ref)
        state = State.model_validate_json(entry.value or b"")
        given = (command.generation, command.fence)
        if state.phase != "elapsed" or given != (state.generation, state.fence):
            return
        state.phase, state.status = "completed", "completed"
        state.fence, state.ended_at_ms = state.fence + 1, now_ms()
        state.command_ids.append(command.command_id)
        record = state.model_dump_json().encode()
        await self._kv.update(state.timer_ref, record, last=entry.revision)
        await self._js.publish(names.TERMINAL_PREFIX + state.timer_ref, record)
        await self._kv.purge(state.timer_ref)


def _stored_ms(message: Msg) -> int:
    return int(message.metadata.timestamp.timestamp() * 1000)


async def provision(url: str) -> None:
    """Create streams, bucket and the engine's consumer, under the contract's names."""
    client = Client()
    await client.connect(url)
    js = client.jetstream()
    await js.create_key_value(
        KeyValueConfig(bucket=names.STATE_BUCKET, storage=StorageType.FILE, max_bytes=_MAX_BYTES, direct=True)
    )
    wakes = [names.SCHEDULE_PREFIX + ">", names.WAKE_PREFIX + ">"]
    await _add_stream(js, names.COMMANDS_STREAM, [names.COMMAND_SUBJECTS], RetentionPolicy.WORK_QUEUE)
    await _add_stream(js, names.RESUMES_STREAM, [names.RESUME_SUBJECT], RetentionPolicy.WORK_QUEUE)
    await _add_stream(js, names.SCHEDULES_STREAM, wakes, RetentionPolicy.LIMITS)
    await _add_stream(js, names.TERMINALS_STREAM, [names.TERMINAL_PREFIX + ">"], RetentionPolicy.LIMITS)
    engine = ConsumerConfig(durable_name=names.RESUME_CONSUMER, max_ack_pending=20_000)
    await js.add_consumer(names.RESUMES_STREAM, engine)
    await client.close()


async def _add_stream(js: JetStreamContext, name: str, subjects: list[str], retention: RetentionPolicy) -> None:
    config = StreamConfig(
        name=name, subjects=subjects, retention=retention, storage=StorageType.FILE, max_bytes=_MAX_BYTES
    )
    await js.add_stream(config)


async def _answer_ready(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Every HTTP request gets 200: the server opens only when the service is ready."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    await writer.drain()
    writer.close()


async def serve(url: str, http: str) -> None:
    """Run until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    client = Client()
    await client.connect(url)
    js = client.jetstream()
    service = EverydayService(js, await js.key_value(names.STATE_BUCKET))
    loops = [
        service.consume(names.COMMANDS_STREAM, names.COMMAND_CONSUMER, names.COMMAND_SUBJECTS, service.on_command),
        service.consume(names.SCHEDULES_STREAM, names.WAKE_CONSUMER, names.WAKE_PREFIX + ">", service.on_wake),
    ]
    host, _, port = http.rpartition(":")
    server = await asyncio.start_server(_answer_ready, host, int(port))
    tasks = [asyncio.ensure_future(work) for work in (stop.wait(), *loops)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.wait(tasks)
    server.close()
    await client.close()
    for task in done:
        task.result()  # a loop never ends by itself: this raises what ended it


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="the everyday contender; for benchmarks only")
    parser.add_argument("command", choices=["provision", "serve"])
    parser.add_argument("--nats", required=True, metavar="URL")
    parser.add_argument("--http", default="127.0.0.1:0", metavar="HOST:PORT")
    options = parser.parse_args()
    work = provision(options.nats) if options.command == "provision" else serve(options.nats, options.http)
    asyncio.run(work)


if __name__ == "__main__":
    main()
