"""What the PostgreSQL outbox says to its server: the tables as the steps that led to them, and its statements.

``{now}`` is the server's clock at that very moment (not the beginning of the transaction), in milliseconds.
A released step is never changed; add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import LiteralString

from psycopg import sql

_NOW = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"

# `claimable_at` is the one column that says when a row may be claimed: a pending row when its backoff is over, a
# leased one when its lease runs out, a settled one never (NULL). Texts compare by their bytes ("C"): that is what
# the walk from lane to lane needs, and no update of the system's locales makes an index wrong.
# A queue's rows die young: without eager vacuuming its indexes begin with entries of rows that are long gone.
MIGRATIONS = (
    """
    CREATE SEQUENCE {schema}.outbox_seq;
    CREATE TABLE {outbox} (
        resume_id    text COLLATE "C" PRIMARY KEY,
        seq          bigint NOT NULL,
        flow         text NOT NULL,
        lane         text COLLATE "C" NOT NULL,
        state        text COLLATE "C" NOT NULL CHECK (state IN ('pending', 'claimed', 'answered', 'done', 'dead')),
        readable     boolean NOT NULL,
        body         bytea NOT NULL,
        attempts     integer NOT NULL DEFAULT 0,
        sends        integer NOT NULL DEFAULT 0,
        feedback     text,
        settled      text,
        last_error   text,
        owner        text,
        token        text,
        claimable_at bigint,
        inserted_at  bigint NOT NULL,
        updated_at   bigint NOT NULL
    ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
            autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_analyze_scale_factor = 0.1);
    CREATE INDEX outbox_waiting ON {outbox} (lane, claimable_at, seq) WHERE claimable_at IS NOT NULL;
    CREATE INDEX outbox_state ON {outbox} (state, updated_at, seq);
    """,
)

# The planner's statistics of a table that fills and empties within seconds are always out of date, and the plan
# made for an empty table is a scan of all rows. Every statement here has its index. (What is off costs a lot in the
# planner's eyes, which would then compile such plans: 300 ms for a statement of 1 ms.)
_SETTINGS = """
    SELECT set_config('lock_timeout', %(lock_timeout)s, false),
        set_config('statement_timeout', %(statement_timeout)s, false),
        set_config('default_transaction_isolation', 'read committed', false),
        set_config('synchronous_commit',
            CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on'
                ELSE current_setting('synchronous_commit') END, false),
        set_config('enable_seqscan', 'off', false), set_config('enable_bitmapscan', 'off', false),
        set_config('enable_sort', 'off', false), set_config('jit', 'off', false)
"""

_VERSION = "SELECT max(version) FROM {versions}"
_HAS_VERSIONS = "SELECT to_regclass(%(versions)s) IS NOT NULL"
_HAS_SCHEMA = "SELECT to_regnamespace(%(schema)s) IS NOT NULL"
_MAKE_SCHEMA = "CREATE SCHEMA {schema}"
_MAKE_VERSIONS = """
    CREATE TABLE {versions} (version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT clock_timestamp())
"""
_STEPPED = "INSERT INTO {versions} (version) VALUES (%(version)s)"
# One at a time, and released with the transaction, however that ends.
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%(name)s, 0))"

# The numbers are drawn in the order of arrival, the rows written in the order of their ids: two processes that take
# the same resumes in at a time then wait for one another instead of locking each other out.
_INSERT = """
    INSERT INTO {outbox} (
        resume_id, seq, flow, lane, state, readable, body, last_error, claimable_at, inserted_at, updated_at)
    SELECT resume_id, seq, flow, left(flow, %(lane_chars)s), CASE WHEN readable THEN 'pending' ELSE 'dead' END,
        readable, body, unreadable, CASE WHEN readable THEN clock.ms END, clock.ms, clock.ms
    FROM (SELECT {now} AS ms) AS clock, (
        SELECT resume_id, nextval({sequence}) AS seq, flow, body, unreadable, unreadable IS NULL AS readable
        FROM unnest(%(ids)s::text[], %(flows)s::text[], %(bodies)b::bytea[], %(unreadables)s::text[])
            AS given (resume_id, flow, body, unreadable)) AS new
    ORDER BY resume_id COLLATE "C"
    ON CONFLICT (resume_id) DO UPDATE SET
        flow = excluded.flow, lane = excluded.lane, state = excluded.state, readable = true,
        body = excluded.body, last_error = NULL, claimable_at = excluded.claimable_at,
        updated_at = excluded.updated_at
    WHERE NOT outbox.readable AND excluded.readable
    RETURNING resume_id
