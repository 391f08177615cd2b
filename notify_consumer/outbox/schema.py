"""The tables of the SQLite outbox, as the steps that led to them. A released step is never changed; add one."""

from __future__ import annotations

import sqlite3

# `claimable_at` is the one column that says when a row may be claimed: a pending row when its backoff is over, a
# leased one when its lease runs out, a settled one never (NULL). So claiming and recovering are one look-up.
MIGRATIONS = (
    """
    CREATE TABLE outbox (
        seq          INTEGER PRIMARY KEY,
        resume_id    TEXT NOT NULL UNIQUE,
        flow         TEXT NOT NULL,
        lane         TEXT NOT NULL,
        state        TEXT NOT NULL CHECK (state IN ('pending', 'claimed', 'answered', 'done', 'dead')),
        readable     INTEGER NOT NULL,
        body         BLOB NOT NULL,
        attempts     INTEGER NOT NULL DEFAULT 0,
        sends        INTEGER NOT NULL DEFAULT 0,
        feedback     TEXT,
        settled      TEXT,
        last_error   TEXT,
        owner        TEXT,
        token        TEXT,
        claimable_at INTEGER,
        inserted_at  INTEGER NOT NULL,
        updated_at   INTEGER NOT NULL
    );
    CREATE INDEX outbox_waiting ON outbox (lane, claimable_at) WHERE claimable_at IS NOT NULL;
    CREATE INDEX outbox_state ON outbox (state, updated_at);
    """,
)


class NewerSchema(sqlite3.DatabaseError):
    """The file was written by a newer version of this program; it is left as it is."""


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the file up to date, one step a transaction. Two processes may do so at once."""
    while True:
        connection.execute("BEGIN IMMEDIATE")
        try:
            more = _step(connection)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        if not more:
            return


def _step(connection: sqlite3.Connection) -> bool:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise NewerSchema(f"the outbox has schema version {version}; this program knows {len(MIGRATIONS)}")
    if version == len(MIGRATIONS):
        return False
    for statement in MIGRATIONS[version].split(";"):  # executescript() would commit first
        if statement.strip():
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {version + 1}")
    return True
