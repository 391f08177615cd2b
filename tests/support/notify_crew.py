"""Notify consumer processes, as an operator would run them, with handlers that tell what they do in a journal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from notify_consumer.outbox import make_outbox
from notify_consumer.outbox.base import Outbox, Row, State
from tests.support.notify import resume_body, until
from tests.support.notify_bench import Bench

# A hand-off ends when its gate is there: `gate` for all, `gate-WHO` for those of one process.
_HANDLERS = """
import asyncio, os, pathlib
from notify_consumer import Handlers, retry
from tests.support.notify_steps import hold

handlers = Handlers()
folder = pathlib.Path(__file__).parent
who = os.environ["WHO"]

def note(what, resume):
    with open(folder / "journal", "a") as journal:
        journal.write(f"{what} {resume.timer['name']} {who}\\n")

def open_gate():
    return (folder / "gate").exists() or (folder / f"gate-{who}").exists()

@handlers.default
async def handler(resume):
    note("begin", resume)
    while not open_gate():
        await asyncio.sleep(0.01)
    note("end", resume)

@handlers.name("step-")
async def step(resume):
    note("begin", resume)
    await hold("handling", resume.resume_id)
    return retry(delay_ms=3_600_000)

@handlers.name("thread-")
def in_thread(resume):
    import time
    note("begin", resume)
    while not open_gate():
        time.sleep(0.01)

@handlers.name("stubborn-")
async def stubborn(resume):
    note("begin", resume)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
"""
_ROOT = Path(__file__).parents[2]


class Consumer:
    """One ``notify-consumer serve`` process. ``env`` goes to tests/support/notify_steps.py."""

    def __init__(self, crew: Crew, who: str, env: dict[str, str], options: dict[str, Any]) -> None:
        self._crew = crew
        self._log = crew.folder / f"{who}.log"
        self._module = "tests.support.notify_steps" if env else "notify_consumer"
        self._env = {"WHO": who, "HOLD_FOLDER": str(crew.folder), "HOLD_OUTBOX": crew.outbox_url, **env}
        self._options = {
            "nats": crew.url,
            "http": "127.0.0.1:0",
            "instance": who,
            "handlers": "crew_handlers",
            "outbox": crew.outbox_url,
            "lease-ms": 400,
        } | {name.replace("_", "-"): value for name, value in options.items()}
        self.process: asyncio.subprocess.Process

    async def start(self) -> Consumer:
        options = [part for name, value in self._options.items() for part in (f"--{name}", str(value))]
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", self._module, "serve", *options),
                cwd=self._crew.folder,
                env={**os.environ, **self._env, "PYTHONPATH": str(_ROOT)},
                stderr=log,
            )
        await until(lambda: self.logged("service.ready") or self.process.returncode is not None, "service.ready")
        assert self.process.returncode is None, self._log.read_text()
        return self

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def lost(self) -> list[dict[str, Any]]:
        """What it says about leases of rows that it has lost; one on its name may be lost before that."""
        return [line for line in self.logged("lease.lost") if "resume_id" in line]

    def ready(self) -> bool:
        port = self.logged("http.listening")[-1]["port"]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=20) as reply:
                return bool(reply.status == 200)
        except urllib.error.HTTPError as error:
            with error:
                return False

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ends(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 20)

    def thaw(self) -> None:
        """Let it go on after SIGSTOP."""
        self.signal(signal.SIGCONT)

    async def killed(self) -> None:
        self.signal(signal.SIGKILL)
        await self.ends()


class Crew(Bench):
    """The bench with processes on one outbox (a SQLite file, unless another URL is given); all are gone at the end."""

    def __init__(self, url: str, folder: Path, outbox_url: str | None = None) -> None:
        super().__init__(url, folder)
        self.outbox_url = outbox_url or f"sqlite:{folder / 'outbox.db'}"
        self.consumers: list[Consumer] = []
        (folder / "crew_handlers.py").write_text(_HANDLERS)

    @classmethod
    @asynccontextmanager
    async def at(cls, url: str, folder: Path, outbox_url: str | None = None) -> AsyncIterator[Crew]:
        crew = cls(url, folder, outbox_url)
        await crew.connect()
        try:
            yield crew
        finally:
            for consumer in crew.consumers:
                if consumer.process.returncode is None:
                    await consumer.killed()
            await crew.nats.close()

    async def consumer(self, who: str, *, env: dict[str, str] | None = None, **options: Any) -> Consumer:
        made = Consumer(self, who, env or {}, options)
        self.consumers.append(made)
        return await made.start()

    def journal(self) -> list[str]:
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def begun(self, who: str = "") -> list[str]:
        """The names of the resumes whose hand-offs have begun, or those of one process."""
        lines = [line.split() for line in self.journal()]
        return [name for what, name, whose in lines if what == "begin" and who in ("", whose)]

    def open_gate(self, who: str | None = None) -> None:
        (self.folder / ("gate" if who is None else f"gate-{who}")).touch()

    @asynccontextmanager
    async def outbox(self) -> AsyncIterator[Outbox]:
        """The store, to look into it."""
        outbox = make_outbox(self.outbox_url, nats=self.url)
        await outbox.open()
        try:
            yield outbox
        finally:
            await outbox.close()

    async def row(self, name: str, **fields: Any) -> Row | None:
        async with self.outbox() as outbox:
            return await outbox.get(resume_body(name, **fields)["resume_id"])

    async def rows(self) -> list[Row]:
        async with self.outbox() as outbox:
            return await outbox.browse(None, 1_000)

    async def reaches(self, state: State, name: str) -> Row:
        async def there() -> Row | None:
            row = await self.row(name)
            return row if row is not None and row.state is state else None

        row: Row = await until(there, f"{name} is {state}")
        return row

    async def all_reach(self, state: State, count: int) -> None:
        async with self.outbox() as outbox:

            async def there() -> bool:
                return (await outbox.counts())[state] == count

            await until(there, f"{count} rows are {state}")

    async def notes(self, line: str) -> None:
        await until(lambda: line in self.journal(), f"{line} in the journal")

    async def held_consumer(self, step: str, name: str, **env: str) -> Consumer:
        """A process, called ``step``, that comes to a stop at that step of the resume ``name``."""
        resume_id = resume_body(name)["resume_id"]
        return await self.consumer(step, env={"HOLD_STEP": step, "HOLD_RESUME": resume_id, **env})

    async def holds(self, step: str) -> None:
        """Wait until a process has come to a stop at ``step``; see tests/support/notify_steps.py."""
        await until((self.folder / f"held-{step}").exists, f"held at {step}")
