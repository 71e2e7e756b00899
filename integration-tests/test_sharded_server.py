"""Servers of several ranks as processes: answers, ends, faults. Within ten seconds of a fault everything has ended."""

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import grpc
import pytest
from mixed import FIXED, LOCAL, answer_all, mixed_requests, outside
from processes import ServerProcess, children, is_running, rank_pids, wait_gone

from specserve.router_client.client import Client
from specserve.router_client.errors import SpecserveError

LIMIT_S = 10.0
LONG = {"max_new_tokens": 400, "ignore_eos": True}
FAULTY = Path(__file__).parent / "faulty_rank.py"


def open_streams(address, count):
    """Streams that have begun; call each result to get how it ended and when."""
    client = Client(address, timeout_s=120)
    ends, begun = [None] * count, threading.Semaphore(0)

    def read(index):
        error = None
        try:
            for number, _ in enumerate(client.stream(f"Story {index}:", **LONG)):
                if number == 2:
                    begun.release()
        except SpecserveError as caught:
            error = caught
        ends[index] = (error, time.monotonic())

    threads = [threading.Thread(target=read, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=60)

    def finish(seconds):
        for thread in threads:
            thread.join(seconds)
        client.close()
        return ends

    return finish


def assert_ended(server, pids, finish, started, *texts):
    """Every stream has ended with UNAVAILABLE and the cause, all processes are gone, within the limit."""
    for error, when in finish(LIMIT_S + 5):
        assert error is not None and error.code == grpc.StatusCode.UNAVAILABLE, error
        assert any(text in str(error) for text in texts), error
        assert when - started < LIMIT_S
    code = server.wait_exit(LIMIT_S + 5)
    wait_gone(pids, 1)
    assert time.monotonic() - started < LIMIT_S, server.output
    assert code not in (0, None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start_ranks(start_server):
    """start(*flags, ranks=2) -> (server, address, all its processes)."""
    known = []

    def start(*flags, ranks=2):
        server = start_server(*flags, "--num-shard", str(ranks))
        address = server.wait_ready()
        pids = [server.process.pid, *children(server.process.pid)]
        known.extend(pids)
        return server, address, pids

    yield start
    for pid in known:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def test_the_demo_model_over_two_ranks(demo, start_ranks):
    """Its 9 heads and 3 KV heads don't divide; the same answers with a speculator too."""
    jobs = mixed_requests(["A robot may not injure a human being", "1\n2\n3\n4", "def f(x):\n    return"], 17, 24)
    expected = [outside(answer)[:4] for answer in answer_all(demo, jobs, 4)]
    server, address, pids = start_ranks("--model-id", "demo", "--speculator", "mlp", *FIXED, *LOCAL)
    with Client(address, timeout_s=120) as client:
        answers = answer_all(client, jobs, 4)
        info = client.info()
    assert [outside(answer)[:4] for answer in answers] == expected
    assert info.num_shard == 2 and sum(answer.summary.accepted_tokens for answer in answers) > 20
    assert server.output.count("specserve is ready") == 1 and server.output.count("listening on") == 1
    server.terminate()
    assert server.wait_exit(20) == 0
    wait_gone(pids, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_once_and_ends_all_ranks(number, tiny_model, start_ranks):
    server, address, pids = start_ranks("--model-id", str(tiny_model), *LOCAL)
    with Client(address, timeout_s=60) as client:
        stream = client.stream("Once", **LONG)
        first = [next(stream) for _ in range(3)]
        server.terminate(number)
        tokens = [token for event in (*first, *stream) for token in event.token_ids]
    assert len(tokens) == LONG["max_new_tokens"]
    assert server.wait_exit(20) == 0
    wait_gone(pids, 1)
    assert server.output.count("shutting down") == 1 and "Traceback" not in server.output


def test_a_second_signal_ends_at_once(tiny_model, start_ranks):
    server, address, pids = start_ranks("--model-id", str(tiny_model), *LOCAL[:4], "--drain-timeout", "100")
    finish = open_streams(address, 1)
    server.terminate()
    time.sleep(0.3)
    server.terminate()
    assert server.wait_exit(LIMIT_S) == 128 + signal.SIGTERM
    wait_gone(pids, 1)
    assert finish(5)[0][0].code == grpc.StatusCode.UNAVAILABLE


def test_a_signal_while_loading_ends_all_ranks(start_server):
    server = start_server("--model-id", "demo", *LOCAL, "--num-shard", "2")
    deadline = time.monotonic() + 60
    while not any("listening on" in line for line in server.lines):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pids = children(server.process.pid)
    assert len(pids) >= 2
    server.terminate()
    assert server.wait_exit(LIMIT_S) == 0
    wait_gone(pids, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_everything_and_a_restart_works(rank, tiny_model, start_ranks):
    port = free_port()
    flags = ("--model-id", str(tiny_model), "--hostname", "127.0.0.1", "--drain-timeout", "60", "--port", str(port))
    before = set(Path("/dev/shm").iterdir())
    server, address, pids = start_ranks(*flags)
    finish = open_streams(address, 4)
    started = time.monotonic()
    os.kill(rank_pids(server.process.pid)[rank], signal.SIGKILL)
    texts = ("rank 1",) if rank == 1 else ("",)  # a server that is gone says nothing
    assert_ended(server, pids, finish, started, *texts)
    assert set(Path("/dev/shm").iterdir()) <= before
    _, address, _ = start_ranks(*flags)
    with Client(address, timeout_s=60) as client:
        assert len(client.generate("Once", max_new_tokens=5, ignore_eos=True).token_ids) == 5


def test_a_killed_rank_while_idle_or_launcher_ends_everything(tiny_model, start_ranks):
    for victim in ("rank 1", "launcher"):
        server, _, pids = start_ranks("--model-id", str(tiny_model), *LOCAL)
        started = time.monotonic()
        os.kill(server.process.pid if victim == "launcher" else rank_pids(server.process.pid)[1], signal.SIGKILL)
        assert server.wait_exit(LIMIT_S) != 0
        wait_gone(pids, LIMIT_S - (time.monotonic() - started))


@pytest.fixture
def torchrun():
    """run(*arguments) -> a ServerProcess-like launcher of torch, ended with the test and all below it."""
    started = []

    def run(*arguments, env=None):
        started.append(ServerProcess(*arguments, env=env, module=["torch.distributed.run"]))
        return started[-1]

    yield run
    for launcher in started:
        pids = [launcher.process.pid, *children(launcher.process.pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.process.wait()


@pytest.mark.parametrize("fault", ["raise", "hang", "freeze"])
def test_a_rank_that_breaks_in_a_forward(fault, tiny_model, torchrun):
    flags = ("serve", "--model-id", str(tiny_model), *LOCAL, "--rank-timeout", "4")
    server = torchrun("--standalone", "--nproc-per-node", "2", str(FAULTY), fault, *flags)
    address = server.wait_ready()
    pids = rank_pids(server.process.pid)
    client = Client(address, timeout_s=60)
    started = time.monotonic()
    with pytest.raises(SpecserveError) as caught:
        list(client.stream("Once", **LONG))
    assert time.monotonic() - started < LIMIT_S
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE
    expected = {"raise": "injected: no more memory", "hang": "rank 1 is behind", "freeze": "rank 1"}[fault]
    assert expected in str(caught.value)
    wait_gone([pids[0]], LIMIT_S - (time.monotonic() - started))
    if fault != "freeze":  # that process can't do anything; torchrun kills it after its own time
        wait_gone(pids.values(), LIMIT_S - (time.monotonic() - started))
        assert server.wait_exit(10) != 0


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_hosts_of_one_rank_each(rendezvous, plain_tiny, tiny_model, torchrun):
    """Two loopback addresses stand for two hosts."""
    jobs = mixed_requests(["A robot may not", "def f(x):"], 17, 24)
    expected = [outside(answer)[:4] for answer in answer_all(plain_tiny, jobs, 4)]
    port = str(free_port())
    hosts = []
    for number in range(2):
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test")
        if rendezvous == "static":
            meeting = ("--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", port)
        where = ("--nnodes", "2", "--nproc-per-node", "1", "--local-addr", f"127.0.0.{number + 1}", *meeting)
        flags = ("--model-id", str(tiny_model), "--max-total-tokens", "512", *LOCAL)
        hosts.append(torchrun(*where, "-m", "specserve.server", "serve", *flags))
    deadline = time.monotonic() + 120
    while not any("is ready" in host.output for host in hosts):
        assert time.monotonic() < deadline and all(host.process.poll() is None for host in hosts), [
            host.output for host in hosts
        ]
        time.sleep(0.1)
    first = next(host for host in hosts if "is ready" in host.output)
    assert rendezvous == "c10d" or first is hosts[0]
    with Client(first.wait_ready(), timeout_s=120) as client:
        answers = answer_all(client, jobs, 4)
        assert client.info().num_shard == 2
    assert [outside(answer)[:4] for answer in answers] == expected
    pids = [pid for host in hosts for pid in rank_pids(host.process.pid).values()]
    assert len(pids) == 2
    first.terminate()
    wait_gone(pids, 20)  # the launchers, which are torch's, may wait for each other for minutes


def test_ranks_that_differ_are_refused_with_both_values(tiny_model, start_server, tmp_path):
    """Two processes with flags of their own, as on two hosts."""
    port = free_port()
    servers = []
    for rank, dtype in enumerate(("float32", "bfloat16")):
        env = {
            **os.environ,
            "TORCHELASTIC_RUN_ID": "test",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        flags = ("--model-id", str(tiny_model), "--dtype", dtype, "--attention-backend", "torch", *LOCAL)
        servers.append(start_server(*flags, env=env))
    assert [server.wait_exit(60) for server in servers] == [2, 1]
    assert "the shards differ: --dtype is 'float32' on rank 0 and 'bfloat16' on rank 1" in servers[0].output
    assert not any("Traceback" in server.output or "is ready" in server.output for server in servers)


def test_num_shard_and_the_number_of_processes_must_agree(tiny_model, torchrun):
    where = ("--standalone", "--nproc-per-node", "2", "-m", "specserve.server", "serve")
    server = torchrun(*where, "--model-id", str(tiny_model), "--num-shard", "3", *LOCAL)
    assert server.wait_exit(60) != 0
    assert "--num-shard is 3, but 2 processes were started; leave it out" in server.output
