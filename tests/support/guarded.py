"""A broker with users, whose permissions and limits a test changes while it runs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.broker import Broker

_RELOAD_S = 10.0


class GuardedBroker(Broker):
    """Two users of one account: ``admin_url`` may do all, ``service_url`` all but what it was denied."""

    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self._accounts = data_dir / "accounts.conf"
        self._write((), (), None)
        super().__init__(data_dir, extra_config='include "./accounts.conf"')

    @property
    def service_url(self) -> str:
        return self.url.replace("//", "//service:pass@")

    @property
    def admin_url(self) -> str:
        return self.url.replace("//", "//admin:pass@")

    def allow(self, *, deny: Sequence[str] = (), deaf_to: Sequence[str] = (), max_file: str | None = None) -> None:
        """What the service may not publish and hear, and how much the account may store, from here on."""
        reloads = self._reloads()
        self._write(deny, deaf_to, max_file)
        self._signal(signal.SIGHUP)
        deadline = time.monotonic() + _RELOAD_S
        while self._reloads() == reloads:
            assert time.monotonic() < deadline, self.log_file.read_text()[-2_000:]
            time.sleep(0.01)

    def _reloads(self) -> int:
        return self.log_file.read_text().count("Reloaded server configuration")

    def _write(self, deny: Sequence[str], deaf_to: Sequence[str], max_file: str | None) -> None:
        jetstream = "enabled" if max_file is None else f"{{max_file: {max_file}}}"
        users = (
            "{user: admin, password: pass}, {user: service, password: pass, permissions: {"
            f"publish: {{deny: {json.dumps(list(deny))}}}, subscribe: {{deny: {json.dumps(list(deaf_to))}}}}}}}"
        )
        text = f"accounts: {{T: {{jetstream: {jetstream}, users: [{users}]}}}}\n"
        new = self._accounts.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self._accounts)
