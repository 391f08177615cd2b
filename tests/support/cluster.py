"""Three real nats-servers that form a cluster, of which tests may kill one at a time."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from tests.support.broker import Broker
from timer_service.embedded import free_port

_PATIENCE_S = 30.0
_POLL_S = 0.05


class Cluster:
    """Nodes 0, 1 and 2 on loopback, each with a store of its own under ``folder``; see ``Broker`` for one node."""

    def __init__(self, folder: Path, *, extra_config: str = "", sync_interval: str = "1s") -> None:
        with _reserved(6) as ports:
            routes, self._monitors = ports[:3], ports[3:]
        self.nodes = [
            Broker(
                folder / f"node{n}",
                sync_interval=sync_interval,
                extra_config=_clustered(n, routes, self._monitors[n]) + extra_config,
            )
            for n in range(3)
        ]

    @property
    def url(self) -> str:
        """All three, separated by commas: where one of them is away a client goes to the next."""
        return ",".join(node.url for node in self.nodes)

    def start(self) -> None:
        """Start what does not run, and wait until one leads and the others have caught up."""
        for node in self.nodes:
            node.start()
        self.await_leader()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def kill(self, n: int) -> None:
        """End one node at once."""
        self.nodes[n].kill()

    def restart(self, n: int) -> None:
        """Start one node again and wait until it has caught up."""
        self.nodes[n].start()
        self.await_leader()

    def await_leader(self) -> str:
        """Wait until all running nodes name the same leader of the cluster and are healthy; returns its name."""
        return str(_until(self._leader, "a leader of the cluster"))

    def await_stream_leaders(self, streams: list[str]) -> None:
        """Wait until every one of ``streams`` has a leader, and its other replicas have caught up."""
        _until(lambda: all(self._led(stream) for stream in streams), f"leaders of {', '.join(streams)}")

    def leader_of(self, stream: str) -> int:
        """Which node leads a stream."""
        return int(str(_until(lambda: self._led(stream), f"a leader of {stream}"))[len("node") :])

    def _leader(self) -> str | None:
        seen = set()
        for n, node in enumerate(self.nodes):
            if not node.running:
                continue
            meta = self._ask(n, "/jsz").get("meta_cluster", {})
            healthy = self._ask(n, "/healthz").get("status") == "ok"
            seen.add(meta.get("leader") if healthy and meta.get("cluster_size") == len(self.nodes) else None)
        return seen.pop() if len(seen) == 1 else None

    def _led(self, stream: str) -> str | None:
        for n, node in enumerate(self.nodes):
            if not node.running:
                continue
            found = self._ask(n, "/jsz?streams=true&accounts=true").get("account_details", [])
            details = [one for account in found for one in account.get("stream_detail", ()) if one["name"] == stream]
            for detail in details:
                cluster = detail.get("cluster", {})
                if cluster.get("leader") == f"node{n}":
                    others = [one for one in cluster.get("replicas", ()) if not one.get("offline")]
                    return str(cluster["leader"]) if all(one["current"] for one in others) else None
        return None

    def _ask(self, n: int, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._monitors[n]}{path}", timeout=20) as answer:
                return dict(json.loads(answer.read()))
        except OSError:  # HTTPError among them: /healthz says 503 until it has caught up
            return {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _clustered(n: int, routes: list[int], monitor: int) -> str:
    others = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
    return f"""
server_name: node{n}
http: "127.0.0.1:{monitor}"
cluster {{ name: test, listen: "127.0.0.1:{routes[n]}", routes: [{others}] }}
"""


def _until(look: Any, what: str) -> Any:
    deadline = time.monotonic() + _PATIENCE_S
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {_PATIENCE_S:g} s: {what}"
        time.sleep(_POLL_S)
    return seen


class _reserved:  # noqa: N801  (reads as a function)
    """So many different free ports, kept from others until the block ends."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._stack = ExitStack()

    def __enter__(self) -> list[int]:
        ports: list[int] = []
        while len(ports) < self._count:
            port = free_port()
            holder = self._stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                holder.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
        return ports

    def __exit__(self, *_: object) -> None:
        self._stack.close()
