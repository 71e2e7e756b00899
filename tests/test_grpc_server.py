"""The life of a server as a process of its own, on a scripted engine: addresses, signals, exit codes."""

import json
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specserve.proto import specserve_pb2 as pb
from specserve.proto import specserve_pb2_grpc
from specserve.server.listen import ListenError, check_tcp, check_unix

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


class Process:
    """A server; its log is gathered in a file."""

    def __init__(self, folder: Path, options: dict) -> None:
        self.log_file = folder / f"log{time.monotonic_ns()}"
        with self.log_file.open("w") as log:
            self.popen = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "server_helpers.py"), json.dumps(options)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_ready(self) -> str:
        """The address in the line that it prints when it is ready."""
        assert self.popen.stdout is not None
        assert select.select([self.popen.stdout], [], [], 30)[0], self.log
        return self.popen.stdout.readline().removeprefix("ready ").strip()

    def wait_listening(self) -> str:
        """The address in its log, where it is as soon as it listens."""
        end = time.monotonic() + 30
        while "listening on " not in self.log:
            assert time.monotonic() < end and self.popen.poll() is None, self.log
            time.sleep(0.02)
        return self.log.split("listening on ")[1].split(";")[0]

    def exit_code(self, seconds: float = 10) -> int:
        return self.popen.wait(seconds)


@pytest.fixture
def start(tmp_path):
    processes = []

    def start(**options) -> Process:
        processes.append(Process(tmp_path, options))
        return processes[-1]

    yield start
    for process in processes:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait()
        process.popen.stdout.close()


@pytest.fixture
def connect():
    channels = []

    def connect(address: str) -> tuple:
        channels.append(grpc.insecure_channel(address))
        return specserve_pb2_grpc.TextGenerationStub(channels[-1]), health_pb2_grpc.HealthStub(channels[-1])

    yield connect
    for channel in channels:
        channel.close()


def prompt() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="the é")


def check(health) -> int:
    return health.Check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True).status


def code_of(call) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


def held_port(address: str = "127.0.0.1") -> socket.socket:
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen()
    return listener


def test_port_zero_tells_the_real_port(start, connect, server_helpers):
    process = start()
    address = process.wait_ready()
    assert address.startswith("127.0.0.1:") and not address.endswith(":0")
    stub, health = connect(address)
    assert check(health) == SERVING  # as soon as it says so
    assert stub.Generate(prompt(), timeout=10).text == server_helpers.TEXT


