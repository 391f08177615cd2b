"""The limit: acknowledged messages a second that this box stores for a client that does nothing else.

Run as a program it prints one JSON object: `python -m benchmarks.limit --nats URL --seconds 3`.
"""

import argparse
import asyncio
import json
import time

from benchmarks.bare import BareClient, BareError

MESSAGE_BYTES = 600
IN_FLIGHT = 256
_STREAM = "BENCH_LIMIT"
_SUBJECT = b"bench.limit"
_WARM_UP_S = 0.5


class LimitPublisher:
    """Keeps `IN_FLIGHT` publishes open: each acknowledgement sends the next message."""

    def __init__(self, client: BareClient) -> None:
        self._client = client
        self._reply = f"{client.inbox}.a".encode()
        self._body = b"x" * MESSAGE_BYTES
        self.acked = 0

    def start(self) -> None:
        """Fill the window; from then on it runs by itself until the connection closes."""
        self._client.subscribe(self._reply.decode(), self._on_ack)
        for _ in range(IN_FLIGHT):
            self._client.publish(_SUBJECT, self._body, self._reply)

    def _on_ack(self, _subject: bytes, _reply: bytes, _header: bytes, body: bytes) -> None:
        if b'"seq"' not in body:
            raise BareError(f"not stored: {body.decode()}")
        self.acked += 1
        self._client.publish(_SUBJECT, self._body, self._reply)


async def measure_limit(url: str, seconds: float) -> dict[str, float]:
    """Publish for `seconds` after a warm-up into a file stream that drops its oldest messages."""
    client = await BareClient.connect(url)
    config = {"name": _STREAM, "subjects": [_SUBJECT.decode()], "storage": "file", "max_bytes": 1 << 30}
    await client.request(f"$JS.API.STREAM.CREATE.{_STREAM}", config)
    publisher = LimitPublisher(client)
    publisher.start()
    await asyncio.sleep(_WARM_UP_S)
    begun, acked, cpu = time.perf_counter(), publisher.acked, time.process_time()
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - begun
    client.check()
    result = {
        "acked_per_s": (publisher.acked - acked) / elapsed,
        "client_cpu_share": (time.process_time() - cpu) / elapsed,
    }
    client.close()
    return result


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="acknowledged messages per second through a bare client")
    parser.add_argument("--nats", required=True, metavar="URL")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure_limit(options.nats, options.seconds))))


if __name__ == "__main__":
    main()
