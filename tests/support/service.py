"""The timer service as a child process, a flow engine to answer it, and a stranger's view of its broker."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import RawStreamMsg
from nats.js.errors import NotFoundError
from prometheus_client.parser import text_string_to_metric_families

from timer_service.domain.identity import LineageKey, NameKey, TimerRef, derive_timer_ref
from timer_service.jetstream import topology

_START_S = 30.0
_LOG_TAIL = 60
CLI = Path(sys.executable).with_name("durable-timer")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def unique(prefix: str = "t") -> str:
    """A name that no other test uses."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


def name_ref(name: str, namespace: str = "default") -> TimerRef:
    return derive_timer_ref(NameKey(name, namespace))


def lineage_key(node: str | None = None) -> dict[str, str]:
    """A fresh key of a flow's timer node."""
    return {
        "flow_id": "flow",
        "flow_version": "7",
        "root_execution_id": unique("run"),
        "node_id": node or "wait",
    }


def ref_of(key: dict[str, str]) -> TimerRef:
    if "name" in key:
        return name_ref(key["name"], key.get("namespace", "default"))
    return derive_timer_ref(LineageKey(**key))


async def eventually(look: Callable[[], Any], within: float = 20.0, *, what: str = "", every: float = 0.02) -> Any:
    """Look again and again until the answer is truthy, and return it; AssertionError after ``within`` seconds."""
    deadline = time.monotonic() + within
    while True:
        seen = look()
        if inspect.isawaitable(seen):
            seen = await seen
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:g} s: {what or inspect.getsource(look).strip()}; last: {seen!r}")
        await asyncio.sleep(every)


# -- the process ----------------------------------------------------------------------------------------------


