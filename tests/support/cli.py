"""The command line as a user runs it, and long-running commands whose output a test waits for."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DURABLE_TIMER = Path(sys.executable).with_name("durable-timer")
_RUN_S = 60.0
_END_S = 20.0
OUTCOME_FIELDS = [
    "command_id", "status", "code", "message", "timer_ref", "generation", "fence", "phase", "due_at_ms",
]  # fmt: skip


class Cli:
    """Runs ``durable-timer`` against one broker."""

    def __init__(self, url: str) -> None:
        self._environment = {**os.environ, "DURABLE_TIMER_NATS_URL": url, "COLUMNS": "200", "NO_COLOR": "1"}

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [DURABLE_TIMER, *arguments],
            capture_output=True,
            text=True,
            input=stdin,
            timeout=_RUN_S,
            env=self._environment,
        )

    def json(self, *arguments: str, code: int = 0, stdin: str = "") -> Any:
        """The one JSON line that a command prints, when it ends with ``code``."""
        done = self.run(*arguments, "--json", stdin=stdin)
        assert done.returncode == code, f"{arguments}: {done}"
        [line] = done.stdout.splitlines()
        return json.loads(line)

    def until(self, condition: Any, *arguments: str, within_s: float = 20.0) -> Any:
        """Run a command with ``--json`` until its line satisfies ``condition``; returns that line."""
        deadline = time.monotonic() + within_s
        while True:
            value = self.json(*arguments)
            if condition(value):
                return value
            assert time.monotonic() < deadline, f"{arguments} still says {value}"

    def lines(self, *arguments: str) -> list[Any]:
        """All JSON lines that a command prints."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done
        return [json.loads(line) for line in done.stdout.splitlines()]


class Running:
    """A command that runs until it is told to end. Only the process that this object started is signalled."""

    def __init__(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        program: str | Path = DURABLE_TIMER,
    ) -> None:
        self.output = ""
        self._grown = threading.Condition()
        self.process = subprocess.Popen(
            [program, *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grown:
                self.output += line
                self._grown.notify_all()
        with self._grown:
            self._grown.notify_all()

    def until(self, pattern: str, within_s: float = 20.0) -> re.Match[str]:
        """Wait until the output matches."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            match = re.search(pattern, self.output)
            found.extend([match] if match else [])
            return match is not None or not self._reader.is_alive()

        with self._grown:
            self._grown.wait_for(look, within_s)
        assert found, f"{pattern!r} not within {within_s:g} s in:\n{self.output}"
        return found[0]

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(_END_S)
        self._reader.join(_END_S)
        return code

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(_END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