@pytest.mark.parametrize("hostname", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_used_port_ends_it_before_the_model_is_loaded(start, hostname):
    with held_port() as listener:
        port = listener.getsockname()[1]
        process = start(port=port, hostname=hostname, load_s=60)
        assert process.exit_code() == 1
        (line,) = process.log.splitlines()
        assert f"{hostname}:{port}" in line and "address already in use" in line


def test_a_second_server_on_the_same_port_ends_and_the_first_goes_on(start, connect, server_helpers):
    address = start().wait_ready()
    second = start(port=int(address.rpartition(":")[2]), load_s=60)
    assert second.exit_code() == 1
    assert len(second.log.splitlines()) == 1
    assert connect(address)[0].Generate(prompt(), timeout=10).text == server_helpers.TEXT


def test_unix_socket(start, connect, server_helpers, tmp_path):
    path = tmp_path / "s"
    process = start(unix_socket=str(path))
    tcp, _, unix = process.wait_ready().partition(" and ")
    assert unix == f"unix:{path}"
    for address in (tcp, unix):
        assert connect(address)[0].Generate(prompt(), timeout=10).text == server_helpers.TEXT
    second = start(unix_socket=str(path), load_s=60)
    assert second.exit_code() == 1
    assert str(path) in second.log and "another server does" in second.log
    assert connect(unix)[0].Generate(prompt(), timeout=10).text == server_helpers.TEXT
    process.popen.terminate()
    assert process.exit_code() == 0
    assert not path.exists()


def test_unix_socket_that_a_crash_left_is_replaced(start, connect, server_helpers, tmp_path):
    path = tmp_path / "s"
    first = start(unix_socket=str(path))
    first.wait_ready()
    first.popen.kill()
    first.exit_code()
    assert path.exists()
    start(unix_socket=str(path)).wait_ready()
    assert connect(f"unix:{path}")[0].Generate(prompt(), timeout=10).text == server_helpers.TEXT


def test_listen_errors(tmp_path):
    with pytest.raises(ListenError, match=r"no\.such\.host\.invalid:1 .*does not resolve"):
        check_tcp("no.such.host.invalid", 1)
    with pytest.raises(ListenError, match=r"192\.0\.2\.1:0 .*cannot assign requested address"):
        check_tcp("192.0.2.1", 0)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ListenError, match=r"file \(--unix-socket\): there is a file which is not a socket"):
        check_unix(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(ListenError, match="its directory is missing"):
        check_unix(tmp_path / "none" / "s")


def test_a_port_in_use_on_one_address_of_a_name(monkeypatch):
    with held_port("127.0.0.2") as listener:
        port = listener.getsockname()[1]
        infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.1", "127.0.0.2")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: infos)
        with pytest.raises(ListenError, match="address already in use"):
            check_tcp("both", port)


def test_health_while_loading_and_after(start, connect):
    process = start(load_s=1.5)
    stub, health = connect(process.wait_listening())
    assert check(health) == NOT_SERVING
    assert code_of(lambda: stub.Generate(prompt(), timeout=5)) == grpc.StatusCode.UNAVAILABLE
    process.wait_ready()
    assert check(health) == SERVING
    assert stub.Generate(prompt(), timeout=10).text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading(start, number):
    process = start(load_s=60)
    process.wait_listening()
    process.popen.send_signal(number)
    assert process.exit_code(5) == 0
    assert "Traceback" not in process.log


def test_errors_of_loading(start):
    process = start(check_error=True)
    assert process.exit_code() == 1
    assert "no such model: nowhere/at-all" in process.log and "Traceback" not in process.log
    assert "listening on" not in process.log  # found before the port opens
    process = start(build_error="model")
    assert process.exit_code() == 1
    assert "no such model: nowhere/nothing" in process.log and "Traceback" not in process.log
    process = start(build_error="bug")
    assert process.exit_code() == 1
    assert "RuntimeError: a bug" in process.log and "Traceback" in process.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_drain_lets_streams_finish(start, connect, server_helpers, number):
    process = start(step_s=0.1)  # 14 events
    stub, health = connect(process.wait_ready())
    stream = stub.GenerateStream(prompt(), timeout=20)
    texts = [next(stream).text]
    process.popen.send_signal(number)
    while check(health) == SERVING:
        texts.append(next(stream).text)
        assert len(texts) < 4, "health must change at once"
    assert code_of(lambda: stub.Generate(prompt(), timeout=5)) == grpc.StatusCode.UNAVAILABLE
    assert stub.Info(pb.InfoRequest(), timeout=5).running_requests == 1
    texts.extend(event.text for event in stream)
    assert "".join(texts) == server_helpers.TEXT
    assert process.exit_code(5) == 0
    assert "Traceback" not in process.log


def test_drain_timeout_ends_streams_unavailable(start, connect):
    process = start(step_s=0.5, drain_timeout_s=0.7)
    stub, _ = connect(process.wait_ready())
    stream = stub.GenerateStream(prompt(), timeout=20)
    next(stream)
    process.popen.terminate()
    start_time = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "--drain-timeout" in caught.value.details()
    assert 0.5 < time.monotonic() - start_time < 4
    assert process.exit_code(5) == 0


def test_a_second_signal_ends_at_once(start, connect):
    process = start(step_s=2, drain_timeout_s=60)
    stub, _ = connect(process.wait_ready())
    stream = stub.GenerateStream(prompt(), timeout=60)
    next(stream)
    process.popen.terminate()
    while "shutting down" not in process.log:
        time.sleep(0.02)
    process.popen.terminate()
    assert code_of(lambda: list(stream)) == grpc.StatusCode.UNAVAILABLE
    assert process.exit_code(5) == 128 + signal.SIGTERM


def test_an_idle_server_ends_quickly(start, connect):
    process = start(drain_timeout_s=60)
    _, health = connect(process.wait_ready())
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == SERVING
    process.popen.terminate()
    assert next(watch).status == NOT_SERVING
    assert process.exit_code(5) == 0


def test_death_of_the_engine(start, connect):
    process = start(die_after_s=0.5)
    _, health = connect(process.wait_ready())
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == SERVING
    assert next(watch).status == NOT_SERVING
    assert process.exit_code(10) == 1
    assert "the engine has failed" in process.log and "broken step" in process.log
