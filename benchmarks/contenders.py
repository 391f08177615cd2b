"""Who is measured: how each contender is provisioned, served and known to be ready."""

import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 20.0
_LOG_TAIL = 2000


class ContenderError(Exception):
    """A contender is not installed, did not become ready, or died."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One service under test: a Python program with a provision and a serve command.

    `module` is run with `python -m`, `script` is looked for beside the interpreter and then on the path. In
    the arguments `{nats}` and `{http}` stand for the broker's URL and the host and port for `/readyz`.
    """

    name: str
    provision: tuple[str, ...]
    serve: tuple[str, ...]
    module: str | None = None
    script: str | None = None

    def command(self, arguments: Sequence[str], *, nats: str, http: str = "", profile: str = "") -> list[str]:
        """The whole command line; with `profile` the standard library's profiler writes its figures there."""
        filled = [argument.format(nats=nats, http=http) for argument in arguments]
        profiler = ["-m", "cProfile", "-o", profile] if profile else []
        return [sys.executable, *profiler, *self._program(), *filled]

    def _program(self) -> list[str]:
        if self.module is not None:
            return ["-m", self.module]
        beside = Path(sys.executable).parent / str(self.script)
        found = str(beside) if beside.exists() else shutil.which(str(self.script))
        if found is None:
            raise ContenderError(f"{self.script} is not installed: pip install -e '.[server]'")
        return [found]


EVERYDAY = Contender(
    name="everyday",
    module="benchmarks.everyday",
    provision=("provision", "--nats", "{nats}"),
    serve=("serve", "--nats", "{nats}", "--http", "{http}"),
)
DURABLE_TIMER = Contender(
    name="durable-timer",
    script="durable-timer",
    provision=("provision", "--nats", "{nats}"),
    serve=("serve", "--nats", "{nats}", "--http", "{http}", "--driver", "heap", "--instance", "bench"),
)
CONTENDERS = {contender.name: contender for contender in (EVERYDAY, DURABLE_TIMER)}


@contextmanager
def serving(
    contender: Contender, nats: str, *, profile: str = "", settings: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Provision, serve until the block ends, then stop with SIGTERM; gives the service's process id.

    `settings` are environment variables beside the defaults. Raises ContenderError, with the end of its log, if
    the service does not get that far.
    """
    with tempfile.TemporaryFile("w+") as log:
        _provision(contender, nats)
        address = f"127.0.0.1:{_free_port()}"
        command = contender.command(contender.serve, nats=nats, http=address, profile=profile)
        process = subprocess.Popen(command, cwd=ROOT, env=_environment() | dict(settings or {}), stdout=log, stderr=log)
        try:
            if not _await_ready(process, address):
                raise ContenderError(f"{contender.name} is not ready: {_tail(log.fileno())}")
            yield process.pid
        finally:
            _stop(process)


def _provision(contender: Contender, nats: str) -> None:
    command = contender.command(contender.provision, nats=nats)
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        raise ContenderError(f"{contender.name} provision failed: {(done.stdout + done.stderr)[-_LOG_TAIL:]}")


def _environment() -> dict[str, str]:
    """Ours without the settings of the services: every run is measured with the defaults."""
    return {key: value for key, value in os.environ.items() if not key.startswith("DURABLE_TIMER_")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_ready(process: "subprocess.Popen[bytes]", address: str) -> bool:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if _is_ready(address):
            return True
        time.sleep(0.05)
    return False


def _is_ready(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=2)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(descriptor: int) -> str:
    """The last lines that the service wrote (it shares the descriptor's offset with us: read by position)."""
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, _LOG_TAIL, max(0, size - _LOG_TAIL)).decode(errors="replace")
