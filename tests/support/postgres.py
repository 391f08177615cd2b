"""A real PostgreSQL server for tests, from Debian's packages: a cluster of its own, thrown away at the end."""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from timer_service.children import dies_with_parent

REQUIRED = "DURABLE_TIMER_REQUIRE_POSTGRES"
"""Set (by .ci/run): a missing server is a failure and not a reason to skip."""
PASSWORD = "p@ss:w/ord"  # whatever can go wrong in a URL
_QUOTED = "p%40ss%3Aw%2Ford"
_READY_S = 60.0
_STOP_S = 20.0
_ATTEMPTS = 5
_CHANCE = random.SystemRandom()
_PORTS = range(20_000, 32_000)  # below those of outgoing connections, as in timer_service.embedded
_OPTIONS = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "60",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "timezone": "UTC",
}


def installed() -> Path | None:
    """The folder of the newest PostgreSQL server's programs, None without one."""
    if (found := shutil.which("postgres")) is not None:
        return Path(found).resolve().parent
    versions = [each for each in Path("/usr/lib/postgresql").glob("*/bin") if (each / "postgres").is_file()]
    return max(versions, key=lambda each: float(each.parent.name), default=None)


def need_postgres() -> Path:
    """The same; without one the test is skipped, or fails where a server is required."""
    if (found := installed()) is not None:
        return found
    reason = "no PostgreSQL server is installed (Debian and Ubuntu: apt install postgresql)"
    if os.environ.get(REQUIRED):
        pytest.fail(f"{reason}, and {REQUIRED} is set")
    pytest.skip(reason)


class Postgres:
    """A server that tests may freeze, stop and start again on the same port and data. ``url`` has a password."""

    def __init__(self, programs: Path, *, options: dict[str, str] | None = None) -> None:
        self._programs = programs
        self._options = _OPTIONS | (options or {})
        # PostgreSQL does not run as root. Its folder lies under no other that only root may enter.
        self._user: dict[str, Any] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="durable-timer-postgres-"))
        if os.geteuid() == 0:
            account = _account()
            os.chown(self._folder, account.pw_uid, account.pw_gid)
            self._user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"postgresql://tester:{_QUOTED}@127.0.0.1:{self.port}/postgres"

    def __enter__(self) -> Postgres:
        try:
            self._initialise()
            self._start_somewhere()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def start(self) -> None:
        """Start, on the port it had before, and wait until it takes connections."""
        log = (self._folder / "log").open("ab")
        settings = [part for name, value in self._options.items() for part in ("-c", f"{name}={value}")]
        command = [str(self._programs / "postgres"), "-D", str(self._data), "-p", str(self.port), *settings]
        with log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                process_group=0,  # Ctrl-C is for pytest, which then stops it
                preexec_fn=dies_with_parent(signal.SIGQUIT),  # noqa: PLW1509 - it only makes system calls
                **self._user,
            )
        deadline = time.monotonic() + _READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL does not start:\n{self.log()[-2_000:]}")
            time.sleep(0.02)

    def stop(self, *, hard: bool = False) -> None:
        """Shut down, at once and without a checkpoint if ``hard`` (the next start recovers)."""
        process, self._process = self._process, None
        if process is None:
            return
        for pid in self._pids(process.pid):
            _signal(pid, signal.SIGCONT)
        process.send_signal(signal.SIGQUIT if hard else signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Frozen within the block, each of its processes: connections stay open, nothing answers."""
        assert self._process is not None
        pid = self._process.pid
        _signal(pid, signal.SIGSTOP)  # first, so that no new process comes up
        try:
            for each in self._pids(pid):
                _signal(each, signal.SIGSTOP)
            yield
        finally:
            for each in self._pids(pid):
                _signal(each, signal.SIGCONT)

    def query(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(text.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def log(self) -> str:
        """What the server wrote to its log so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / "log").read_text(errors="replace")
        return ""

    def remove(self) -> None:
        """Stop the server and forget its data."""
        self.stop(hard=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _initialise(self) -> None:
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)  # in a folder that nobody else can enter
        how = ["--no-sync", "--encoding", "UTF8", "--locale", "C", "--auth", "scram-sha-256", "--username", "tester"]
        command = [str(self._programs / "initdb"), "-D", str(self._data), *how, "--pwfile", str(secret)]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self._folder, timeout=_READY_S, check=False, **self._user
        )
        if done.returncode:
            raise RuntimeError(f"initdb: {done.stderr}")

    def _start_somewhere(self) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            self.port = _CHANCE.choice(_PORTS)
            try:
                self.start()
                return
            except RuntimeError:
                self.stop(hard=True)
                if attempt == _ATTEMPTS:
                    raise

    def _answers(self) -> bool:
        try:
            return self.query("SHOW data_directory") == [(str(self._data),)]  # not another one that has this port
        except psycopg.OperationalError:
            return False

    @staticmethod
    def _pids(postmaster: int) -> Sequence[int]:
        try:
            children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        except FileNotFoundError:
            return []
        return [postmaster, *map(int, children)]


def _account() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError("there is no account to run PostgreSQL under")


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
