"""One SQLite connection in one thread, where what waits together is committed together.

Each commit is an fsync, so the more callers there are at a time, the more of them share one. A job is a plain
function of (connection, now_ms); the store's clock is read once a transaction, after the lock was got.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from notify_consumer import events
from notify_consumer.errors import OutboxError, OutboxUnavailable
from notify_consumer.outbox.schema import migrate
from timer_service.logs import get_logger

T = TypeVar("T")
Job = Callable[[sqlite3.Connection, int], T]

BUSY_TIMEOUT_MS = 2_000
_NOW = "SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
_Waiting = tuple[Job[Any], bool, "asyncio.Future[Any]"]
_File = tuple[int, int]
"""Which file it is, whatever its name."""


class SqliteThread:
    """Runs jobs on the database at ``path``, which is opened (and opened again after a failure) when needed.

    So it is where the file was deleted, or another one put in its place: what is written into one that has no name any
    more is on the disk, but nobody finds it there. That is looked at before each transaction.
    """

    def __init__(self, path: str, prepare: Job[None], *, create: bool = True) -> None:
        self._path = path
        self._mode = "rwc" if create else "rw"
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._queue: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None
        self._connection: sqlite3.Connection | None = None
        self._file: _File | None = None
        self._closed = False

    async def read(self, job: Job[T]) -> T:
        """Run a job that changes nothing; another process's write doesn't hold it up."""
        return await self._enqueue(job, writes=False)

    async def write(self, job: Job[T]) -> T:
        """Run a job in a transaction; returns when it is on the disk.

        Other jobs may share the transaction. A job that raises an OutboxError must not have changed anything.
        """
        return await self._enqueue(job, writes=True)

    async def close(self) -> None:
        """Finish what is queued and close the file. Repeating it does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            await self._worker
        await asyncio.get_running_loop().run_in_executor(self._pool, self._disconnect)
        self._pool.shutdown()

    async def _enqueue(self, job: Job[T], *, writes: bool) -> T:
        if self._closed:
            raise OutboxUnavailable(f"{self._path}: the outbox is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append((job, writes, future))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="outbox")
        return await future

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            batch, self._queue = self._queue, []
            results = await loop.run_in_executor(self._pool, self._run, batch)
            for (_, _, future), result in zip(batch, results, strict=True):
                _settle(future, result)
        self._worker = None

    # -- in the thread --

    def _run(self, batch: list[_Waiting]) -> list[Any]:
        """The result of each job, or its exception."""
        try:
            return self._transaction(batch)
        except (sqlite3.Error, OSError) as error:
            if not _is_busy(error):
                self._disconnect()
            return [OutboxUnavailable(f"{self._path}: {error}") for _ in batch]
        except Exception as error:  # nothing of a job's may end this worker, on which all that comes later waits
            return [OutboxUnavailable(f"{self._path}: {error!r}") for _ in batch]

    def _transaction(self, batch: list[_Waiting]) -> list[Any]:
        connection = self._found() or self._connect()
        connection.execute("BEGIN IMMEDIATE" if any(writes for _, writes, _ in batch) else "BEGIN")
        try:
            (now_ms,) = connection.execute(_NOW).fetchone()
            results = [_result(job, connection, now_ms) for job, _, _ in batch]
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return results

    def _found(self) -> sqlite3.Connection | None:
        """The connection, as far as it leads to the file that is there."""
        if self._connection is not None and (self._file is None or self._file != _file(self._path)):
            get_logger().error(events.OUTBOX_LOST, file=self._path)
            self._disconnect()  # SQLite leaves the log of whatever has the file's name now alone
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        path = Path(self._path).absolute()
        if self._mode == "rwc":
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            f"{path.as_uri()}?mode={self._mode}", uri=True, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None
        )
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            migrate(connection)
            connection.execute("BEGIN IMMEDIATE")
            self._prepare(connection, connection.execute(_NOW).fetchone()[0])
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        self._connection, self._file = connection, _file(self._path)
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _file(path: str) -> _File | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _result(job: Job[Any], connection: sqlite3.Connection, now_ms: int) -> Any:
    try:
        return job(connection, now_ms)
    except OutboxError as error:
        return error


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return  # whoever waited has been cancelled; what it asked for has happened nevertheless
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


def _is_busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
