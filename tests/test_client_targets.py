"""Where both clients connect to: several targets, health, names, TLS (`connect` makes each client in turn)."""

import socket
import threading
import time
from pathlib import Path

import grpc
import pytest

from specserve.router_client.errors import SpecserveError
from specserve.router_client.retry import RetryPolicy
from specserve.router_client.types import HealthStatus

PEM = (Path(__file__).parent / "data" / "loopback_tls.pem").read_text()
TEXT = "Grüße 🤗 an\nalle"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def failure_of(call, *args, **kwargs) -> SpecserveError:
    with pytest.raises(SpecserveError) as caught:
        call(*args, **kwargs)
    return caught.value


def served_by(client, servers, num_calls: int) -> list[int]:
    before = [server.num_calls for server in servers]
    for _ in range(num_calls):
        client.generate("x")
    return [server.num_calls - count for server, count in zip(servers, before, strict=True)]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["ipv4", "unix", "localhost"])
def test_several_targets_take_turns(fake_server, connect, tmp_path, kind):
    addresses = [f"unix:{tmp_path}/{name}.sock" if kind == "unix" else "127.0.0.1:0" for name in "abc"]
    servers = [fake_server(address) for address in addresses]
    targets = [server.target for server in servers]
    client = connect([name.replace("127.0.0.1", "localhost") if kind == "localhost" else name for name in targets])
    wait_until(lambda: all(served_by(client, servers, 3)))
    assert served_by(client, servers, 12) == [4, 4, 4]


def test_a_target_that_is_down_gets_nothing(fake_server, connect):
    servers = [fake_server(), fake_server()]
    client = connect([server.target for server in servers], retry=RetryPolicy(max_attempts=1))
    client.wait_until_ready(10)
    servers[0].stop()
    wait_until(lambda: client.health() is HealthStatus.SERVING)
    time.sleep(0.2)
    assert served_by(client, servers, 8) == [0, 8]


def test_a_draining_target_keeps_its_streams_and_gets_no_calls(fake_server, connect):
    servers = [fake_server(), fake_server()]
    client = connect([server.target for server in servers])
    wait_until(lambda: all(served_by(client, servers, 2)))
    for server in servers:
        server.hold_after = 1
    streams = [client.stream("x"), client.stream("y")]
    firsts = [next(stream).text for stream in streams]
    assert firsts == ["Grüße", "Grüße"] and all(server.num_calls for server in servers)
    servers[0].set_serving(False)
    wait_until(lambda: served_by(client, servers, 2) == [0, 2])
    assert served_by(client, servers, 6) == [0, 6]
    for server in servers:
        server.released.set()
    assert ["".join(event.text for event in stream) for stream in streams] == [" 🤗 an\nalle"] * 2
    servers[0].set_serving(True)
    wait_until(lambda: all(served_by(client, servers, 2)))


def test_a_draining_server_still_says_how_it_is(fake_server, connect):
    server = fake_server()
    client = connect(server.target)
    assert client.health() is HealthStatus.SERVING
    client.generate("x")
    server.set_serving(False)
    wait_until(lambda: client.health() is HealthStatus.NOT_SERVING)
    assert failure_of(client.generate, "x").code is UNAVAILABLE
    assert client.info().model_id == "fake"


def test_nobody_there(connect):
    client = connect("127.0.0.1:9")
    assert failure_of(client.health).code is UNAVAILABLE
    error = failure_of(client.wait_until_ready, 0.3)
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "ipv4:127.0.0.1:9" in error.message and "refused" in error.message


def test_a_port_that_never_answers(connect):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = connect(f"127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        assert failure_of(client.wait_until_ready, 0.3).message.startswith("no server at")
        assert time.monotonic() - start < 10  # gRPC itself would wait for 20 s
        assert failure_of(client.info, timeout_s=0.3).code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_wait_until_ready(fake_server, connect):
    server = fake_server()
    server.set_serving(False)
    client = connect(server.target)
    assert failure_of(client.wait_until_ready, 0.3).code is grpc.StatusCode.DEADLINE_EXCEEDED
    unwatched = connect(server.target, options=[("grpc.service_config", "{}")])
    assert failure_of(unwatched.wait_until_ready, 0.3).message.endswith("not_serving")
    threading.Timer(0.3, server.set_serving, (True,)).start()
    client.wait_until_ready(10)
    assert client.generate("x").text == TEXT


def test_a_server_that_comes_late_is_found(fake_server, connect, tmp_path):
    address = f"unix:{tmp_path}/late.sock"
    client = connect(address)
    threading.Timer(0.4, fake_server, (address,)).start()
    client.wait_until_ready(15)
    assert client.generate("x").text == TEXT


@pytest.mark.parametrize("host", ["dns:///localhost", "localhost", "127.0.0.1", "ipv4:127.0.0.1"])
def test_names_of_one_target(fake_server, connect, host):
    port = fake_server().target.rpartition(":")[2]
    assert connect(f"{host}:{port}").generate("x").text == TEXT


def test_tls(fake_server, connect):
    key, certificate = PEM.encode().split(b"-----BEGIN CERT")
    certificate = b"-----BEGIN CERT" + certificate
    server = fake_server(credentials=grpc.ssl_server_credentials([(key, certificate)]))
    trusting = connect(server.target, credentials=grpc.ssl_channel_credentials(certificate))
    assert "".join(event.text for event in trusting.stream("x")) == TEXT
    assert failure_of(connect(server.target, credentials=grpc.ssl_channel_credentials()).generate, "x")
    assert failure_of(connect(server.target).generate, "x", timeout_s=3)


def test_own_channel_options_come_last(fake_server, connect):
    server = fake_server()
    server.events[0].text = "x" * 2000
    client = connect(server.target, options=[("grpc.max_receive_message_length", 1000)])
    assert failure_of(client.generate, "x").code is grpc.StatusCode.RESOURCE_EXHAUSTED