"""

# Walks from lane to lane along the index, so that a long backlog in one costs nothing.
_SURVEY = """
    WITH RECURSIVE clock AS MATERIALIZED (SELECT {now} AS ms), lanes (lane) AS (
        (SELECT lane FROM {outbox} WHERE claimable_at IS NOT NULL ORDER BY lane LIMIT 1)
        UNION ALL
        SELECT (SELECT further.lane FROM {outbox} AS further
                WHERE claimable_at IS NOT NULL AND further.lane > lanes.lane ORDER BY further.lane LIMIT 1)
        FROM lanes WHERE lane IS NOT NULL
    )
    SELECT clock.ms, lanes.lane,
        (SELECT count(*) FROM (
            SELECT 1 FROM {outbox} AS waiting
            WHERE waiting.lane = lanes.lane AND claimable_at <= (SELECT ms FROM clock) LIMIT %(limit)s) AS counted),
        (SELECT min(claimable_at) FROM {outbox} AS waiting WHERE waiting.lane = lanes.lane),
        (SELECT min(claimable_at) FROM {outbox} AS waiting
            WHERE waiting.lane = lanes.lane AND claimable_at > (SELECT ms FROM clock))
    FROM clock LEFT JOIN lanes ON lanes.lane IS NOT NULL
"""

_CLAIM = """
    WITH clock AS MATERIALIZED (SELECT {now} AS ms), taken AS MATERIALIZED (
        SELECT found.resume_id, found.claimable_at, found.seq
        FROM unnest(%(lanes)s::text[], %(counts)s::bigint[]) AS wanted (lane, count)
        CROSS JOIN LATERAL (
            SELECT resume_id, claimable_at, seq FROM {outbox} AS waiting
            WHERE waiting.lane = wanted.lane AND claimable_at <= (SELECT ms FROM clock)
            ORDER BY claimable_at, seq LIMIT wanted.count FOR UPDATE SKIP LOCKED) AS found
    )
    UPDATE {outbox} AS row SET
        state = CASE row.state WHEN 'answered' THEN 'answered' ELSE 'claimed' END,
        owner = %(owner)s, token = %(token)s,
        attempts = row.attempts + (row.state <> 'answered')::integer,
        sends = row.sends + (row.state = 'answered')::integer,
        claimable_at = clock.ms + %(lease_ms)s, updated_at = clock.ms
    FROM taken, clock WHERE row.resume_id = taken.resume_id
    RETURNING taken.claimable_at, taken.seq,
        row.resume_id, row.flow, row.lane, row.body, row.attempts, row.sends, row.feedback, row.updated_at
"""

_RENEW = """
    UPDATE {outbox} AS row SET claimable_at = {now} + %(lease_ms)s, updated_at = {now}
    FROM unnest(%(ids)s::text[], %(tokens)s::text[]) AS held (resume_id, token)
    WHERE row.resume_id = held.resume_id AND row.token = held.token
    RETURNING row.resume_id
"""
_MINE = "WHERE resume_id = %(resume_id)s AND token = %(token)s"
_UNLEASED = "owner = NULL, token = NULL, updated_at = {now}"
# The two writes of every hand-off: of many claims at a time, each fenced by its own token.
_HELD = """
    FROM unnest(%(ids)s::text[], %(tokens)s::text[], %(values)s::text[]) AS held (resume_id, token, value)
    WHERE row.resume_id = held.resume_id AND row.token = held.token RETURNING held.resume_id, held.token
"""
_ANSWER = """
    UPDATE {outbox} AS row SET
        state = 'answered', lane = %(lane)s, feedback = held.value, sends = 1, last_error = NULL,
        updated_at = {now} {held}
"""
_FINISH = """
    UPDATE {outbox} AS row SET
        state = 'done', settled = held.value, body = '', last_error = NULL, claimable_at = NULL,
        {unleased} {held}
"""
_BACK_OFF = """
    UPDATE {outbox} SET
        state = CASE state WHEN 'claimed' THEN 'pending' ELSE state END, last_error = %(error)s,
        claimable_at = {now} + %(delay_ms)s, {unleased} {mine}