class Service:
    """``durable-timer serve`` against a broker. Only the process that this object started is ever signalled.

    ``env`` are settings without their prefix, in capitals or not: ``resume_timeout_ms=500``. Standard error goes
    into ``log_file``, over all starts.
    """

    def __init__(self, nats_url: str, folder: Path, *flags: str, **env: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.instance = str(env.pop("instance", None) or unique("svc"))
        self.log_file = folder / f"{self.instance}.log"
        self.port = 0
        self._nats_url = nats_url
        self._flags = flags
        self._env = {f"DURABLE_TIMER_{name.upper()}": str(value) for name, value in env.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def running(self) -> bool:
        return self._alive()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Service:
        """Start the process and wait until it serves HTTP; see ``ready`` for more."""
        if self._alive():
            raise RuntimeError("the service runs already")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DURABLE_TIMER_")}
        environment |= self._env
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [CLI, "serve", "--nats", self._nats_url, "--http", "127.0.0.1:0", "--instance", self.instance,
                 *self._flags],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
            )  # fmt: skip
        deadline = time.monotonic() + _START_S
        while not (listening := self.events("http.listening")):
            assert self._alive(), f"the service ended with {self._process.returncode}:\n{self.log_tail()}"
            assert time.monotonic() < deadline, f"the service does not listen:\n{self.log_tail()}"
            time.sleep(0.02)
        self.port = listening[0]["port"]
        return self

    async def ready(self, within: float = 30.0) -> Service:
        """Wait until /readyz says 200."""
        deadline = time.monotonic() + within
        while True:
            assert self.running, f"the service ended:\n{self.log_tail()}"
            code, body = self.readyz()
            if code == 200:
                return self
            assert time.monotonic() < deadline, f"not ready within {within:g} s: {body}\n{self.log_tail()}"
            await asyncio.sleep(0.02)

    async def not_ready(self, within: float = 20.0) -> list[dict[str, str]]:
        """Wait until /readyz says 503, and return its reasons."""

        def reasons() -> list[dict[str, str]]:
            code, body = self.readyz()
            return list(body["reasons"]) if code == 503 else []

        return list(await eventually(reasons, within, what="503 of /readyz"))

    def readyz(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /readyz; status 0 when nobody listens."""
        try:
            code, body = self.http("/readyz")
        except OSError:
            return 0, {"reasons": [{"code": "no_http", "resource": "", "message": ""}]}
        return code, json.loads(body)

    def details(self) -> dict[str, Any]:
        return dict(self.readyz()[1]["details"])

    def http(self, path: str, body: bytes | None = None, method: str | None = None) -> tuple[int, bytes]:
        """One request. Raises OSError when nobody listens."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def metrics(self) -> dict[tuple[str, ...], float]:
        """All samples: (name, label value, …) with the labels in the order of their names."""
        text = self.http("/metrics")[1].decode()
        return {
            (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, *labels: str) -> float:
        return self.metrics().get((name, *labels), 0.0)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """The log lines since the last start, or those of one event."""
        if not self.log_file.exists():
            return []
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        lines = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return [line for line in lines if name is None or line.get("event") == name]

    def log_tail(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines() if self.log_file.exists() else []
        return "\n".join(lines[-_LOG_TAIL:])

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> None:
        """SIGTERM, without waiting for the end."""
        self._signal(signal.SIGTERM)

    def stop(self, within: float = 30.0) -> int:
        """SIGTERM, and the exit code."""
        self.terminate()
        return self.wait(within)

    def wait(self, within: float = 30.0) -> int:
        assert self._process is not None
        return self._process.wait(within)

    def pause(self) -> None:
        """Freeze the process (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen process go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it whatever state it is in."""
        if self.running:
            self.kill()

    def __enter__(self) -> Service:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is not None:
            sys.stderr.write(f"\n--- {self.log_file.name}\n{self.log_tail()}\n")

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@contextlib.contextmanager
def shown_on_failure(service: Service) -> Iterator[None]:
    """Write the service's log to the captured output when the block fails."""
    try:
        yield
    except BaseException:
        sys.stderr.write(f"\n--- {service.log_file.name}\n{service.log_tail()}\n")
        raise


# -- the broker as others see it --------------------------------------------------------------------------------


async def _ignore(_: Exception) -> None:
    pass


async def connect(url: str) -> Client:
    """A plain client that comes back by itself and says nothing."""
    return await nats.connect(
        url, connect_timeout=5, reconnect_time_wait=0.1, max_reconnect_attempts=-1, error_cb=_ignore,
        pending_size=64 * 2**20,
    )  # fmt: skip


class Desk:
    """Publishes commands as any service may, and looks into every stream. Use it from one event loop."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.js = client.jetstream(timeout=10)
        self._inbox = client.new_inbox()
        self._waiting: dict[str, asyncio.Queue[dict[str, Any]]] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def at(cls, url: str) -> AsyncIterator[Desk]:
        client = await connect(url)
        desk = cls(client)
        await client.subscribe(f"{desk._inbox}.*", cb=desk._on_outcome)
        try:
            yield desk
        finally:
            await client.close()

    async def _on_outcome(self, message: Msg) -> None:
        if message.subject in self._waiting:
            self._waiting[message.subject].put_nowait(json.loads(message.data))

    # -- commands ---------------------------------------------------------------------------------------------

    async def ask(self, kind: str, /, *, within: float = 20.0, **body: Any) -> dict[str, Any]:
        """Publish a command (``v`` and ``command_id`` are filled in) and return its outcome."""
        return await self.ask_raw(f"durable_timer.commands.{kind}.v1", encoded(body), within=within)

    async def ask_raw(
        self, subject: str, data: bytes, headers: dict[str, str] | None = None, *, within: float = 20.0
    ) -> dict[str, Any]:
        """Publish these bytes as a command and return the outcome."""
        return await (await self.asked(subject, data, headers)).outcome(within)

    async def asked(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> Asked:
        """Publish, and collect the outcomes later. Publishes again until the broker says that it has it; the broker
        stores it once, also when its answer takes longer than that."""
        reply = f"{self._inbox}.{uuid.uuid4().hex}"
        queue = self._waiting[reply] = asyncio.Queue()

        async def stored() -> bool:
            try:
                await self.js.publish(
                    subject,
                    data,
                    timeout=1,
                    headers={"Durable-Timer-Reply": reply, "Nats-Msg-Id": reply, **(headers or {})},
                )
            except nats.errors.Error:
                return False
            return True

        await eventually(stored, 20, what=f"{subject} to be stored")
        return Asked(queue)

    async def send(self, kind: str, /, **body: Any) -> None:
        """Publish a command and return when the broker has it."""
        await self.js.publish(f"durable_timer.commands.{kind}.v1", encoded(body))

    async def send_many(self, kind: str, bodies: list[dict[str, Any]]) -> None:
        """Publish many, and return when the broker has all of them."""
        subject = f"durable_timer.commands.{kind}.v1"
        for first in range(0, len(bodies), 1000):
            await asyncio.gather(*(self.js.publish(subject, encoded(body)) for body in bodies[first : first + 1000]))

    # -- looking ----------------------------------------------------------------------------------------------

    async def entry(self, timer_ref: str) -> RawStreamMsg | None:
        """What stands in the state bucket for this timer, removal markers too."""
        return await self.last(topology.STATE_STREAM, topology.state_subject(timer_ref))

    async def state(self, timer_ref: str) -> dict[str, Any] | None:
        """The live state, None where there is none or only a marker."""
        entry = await self.entry(timer_ref)
        if entry is None or "KV-Operation" in (entry.headers or {}):
            return None
        return json.loads(entry.data or b"")  # type: ignore[no-any-return]

    async def record(self, timer_ref: str) -> dict[str, Any] | None:
        """The newest terminal record."""
        message = await self.last(topology.TERMINALS, topology.terminal_subject(timer_ref))
        return None if message is None else json.loads(message.data or b"")

    async def ended(self, timer_ref: str, within: float = 20.0) -> dict[str, Any]:
        """Wait until the timer has a terminal record and its entry is gone; returns the record."""

        async def look() -> dict[str, Any] | None:
            return None if await self.state(timer_ref) is not None else await self.record(timer_ref)

        return dict(await eventually(look, within, what=f"the end of {timer_ref}"))

    async def last(self, stream: str, subject: str) -> RawStreamMsg | None:
        try:
            return await self.js.get_msg(stream, subject=subject, direct=False)
        except NotFoundError:
            return None

    async def count(self, stream: str) -> int:
        """How many messages stand in a stream."""
        return (await self.js.stream_info(stream)).state.messages

    async def subjects(self, stream: str, below: str) -> dict[str, int]:
        """Messages by subject."""
        return dict((await self.js.stream_info(stream, subjects_filter=below)).state.subjects or {})

    async def records_of(self, timer_ref: str) -> int:
        """How many terminal records a timer has."""
        subject = topology.terminal_subject(timer_ref)
        return (await self.subjects(topology.TERMINALS, subject)).get(subject, 0)

    async def snapshots_of(self, timer_ref: str) -> int:
        """How many snapshots stand for a timer."""
        return sum((await self.subjects(topology.SNAPSHOTS, f"{topology.SNAPSHOT_PREFIX}{timer_ref}.*")).values())

    async def rejections(self, kind: str = ">", *, after: int = 0) -> list[dict[str, Any]]:
        """The stored rejections of a kind with a stream sequence above ``after``, oldest first."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                message = await self.js.get_msg(
                    topology.REJECTIONS, seq=after + 1, subject=topology.REJECTED_PREFIX + kind, next=True
                )
            except NotFoundError:
                return found
            found.append(json.loads(message.data or b""))
            after = message.seq or 0

    async def last_seq(self, stream: str) -> int:
        return (await self.js.stream_info(stream)).state.last_seq


@dataclass
class Asked:
    """A command on its way."""

    queue: asyncio.Queue[dict[str, Any]]
    seen: list[dict[str, Any]] = field(default_factory=list)

    async def outcome(self, within: float = 20.0) -> dict[str, Any]:
        """The next outcome."""
        try:
            outcome = await asyncio.wait_for(self.queue.get(), within)
        except TimeoutError:
            raise AssertionError(f"no outcome within {within:g} s") from None
        self.seen.append(outcome)
        return outcome


def publish_raw(port: int, subject: bytes, headers: bytes, body: bytes) -> None:
    """Publish bytes that no client library would write, and wait until the broker has read them."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.recv(65_536)
        size = len(headers)
        connection.sendall(
            b'CONNECT {"headers":true,"verbose":false}\r\n'
            + (
                b"HPUB %s %d %d\r\n" % (subject, size, size + len(body))
                if headers
                else b"PUB %s %d\r\n" % (subject, len(body))
            )
            + b"%s%s\r\nPING\r\n" % (headers, body)
        )
        answer = connection.recv(65_536)
    assert answer == b"PONG\r\n", answer


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps({"v": 1, "command_id": uuid.uuid4().hex, **body}).encode()


# -- the flow engine --------------------------------------------------------------------------------------------

Answer = Callable[[dict[str, Any]], tuple[str, dict[str, Any]] | None]


def complete(_: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Answers every resume at once."""
    return "complete", {}


@dataclass(frozen=True)
class Received:
    """One resume as it was read, with the time at which the broker had stored it."""

    resume: dict[str, Any]
    data: bytes
    msg_id: str
    seq: int
    stored_at_ms: float

    @property
    def resume_id(self) -> str:
        return str(self.resume["resume_id"])

    @property
    def due_at_ms(self) -> int:
        return int(self.resume["due_at_ms"])


class Engine:
    """Reads the resume consumer, acknowledges everything, and answers by ``answer`` (None: not at all)."""

    def __init__(self, desk: Desk, answer: Answer | None = None) -> None:
        self.received: list[Received] = []
        self._answer = answer
        self._desk = desk
        self._by_ref: dict[str, list[Received]] = {}
        self._inbox = desk.client.new_inbox()
        self._room = 0
        self._ask = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._subscription: Any = None

    async def __aenter__(self) -> Engine:
        self._subscription = await self._desk.client.subscribe(self._inbox, cb=self._on_message, pending_msgs_limit=0)
        self._task = asyncio.create_task(self._pull())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(nats.errors.Error):
            await self._subscription.unsubscribe()

    async def _pull(self) -> None:
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{topology.RESUMES}.{topology.RESUME_CONSUMER}"
        while True:
            self._room = 500
            self._ask.clear()
            body = json.dumps({"batch": self._room, "expires": 1_000_000_000}).encode()
            await self._desk.client.publish(subject, body, self._inbox)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ask.wait(), 1.0)

    async def _on_message(self, message: Msg) -> None:
        if not message.reply.startswith("$JS.ACK."):
            return
        self._room -= 1
        if self._room == 0:
            self._ask.set()
        resume = json.loads(message.data)
        stored_ns = int(message.reply.split(".")[7])
        msg_id = (message.headers or {}).get("Nats-Msg-Id", "")
        one = Received(resume, message.data, msg_id, int(message.reply.split(".")[5]), stored_ns / 1e6)
        self.received.append(one)
        self._by_ref.setdefault(resume["timer_ref"], []).append(one)
        await message.ack()
        answer = self._answer(resume) if self._answer else None
        if answer is not None:
            await self.give(resume, answer[0], **answer[1])

    async def give(self, resume: dict[str, Any], kind: str, /, **body: Any) -> None:
        """Answer a resume without waiting for anything."""
        fields = {"command_id": f"{kind}-{resume['resume_id']}", **_named(resume), **body}
        await self._desk.client.publish(f"durable_timer.commands.{kind}.v1", encoded(fields))

    async def reply(self, resume: dict[str, Any], kind: str, /, **body: Any) -> dict[str, Any]:
        """Answer a resume and return the outcome."""
        return await self._desk.ask(kind, **{**_named(resume), **body})

    def of(self, timer_ref: str) -> list[Received]:
        """What was read for a timer, oldest first."""
        return self._by_ref.get(timer_ref, [])

    async def resume_of(self, timer_ref: str, generation: int = 0, within: float = 20.0) -> dict[str, Any]:
        """Wait for the resume of one occurrence."""

        def look() -> dict[str, Any] | None:
            return next((r.resume for r in self.of(timer_ref) if r.resume["generation"] == generation), None)

        return dict(await eventually(look, within, what=f"the resume {timer_ref}.{generation}"))


def _named(resume: dict[str, Any]) -> dict[str, Any]:
    return {name: resume[name] for name in ("timer_ref", "generation", "fence")}
