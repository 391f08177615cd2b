"""Programs run as child processes, for ``demo`` and ``dev``: their output line by line, and no survivors.

A child is killed by the kernel when its parent dies, however that comes about (Linux: the parent-death signal). It
has a process group of its own, so Ctrl-C reaches the parent alone, which then ends its children in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from timer_service import events

_PR_SET_PDEATHSIG: Final = 1
_LINE_BYTES: Final = 2**20
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

OnLine = Callable[[str, dict[str, Any] | str], None]
"""Gets a child's name and one line: the fields of a log line, or what else it wrote."""


def dies_with_parent(number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """For ``preexec_fn``: the child gets signal ``number`` when the thread that started it (use the main one) ends.

    It is run between fork and exec and does nothing but two system calls. Not on Linux it does nothing.
    """
    parent = os.getpid()

    def arrange() -> None:
        if sys.platform != "linux":
            return
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it died before the arrangement stood
            os._exit(1)

    return arrange


def python_program(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``main()`` of ``module`` with this Python; modules in the working folder are found."""
    return [sys.executable, "-c", f"from {module} import main; main()", *arguments]


class Child:
    """One program. Start it from the main thread."""

    def __init__(
        self, name: str, arguments: Sequence[str], on_line: OnLine, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.ready = asyncio.Event()
        """Set while the program says that it is ready (its log events ``service.ready`` and ``service.not_ready``)."""
        self._arguments = list(arguments)
        self._on_line = on_line
        self._environment = {**os.environ, **(environment or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the program; after its end it may be started again."""
        self.ready.clear()
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LINE_BYTES,
            env=self._environment,
            process_group=0,
            preexec_fn=dies_with_parent(),  # it only makes system calls
        )
        self._pump = asyncio.create_task(self._read(self._process), name=f"child.{self.name}")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Wait for its end, and for its last words; returns the exit code (negative: the signal)."""
        assert self._process is not None
        assert self._pump is not None
        code = await self._process.wait()
        await self._pump
        self.ready.clear()
        return code

    async def kill(self) -> None:
        """SIGKILL, as a crash would end it, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        await self.wait()

    async def stop(self, patience_s: float = 15.0) -> int | None:
        """SIGTERM, and SIGKILL after ``patience_s``. Returns the exit code, None when it was never started."""
        if self._process is None:
            return None
        self.signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(asyncio.shield(self.wait()), patience_s)
        except TimeoutError:
            await self.kill()
            return -signal.SIGKILL

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when it does not run."""
        if self.running and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await _next_line(process.stdout):
            self._take(line.decode(errors="replace").rstrip())

    def _take(self, line: str) -> None:
        said = _fields(line)
        if isinstance(said, dict):
            if said.get("event") == events.SERVICE_READY:
                self.ready.set()
            elif said.get("event") == events.SERVICE_NOT_READY:
                self.ready.clear()
        if said:
            self._on_line(self.name, said)


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError:
        return b"(a line too long to show)\n"


def _fields(line: str) -> dict[str, Any] | str:
    """The fields of a JSON log line, or the line as it is."""
    try:
        value = msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return line
    return value if isinstance(value, dict) and "event" in value else line
