"""Settings of the timer service: one table for flags, environment (``DURABLE_TIMER_…``), defaults and limits."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from timer_service.jetstream.topology import Sizes

MIB = 2**20
DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
_SCHEMES = ("nats", "tls", "ws", "wss")


def _host_and_port(value: str) -> str:
    host, separator, port = value.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:8080")
    return value


def check_servers(urls: str) -> str:
    """``urls``, where each can be one of a NATS server; the scheme may be left out. Raises ValueError."""
    for url in urls.split(","):
        scheme, separator, rest = url.strip().rpartition("://")
        if not rest or (separator and scheme not in _SCHEMES):
            raise ValueError("must be URLs of NATS servers (nats, tls, ws, wss), such as nats://127.0.0.1:4222")
    return urls


def check_file(path: str) -> str:
    """``path``, where a file is there. Raises ValueError."""
    if not Path(path).is_file():
        raise ValueError("must be a file that is there")
    return path


def check_reply_prefix(value: str) -> str:
    """``value``, where it is a prefix of subjects that anybody may write to. Raises ValueError."""
    if not value or any(char in value for char in " *>") or not value.isascii() or not value.isprintable():
        raise ValueError("must be a literal subject prefix, such as _INBOX.")
    if value.startswith(("$", "durable_timer.", "triggers.")):
        raise ValueError("must not reach subjects that only the service may write")
    return value


def split_address(value: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; brackets round an IPv6 host are taken off."""
    host, _, port = value.rpartition(":")
    return host.strip("[]"), int(port)


Servers = Annotated[str, AfterValidator(check_servers)]
Address = Annotated[str, AfterValidator(_host_and_port)]
Bytes = Annotated[int, Field(ge=16 * 1024, le=2**50)]


class Settings(BaseSettings):
    """What ``durable-timer serve`` runs with. Every value is checked before anything is connected."""

    model_config = SettingsConfigDict(
        env_prefix="DURABLE_TIMER_", extra="ignore", env_ignore_empty=True, populate_by_name=True
    )

    nats: Annotated[
        Servers,
        Field(validation_alias="DURABLE_TIMER_NATS_URL", description="URLs of NATS servers, with commas"),
    ] = DEFAULT_NATS_URL
    creds: Annotated[
        Annotated[str, AfterValidator(check_file)] | None,
        Field(validation_alias="DURABLE_TIMER_NATS_CREDS", description="credentials file for NATS"),
    ] = None
    http: Annotated[Address, Field(description="HOST:PORT for /healthz, /readyz and /metrics")] = "127.0.0.1:8080"
    instance: Annotated[
        str, Field(min_length=1, max_length=128, description="name of this process; one runs under a name")
    ] = socket.gethostname()
    driver: Annotated[Literal["heap", "native"], Field(description="who waits: heap (ours), or native (NATS)")] = "heap"
    test_clock: Annotated[bool, Field(description="serve /debug/clock, which shifts time forward")] = False
    provision: Annotated[bool, Field(description="create missing resources at the start")] = True

    reply_prefix: Annotated[
        str, AfterValidator(check_reply_prefix), Field(description="subjects that outcomes may go to begin so")
    ] = "_INBOX."
    admission_watermark_percent: Annotated[
        int, Field(ge=1, le=99, description="percent full from which starts are held")
    ] = 50
    inline_payload_max_bytes: Annotated[
        int, Field(ge=0, le=256 * 1024, description="bytes up to which a payload travels in the state")
    ] = 1024

    replicas: Annotated[int, Field(ge=1, le=5, description="replicas of each stream")] = 1
    state_max_bytes: Annotated[Bytes, Field(description="bytes for the state bucket")] = 1024 * MIB
    snapshots_max_bytes: Annotated[Bytes, Field(description="bytes for large payloads")] = 1024 * MIB
    commands_max_bytes: Annotated[Bytes, Field(description="bytes for queued commands")] = 1024 * MIB
    resumes_max_bytes: Annotated[Bytes, Field(description="bytes for resumes not yet read")] = 1024 * MIB
    terminals_max_bytes: Annotated[Bytes, Field(description="bytes for the archive of ended timers")] = 2048 * MIB

    resume_timeout_ms: Annotated[
        int,
        Field(ge=100, le=86_400_000, description="ms without an answer until a resume is published again"),
    ] = 60_000
    reconcile_interval_ms: Annotated[int, Field(ge=100, le=86_400_000, description="ms between scans of all state")] = (
        3_600_000
    )
    policy_check_interval_ms: Annotated[
        int, Field(ge=100, le=30_000, description="ms between checks of the broker's resources")
    ] = 10_000
    request_timeout_ms: Annotated[
        int, Field(ge=100, le=60_000, description="ms until a missing reply of the broker counts as lost")
    ] = 5_000
    drain_grace_ms: Annotated[int, Field(ge=0, le=600_000, description="ms that work in flight gets at the end")] = (
        10_000
    )

    tombstone_ttl_s: Annotated[int, Field(ge=1, le=31_536_000, description="s that removal markers stay")] = 3_600
    archive_max_age_s: Annotated[
        int, Field(ge=1, le=3_155_760_000, description="s that ended timers are remembered")
    ] = 90 * 86_400
    snapshot_grace_ms: Annotated[
        int,
        Field(ge=100, le=86_400_000, description="ms until a payload that nothing refers to is removed"),
    ] = 600_000

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            replicas=self.replicas,
            state_bytes=self.state_max_bytes,
            snapshots_bytes=self.snapshots_max_bytes,
            commands_bytes=self.commands_max_bytes,
            resumes_bytes=self.resumes_max_bytes,
            terminals_bytes=self.terminals_max_bytes,
            archive_max_age_s=self.archive_max_age_s,
        )
