"""The life of the server process: health, drain, signals, ports, bad files, bad flags."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import load_file, save_file

from specserve.router_client.client import Client
from specserve.router_client.errors import SpecserveError

LOCAL = ("--hostname", "127.0.0.1", "--port", "0", "--num-threads", "1")
SERVICE = "specserve.v1.TextGeneration"


def check(address, service=""):
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status


def test_health_is_serving_only_when_requests_are_answered(start_server, tiny_model):
    server = start_server("--model-id", str(tiny_model), *LOCAL)
    while not any("listening on" in line for line in server.lines):
        assert server.process.poll() is None, server.output
        time.sleep(0.01)
    line = next(line for line in server.lines if "listening on" in line)
    address = line.split("listening on ")[1].split(";")[0]
    seen = []
    while not seen or seen[-1] != health_pb2.HealthCheckResponse.SERVING:
        seen.append(check(address))
        time.sleep(0.01)
    assert seen[0] == health_pb2.HealthCheckResponse.NOT_SERVING
    with Client(address, timeout_s=30) as client:
        assert len(client.generate("x", max_new_tokens=2, ignore_eos=True).token_ids) == 2
    assert check(address, SERVICE) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as error:
        check(address, "nope")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_sigterm_drains_and_exits_0(start_server, tiny_model):
    server = start_server("--model-id", str(tiny_model), *LOCAL, "--drain-timeout", "30")
    address = server.wait_ready()
    with Client(address, timeout_s=60) as client, Client(address, timeout_s=5) as other:
        options = {"max_new_tokens": 1500, "ignore_eos": True}
        expected = other.generate("drain", **options, timeout_s=60)
        events = client.stream("drain", **options)
        ids = [i for _ in range(3) for i in next(events).token_ids]
        server.terminate()
        while check(address) == health_pb2.HealthCheckResponse.SERVING:
            time.sleep(0.01)
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(f"/{SERVICE}/Generate")(b"\x0a\x01x", timeout=5)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        ids += [i for event in events for i in event.token_ids]
        assert tuple(ids) == expected.token_ids
    assert server.wait_exit(30) == 0
    assert "Traceback" not in server.output


def test_streams_that_outlive_the_drain_timeout_end_unavailable(start_server, tiny_model):
    server = start_server("--model-id", str(tiny_model), *LOCAL, "--drain-timeout", "0.1")
    with Client(server.wait_ready(), timeout_s=60) as client:
        events = client.stream("drain", max_new_tokens=2000, ignore_eos=True)
        next(events)
        server.terminate()
        with pytest.raises(SpecserveError, match="--drain-timeout") as error:
            list(events)
        assert error.value.code is grpc.StatusCode.UNAVAILABLE
    assert server.wait_exit(30) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(start_server, tiny_model, number):
    server = start_server("--model-id", str(tiny_model), *LOCAL, "--drain-timeout", "300")
    with Client(server.wait_ready(), timeout_s=60) as client:
        events = client.stream("drain", max_new_tokens=2000, ignore_eos=True)
        next(events)
        server.terminate(number)
        time.sleep(0.2)
        server.terminate(number)
        assert server.wait_exit(15) == 128 + number
        with pytest.raises(SpecserveError):
            list(events)


def test_sigterm_while_loading_exits_soon(start_server):
    server = start_server("--model-id", "demo", *LOCAL)
    while not any("loading" in line for line in server.lines):
        assert server.process.poll() is None, server.output
        time.sleep(0.01)
    server.terminate()
    assert server.wait_exit(10) == 0
    assert "Traceback" not in server.output


def test_two_servers_do_not_share_a_port(start_server, tiny_model):
    first = start_server("--model-id", str(tiny_model), *LOCAL)
    address = first.wait_ready()
    port = address.rpartition(":")[2]
    second = start_server("--model-id", str(tiny_model), "--hostname", "127.0.0.1", "--port", port)
    assert second.wait_exit(60) != 0
    assert port in second.output and "Traceback" not in second.output and "loading" not in second.output
    with Client(address, timeout_s=30) as client:
        assert client.generate("x", max_new_tokens=1).token_ids
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        third = start_server(
            "--model-id", str(tiny_model), "--hostname", "127.0.0.1", "--port", str(taken.getsockname()[1])
        )
        assert third.wait_exit(60) != 0 and "Traceback" not in third.output


def test_two_servers_side_by_side_and_a_unix_socket(start_server, tiny_model, tmp_path):
    first = start_server("--model-id", str(tiny_model), *LOCAL)
    second = start_server("--model-id", str(tiny_model), "--unix-socket", str(tmp_path / "s"))
    answers = []
    for server in (first, second):
        with Client(server.wait_ready(), timeout_s=30) as client:
            answers.append(client.generate("same", max_new_tokens=8).token_ids)
    assert answers[0] == answers[1]


def copy_model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def fails_with(start_server, model, *words, flags=()):
    server = start_server("--model-id", str(model), *LOCAL, *flags)
    code = server.wait_exit(60)
    assert code != 0 and "Traceback" not in server.output
    errors = [line for line in server.lines if "error" in line.lower()]
    assert len(errors) == 1, server.output
    for word in words:
        assert word in errors[0], errors[0]
    return code


@pytest.mark.parametrize("damage", ["truncated", "empty", "random", "pointer", "missing tensor", "pickle only"])
def test_a_damaged_model_is_one_clear_line(start_server, tiny_model, tmp_path, damage):
    model = copy_model(tiny_model, tmp_path)
    weights = model / "model.safetensors"
    words = [weights.name]
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "random":
        weights.write_bytes(b"\x91\x13\x07" * 1000)
    elif damage == "pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    elif damage == "missing tensor":
        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, weights)
        words = ["model.layers.1.mlp.up_proj.weight"]
    else:
        weights.rename(model / "pytorch_model.bin")
        words = ["pytorch_model.bin", "safetensors"]
    fails_with(start_server, model, *words)


def test_missing_models_and_bad_flags_are_one_clear_line(start_server, tiny_model, tmp_path):
    paths_and_words = [(tmp_path / "nothing-here", "nothing-here"), (tmp_path / "x.gguf", "x.gguf")]
    flags_and_words = [
        (("--max-total-tokens", "4096"), "2048"),
        (("--attention-backend", "flash"), "--attention-backend"),
        (("--kv-cache-memory", "lots"), "--kv-cache-memory"),
        (("--kv-cache-memory", "10"), "--kv-cache-memory"),
        (("--speculator", "medusa"), "--speculator"),
        (("--num-shard", "0"), "--num-shard"),
        (("--max-input-tokens", "9", "--max-total-tokens", "9"), "--max-input-tokens"),
        (("--no-such-flag",), "--no-such-flag"),
    ]
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(fails_with, start_server, *case) for case in paths_and_words]
        results += [pool.submit(fails_with, start_server, tiny_model, word, flags=f) for f, word in flags_and_words]
    for result in results:
        result.result()


def test_environment_variables_stand_for_flags(tiny_model, start_server):
    import os

    env = {**os.environ, "MODEL_ID": str(tiny_model), "MAX_TOTAL_TOKENS": "77", "PORT": "0", "HOSTNAME": "127.0.0.1"}
    server = start_server(env=env)
    with Client(server.wait_ready(), timeout_s=30) as client:
        assert client.info().max_total_tokens == 77 and client.info().model_id == str(tiny_model)


@pytest.mark.parametrize("drafts", [False, True], ids=["none", "mlp"])
def test_nan_weights_fail_the_requests_that_meet_them_alone(drafts, start_server, tiny_model, tiny_bigram, tmp_path):
    model = copy_model(tiny_model, tmp_path)
    tensors = load_file(model / "model.safetensors")
    bad_id = 777
    tensors["model.embed_tokens.weight"][bad_id] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    flags = ("--speculator", "mlp", "--speculator-id", str(tiny_bigram), "--draft-length", "fixed") if drafts else ()
    server = start_server("--model-id", str(model), *flags, *LOCAL)
    with Client(server.wait_ready(), timeout_s=30) as client:
        options = {"max_new_tokens": 60, "ignore_eos": True}
        expected = client.generate([5, 6, 7], **options)
        assert bad_id not in expected.token_ids
        results = {}

        def call(name, prompt):
            try:
                results[name] = client.generate(prompt, **options).token_ids
            except SpecserveError as error:
                results[name] = (error.code, error.message)

        threads = [
            threading.Thread(target=call, args=("good", [5, 6, 7])),
            threading.Thread(target=call, args=("bad", [5, bad_id, 7])),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results["good"] == expected.token_ids
        assert results["bad"][0] is grpc.StatusCode.INTERNAL and "non-finite" in results["bad"][1]
        assert client.generate([5, 6, 7], **options).token_ids == expected.token_ids
        info = client.info()
        assert info.free_blocks == info.num_blocks


def test_json_logs_are_json(start_server, tiny_model):
    server = start_server("--model-id", str(tiny_model), *LOCAL, "--json-logs")
    deadline = time.monotonic() + 60
    while not any('"ready"' in line for line in server.lines):
        assert time.monotonic() < deadline and server.process.poll() is None, server.output
        time.sleep(0.05)
    server.terminate()
    assert server.wait_exit(30) == 0
    for line in server.lines:
        json.loads(line)


def test_the_command_line_client_from_a_pipe(plain_tiny_address):
    command = [
        sys.executable,
        "-m",
        "specserve.server",
        "generate",
        "--target",
        plain_tiny_address,
        "--max-new-tokens",
        "9",
    ]
    done = subprocess.run(
        [*command, "--no-chat"], input="Grüße 🙂", capture_output=True, text=True, timeout=60, check=True
    )
    with Client(plain_tiny_address, timeout_s=30) as client:
        assert done.stdout == client.generate("Grüße 🙂", max_new_tokens=9).text
    assert "9 tokens" in done.stderr and "Traceback" not in done.stderr
    bad = subprocess.run([*command, "--top-p", "7", "x"], capture_output=True, text=True, timeout=60)
    assert bad.returncode == 1 and "sampling.top_p" in bad.stderr and "Traceback" not in bad.stderr
