"""A nats-server of one's own: for ``durable-timer demo`` and ``dev``, and for tests.

The binary comes with the extra ``[server]``. Everything the broker writes lies under one folder, which at
most one running server uses at a time; one started again on it finds what was acknowledged before.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from timer_service.children import dies_with_parent as dies_with_parent_by

if TYPE_CHECKING:
    from types import TracebackType

_HOST: Final = "127.0.0.1"
_CHANCE: Final = random.SystemRandom()  # a seeded one would hand several processes the same ports
# Below the range from which Linux takes the ports of outgoing connections (32768 upwards): while the broker
# is down its port must not go to another connection, and a client that keeps trying must not meet itself.
_PORTS: Final = range(20_000, 32_000)
_READY_TIMEOUT_S: Final = 30.0
_STOP_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.01
_START_ATTEMPTS: Final = 5
_LOG_TAIL_LINES: Final = 15

_CONFIG: Final = """\
# Written at each start by timer_service.embedded; changes do not last.
listen: "{host}:{port}"
ports_file_dir: {run_dir}
log_file: {log_file}
logfile_size_limit: 16MB
jetstream {{
  store_dir: {store_dir}
  # The streams reserve their maxima out of this; nothing is allocated on disk before it is needed.
  max_file_store: {max_file_store}
  sync_interval: "{sync_interval}"
}}
{extra_config}
"""


class EmbeddedServerError(RuntimeError):
    """The broker could not be run."""


class EmbeddedServerMissing(EmbeddedServerError):
    """There is no nats-server on this machine."""


class DataDirInUse(EmbeddedServerError):
    """Another broker, perhaps left over from a killed process, is running on the same folder."""


def find_nats_server() -> Path:
    """The nats-server to run: that of this Python's environment first, then the one on PATH.

    Raises `EmbeddedServerMissing` when there is none.
    """
    # sys.executable is not resolved on purpose: in a venv it is a link, and the scripts lie beside the link.
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if os.access(candidate := folder / "nats-server", os.X_OK):
            return candidate
    if found := shutil.which("nats-server"):
        return Path(found)
    raise EmbeddedServerMissing("nats-server was not found: pip install 'durable-timer[server]'")


class EmbeddedBroker:
    """One nats-server with JetStream on the loopback interface, as a child process.

    ``port`` 0 takes a free one at the first start and keeps it for every later start of this object.
    ``start`` returns when clients can connect and the streams are loaded. ``stop`` and ``kill`` may be called
    at any time, also twice. ``sync_interval`` is how often written data is flushed to the disk: it matters
    when the machine loses power, not when the server is killed. ``extra_config`` is appended to the generated
    configuration. With ``dies_with_parent`` the server shuts down when the thread that started it (use the main
    one) ends in whatever way; otherwise it outlives a killed parent.

    Not thread-safe. Calls block: a second for a start, up to ten for a stop.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        port: int = 0,
        *,
        sync_interval: str = "1s",
        max_file_store: str = "64GB",
        extra_config: str = "",
        dies_with_parent: bool = False,
    ) -> None:
        self.data_dir: Final = Path(data_dir).absolute()
        self._port = port
        self._sync_interval = sync_interval
        self._max_file_store = max_file_store
        self._extra_config = extra_config
        self._before_exec = dies_with_parent_by(signal.SIGTERM) if dies_with_parent else None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """The port of the client connections; 0 before the first start of a broker that may choose."""
        return self._port

    @property
    def url(self) -> str:
        """Where clients connect to. Raises `EmbeddedServerError` before the port is known."""
        if not self._port:
            raise EmbeddedServerError("the broker has no port before it was started")
        return f"nats://{_HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The process id while the server runs."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether the server process lives (it may be frozen)."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_file(self) -> Path:
        """What the server has to say, over all starts."""
        return self.data_dir / "nats-server.log"

    def start(self) -> None:
        """Start the server and wait until it is ready. Does nothing when it runs already.

        Raises `EmbeddedServerMissing`, `DataDirInUse`, or `EmbeddedServerError` with the end of the log.
        """
        if self.running:
            return
        if self._port:
            self._start_on(self._port)
        else:
            self._port = self._start_on_a_free_port()

    def stop(self) -> None:
        """Shut the server down cleanly (SIGTERM) and wait for its end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server at once (SIGKILL), as a crash would, and wait until it is gone."""
        self._end(signal.SIGKILL)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _run_dir(self) -> Path:
        return self.data_dir / "run"

    def _start_on_a_free_port(self) -> int:
        """Between finding a free port and listening on it somebody else may take it: then try another."""
        for _ in range(_START_ATTEMPTS):
            port = free_port()
            try:
                self._start_on(port)
            except EmbeddedServerError as error:
                if isinstance(error, EmbeddedServerMissing | DataDirInUse) or not port_taken(port):
                    raise
            else:
                return port
        raise EmbeddedServerError(f"every free port on {_HOST} was taken before the broker could use it")

    def _start_on(self, port: int) -> None:
        server = find_nats_server()
        self._run_dir.mkdir(parents=True, exist_ok=True)
        lock = _lock(self.data_dir / "lock")
        try:
            for leftover in self._run_dir.glob("*.ports"):
                leftover.unlink(missing_ok=True)
            config = self._write_config(port)
            # The child inherits the lock and so keeps it, also when it outlives a killed parent.
            # A group of its own: Ctrl-C is for the services, not for the broker that they still need.
            self._process = subprocess.Popen(
                [server, "--config", config],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(lock,),
                process_group=0,
                preexec_fn=self._before_exec,  # noqa: PLW1509  (it only makes system calls)
            )
        finally:
            os.close(lock)
        self._await_ready(self._process)

    def _write_config(self, port: int) -> Path:
        path = self.data_dir / "nats-server.conf"
        text = _CONFIG.format(
            host=_HOST,
            port=port,
            run_dir=json.dumps(str(self._run_dir)),
            log_file=json.dumps(str(self.log_file)),
            store_dir=json.dumps(str(self.data_dir)),
            max_file_store=self._max_file_store,
            sync_interval=self._sync_interval,
            extra_config=self._extra_config,
        )
        path.write_text(text, encoding="utf-8")
        return path

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the ports file, which the server writes once it accepts clients."""
        ports_file = self._run_dir / f"nats-server_{process.pid}.ports"
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while process.poll() is None:
            if _is_complete(ports_file):
                return
            if time.monotonic() > deadline:
                self.kill()
                raise EmbeddedServerError(f"nats-server was not ready within {_READY_TIMEOUT_S:g} s{self._log_tail()}")
            time.sleep(_POLL_S)
        complaint = self._drain(process)
        raise EmbeddedServerError(f"nats-server exited with {process.returncode}{complaint or self._log_tail()}")

    def _drain(self, process: subprocess.Popen[bytes]) -> str:
        """What an ended server said on stderr, where it complains about an unreadable configuration."""
        self._process = None
        _, text = process.communicate()
        return f":\n{text.decode(errors='replace').strip()}" if text.strip() else ""

    def _log_tail(self) -> str:
        with suppress(OSError):
            lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
            return "".join(f"\n  {line}" for line in lines[-_LOG_TAIL_LINES:])
        return ""

    def _end(self, how: signal.Signals) -> None:
        if (process := self._process) is None:
            return
        process.send_signal(how)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._drain(process)


def _lock(path: Path) -> int:
    """An exclusive lock, as a file descriptor; it holds until the last copy of that descriptor is closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise DataDirInUse(f"another nats-server is running on {path.parent}") from error
    return descriptor


def _is_complete(ports_file: Path) -> bool:
    """Whether the server has written the whole file (it does not do so in one step)."""
    try:
        return bool(json.loads(ports_file.read_bytes())["nats"])
    except (OSError, ValueError, KeyError):
        return False


def free_port() -> int:
    """A port of the loopback interface that nobody uses now, below those that the system hands out itself."""
    for port in _CHANCE.sample(_PORTS, 200):
        if not port_taken(port):
            return port
    raise EmbeddedServerError(f"no free port on {_HOST}")


def port_taken(port: int) -> bool:
    """Whether somebody listens on this port of the loopback interface."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return True
    return False
