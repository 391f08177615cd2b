"""The embedded broker keeps its port and its data, and tells plainly why it cannot run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeoutError

from tests.support.broker import Broker
from timer_service.embedded import (
    DataDirInUse,
    EmbeddedBroker,
    EmbeddedServerError,
    EmbeddedServerMissing,
    find_nats_server,
)


async def connect(broker: EmbeddedBroker) -> Client:
    return await nats.connect(broker.url, connect_timeout=20, max_reconnect_attempts=0)


async def put(broker: EmbeddedBroker, text: bytes) -> None:
    client = await connect(broker)
    await client.jetstream().add_stream(name="KEPT", subjects=["kept"], storage="file")
    await client.jetstream().publish("kept", text)
    await client.close()


async def get(broker: EmbeddedBroker) -> bytes | None:
    client = await connect(broker)
    message = await client.jetstream().get_last_msg("KEPT", "kept")
    await client.close()
    return message.data


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_comes_back_on_the_same_port_with_what_it_had(broker: Broker, end: str) -> None:
    port = broker.port
    await put(broker, b"still here")

    getattr(broker, end)()
    assert not broker.running
    broker.start()

    assert broker.port == port
    assert await get(broker) == b"still here"


async def test_another_object_on_the_same_folder_finds_the_data(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "nats") as first:
        await put(first, b"kept in the folder")
    with EmbeddedBroker(tmp_path / "nats") as second:
        assert await get(second) == b"kept in the folder"


async def test_a_frozen_broker_answers_again_when_it_goes_on(broker: Broker) -> None:
    client = await connect(broker)
    # Not flush(): in nats-py 2.16 the late answer to a flush that timed out breaks the connection.
    with broker.paused(), pytest.raises(NatsTimeoutError):
        await client.request("$JS.API.INFO", timeout=0.3)
    answer = await client.request("$JS.API.INFO", timeout=10)
    assert b"account_info_response" in answer.data
    await client.close()


def test_a_frozen_broker_can_be_stopped(broker: Broker) -> None:
    broker.pause()
    broker.stop()
    assert not broker.running


def test_stopping_twice_and_starting_twice_do_nothing(broker: Broker) -> None:
    pid = broker.pid
    broker.start()
    assert broker.pid == pid
    broker.stop()
    broker.stop()
    broker.kill()
    assert broker.pid is None


def test_a_folder_in_use_is_refused(broker: Broker) -> None:
    with pytest.raises(DataDirInUse, match="another nats-server"):
        EmbeddedBroker(broker.data_dir).start()


def test_a_folder_stays_in_use_while_a_server_outlives_its_owner(tmp_path: Path) -> None:
    # The owner is a process that ends without stopping its broker, and prints the broker's process id.
    owner = (
        "import os, sys; from timer_service.embedded import EmbeddedBroker; b = EmbeddedBroker(sys.argv[1]); "
        "b.start(); print(b.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", owner, tmp_path], stdout=subprocess.PIPE, text=True, check=True)
    left_over = int(done.stdout)
    try:
        with pytest.raises(DataDirInUse):
            EmbeddedBroker(tmp_path).start()
    finally:
        os.kill(left_over, signal.SIGKILL)


def test_a_port_in_use_is_reported_with_the_servers_own_words(broker: Broker, tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="address already in use"):
        EmbeddedBroker(tmp_path / "other", port=broker.port).start()


def test_a_bad_configuration_is_reported_with_the_servers_own_words(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="no_such_option"):
        EmbeddedBroker(tmp_path, extra_config="no_such_option: 1").start()


def test_a_missing_server_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedServerMissing, match=r"durable-timer\[server\]"):
        find_nats_server()


async def test_the_shared_broker_is_one_for_all(shared_broker: Broker) -> None:
    client = await connect(shared_broker)
    assert client.is_connected
    await client.close()
