"""Settings of the notify consumer: one table for flags, environment (``NOTIFY_CONSUMER_…``), defaults and limits."""

from __future__ import annotations

import re
import socket
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from notify_consumer.errors import BadSetting
from notify_consumer.outbox import FORMS, check_outbox
from notify_consumer.policy import Policy
from timer_service.client import DEFAULT_REPLY_PREFIX
from timer_service.config import DEFAULT_NATS_URL, Address, Servers, check_file, check_reply_prefix

DEFAULT_OUTBOX = "sqlite:notify-consumer.db"
DAY_MS = 86_400_000
WEEK_S = 7 * 86_400
_PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*)?")


def _place(text: str) -> str:
    if not _PLACE.fullmatch(text):
        raise ValueError("must be MODULE or MODULE:ATTRIBUTE, such as my_handlers:handlers")
    return text


def _outbox(url: str) -> str:
    try:
        check_outbox(url)
    except BadSetting as error:
        raise ValueError(str(error)) from None
    return url


class Settings(BaseSettings):
    """What ``notify-consumer serve`` runs with. Every value is checked before anything is connected."""

    model_config = SettingsConfigDict(
        env_prefix="NOTIFY_CONSUMER_", extra="ignore", env_ignore_empty=True, populate_by_name=True
    )

    nats: Annotated[
        Servers,
        Field(validation_alias="NOTIFY_CONSUMER_NATS_URL", description="URL of the NATS server or cluster"),
    ] = DEFAULT_NATS_URL
    creds: Annotated[
        Annotated[str, AfterValidator(check_file)] | None,
        Field(validation_alias="NOTIFY_CONSUMER_NATS_CREDS", description="credentials file for NATS"),
    ] = None
    http: Annotated[Address, Field(description="HOST:PORT for /healthz, /readyz and /metrics")] = "127.0.0.1:8081"
    instance: Annotated[
        str, Field(min_length=1, max_length=128, description="name of this process; one runs under a name")
    ] = socket.gethostname()
    handlers: Annotated[
        Annotated[str, AfterValidator(_place)] | None,
        Field(description="MODULE[:ATTRIBUTE] with the Handlers; the attribute is 'handlers' unless given; required"),
    ] = None
    outbox: Annotated[
        str, AfterValidator(_outbox), Field(description=f"where resumes are kept until they are settled: {FORMS}")
    ] = DEFAULT_OUTBOX

    lease_ms: Annotated[
        int, Field(ge=100, le=3_600_000, description="ms until what a dead process had claimed is taken up again")
    ] = 30_000
    backoff_initial_ms: Annotated[
        int, Field(ge=1, le=DAY_MS, description="ms until a failed hand-off is tried again; doubles each time")
    ] = 3_000
    backoff_max_ms: Annotated[int, Field(ge=1, le=DAY_MS, description="ms that the backoff grows to")] = 30_000
    max_attempts: Annotated[
        int | None, Field(ge=1, description="hand-offs of one resume before it is put aside as dead; none: no end")
    ] = None
    concurrency: Annotated[
        int, Field(ge=1, le=10_000, description="handlers running at a time; one flow alone takes up to half of them")
    ] = 32
    drain_grace_ms: Annotated[
        int, Field(ge=0, le=600_000, description="ms that running handlers get to finish after SIGTERM")
    ] = 10_000
    request_timeout_ms: Annotated[
        int, Field(ge=100, le=60_000, description="ms until a missing reply of the broker or outcome counts as lost")
    ] = 5_000
    reply_prefix: Annotated[
        str, AfterValidator(check_reply_prefix), Field(description="as REPLY_PREFIX of the timer service says")
    ] = DEFAULT_REPLY_PREFIX
    keep_done_s: Annotated[
        int,
        Field(
            ge=WEEK_S,
            le=1_577_880_000,
            description="s that settled resumes are remembered; at most half the age of the timer service's archive",
        ),
    ] = WEEK_S

    @field_validator("backoff_max_ms")
    @classmethod
    def _reaches_the_first(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("backoff_initial_ms", 0):
            raise ValueError("must not be less than backoff_initial_ms")
        return value

    @property
    def policy(self) -> Policy:
        return Policy(
            lease_ms=self.lease_ms,
            backoff_initial_ms=self.backoff_initial_ms,
            backoff_max_ms=self.backoff_max_ms,
            max_attempts=self.max_attempts,
            concurrency=self.concurrency,
            feedback_timeout_ms=self.request_timeout_ms,
            grace_ms=self.drain_grace_ms,
        )