"""
_KILL = """
    UPDATE {outbox} SET state = 'dead', last_error = %(reason)s, claimable_at = NULL, {unleased} {mine}
"""
_RELEASE = """
    UPDATE {outbox} SET
        state = CASE state WHEN 'claimed' THEN 'pending' ELSE state END,
        attempts = attempts - (state = 'claimed')::integer, sends = sends - (state = 'answered')::integer,
        claimable_at = {now}, {unleased} {mine}
"""
_REQUEUE = """
    UPDATE {outbox} SET state = 'answered', sends = 0, claimable_at = {now}, updated_at = {now}
    WHERE resume_id = ANY (%(ids)s) AND state = 'done' RETURNING resume_id
"""
_REVIVE = """
    UPDATE {outbox} SET
        state = 'pending', lane = left(flow, %(lane_chars)s), attempts = 0, sends = 0, feedback = NULL,
        claimable_at = {now}, updated_at = {now}
    WHERE resume_id = %(resume_id)s AND state = 'dead' AND readable RETURNING resume_id
"""
_PRUNE = """
    DELETE FROM {outbox} WHERE resume_id = ANY (ARRAY(
        SELECT resume_id FROM {outbox} WHERE state = 'done' AND updated_at < (SELECT {now}) - %(older_than_ms)s
        ORDER BY updated_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
    RETURNING resume_id
"""
_REBASE = """
    UPDATE {outbox} SET claimable_at = clock.ms + greatest(claimable_at - updated_at, 0), updated_at = clock.ms
    FROM (SELECT {now} AS ms) AS clock
    WHERE claimable_at IS NOT NULL AND updated_at > clock.ms + %(step)s
"""
_COLUMNS = """
    resume_id, flow, state, attempts, sends, body, feedback, settled, last_error, owner,
    claimable_at, inserted_at, updated_at
"""
_GET = "SELECT {columns} FROM {outbox} WHERE resume_id = %(resume_id)s"
_BROWSE = """
    SELECT found.* FROM unnest(%(states)s::text[]) AS wanted (state) CROSS JOIN LATERAL (
        SELECT {columns}, seq FROM {outbox} AS kept WHERE kept.state = wanted.state
        ORDER BY updated_at DESC, seq DESC LIMIT %(limit)s) AS found
    ORDER BY updated_at DESC, seq DESC LIMIT %(limit)s
"""
_COUNTS = "SELECT state, count(*) FROM {outbox} GROUP BY state"


class Statements:
    """The statements for the tables in ``schema``, ready to be sent."""

    def __init__(self, schema: str) -> None:
        outbox, versions = sql.Identifier(schema, "outbox"), sql.Identifier(schema, "schema_version")
        names: Mapping[str, sql.Composable] = {
            "schema": sql.Identifier(schema),
            "outbox": outbox,
            "versions": versions,
            "sequence": sql.Literal(sql.Identifier(schema, "outbox_seq").as_string()),
            "now": sql.SQL(_NOW),
            "mine": sql.SQL(_MINE),
            "held": sql.SQL(_HELD),
            "unleased": sql.SQL(_UNLEASED).format(now=sql.SQL(_NOW)),
            "columns": sql.SQL(_COLUMNS),
        }

        def made(text: LiteralString) -> bytes:
            return sql.SQL(text).format(**names).as_bytes()

        self.schema_name, self.versions_name = names["schema"].as_string(), versions.as_string()
        self.settings, self.lock = made(_SETTINGS), made(_LOCK)
        self.has_schema, self.make_schema = made(_HAS_SCHEMA), made(_MAKE_SCHEMA)
        self.has_versions, self.make_versions = made(_HAS_VERSIONS), made(_MAKE_VERSIONS)
        self.version, self.stepped = made(_VERSION), made(_STEPPED)
        self.migrations = tuple(made(step) for step in MIGRATIONS)
        self.insert, self.survey, self.claim, self.renew = made(_INSERT), made(_SURVEY), made(_CLAIM), made(_RENEW)
        self.answer, self.finish, self.back_off = made(_ANSWER), made(_FINISH), made(_BACK_OFF)
        self.kill, self.release = made(_KILL), made(_RELEASE)
        self.requeue, self.revive, self.prune = made(_REQUEUE), made(_REVIVE), made(_PRUNE)
        self.rebase, self.get, self.browse, self.counts = made(_REBASE), made(_GET), made(_BROWSE), made(_COUNTS)
