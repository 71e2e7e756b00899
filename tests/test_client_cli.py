"""The commands generate, info and bench against a scripted server."""

import json
import os
import re
import signal
import subprocess
import sys

import grpc
import pytest
import typer
from typer.testing import CliRunner

from specserve.router_client import cli

TEXT = "Grüße 🤗 an\nalle"
LAUNCH = "import typer; from specserve.router_client.cli import register; app = typer.Typer(); register(app); app()"


@pytest.fixture
def run():
    app = typer.Typer()
    cli.register(app)

    def invoke(*args, **kwargs):
        result = CliRunner().invoke(app, [str(arg) for arg in args], **kwargs)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return invoke


def error_line(result) -> str:
    """The one line of a command that failed."""
    assert result.exit_code == 1 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_generate_streams_the_text_and_then_says_how_fast(fake_server, run):
    server = fake_server()
    result = run("generate", "Hallo", "--target", server.target)
    assert (result.exit_code, result.stdout_bytes.decode()) == (0, TEXT)
    (line,) = result.stderr.strip().splitlines()
    pattern = (
        r"8 tokens in [\d.]+ s, [\d.]+ tokens/s, finish reason: eos_token, "
        r"time to first token: [\d.]+ s, accepted drafts: 6/8, mean acceptance length: 2.50"
    )
    assert re.fullmatch(pattern, line)


def test_events_without_tokens_are_no_first_token(fake_server, run):
    server = fake_server()
    for event in server.events:
        event.ClearField("token_ids")
    result = run("generate", "x", "-t", server.target)
    assert "finish reason: eos_token" in result.stderr and "first token" not in result.stderr


def test_generate_flags_reach_the_server(fake_server, run):
    server = fake_server()
    flags = "--no-chat --temperature 0.5 --top-k 3 --seed 18446744073709551615 --stop Z --stop é --stop-token-id 5"
    flags += " --max-new-tokens 4 --ignore-eos --no-include-stop --logprobs --no-skip-special-tokens --truncate 9"
    assert run("generate", "x", "-t", server.target, *flags.split()).exit_code == 0
    (request,) = server.requests
    assert request.text == "x" and request.truncate == 9
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 3, 2**64 - 1)
    assert not request.sampling.HasField("top_p")
    assert (list(request.stopping.stop), list(request.stopping.stop_token_ids)) == (["Z", "é"], [5])
    assert request.stopping.ignore_eos and not request.stopping.include_stop
    assert request.stopping.HasField("include_stop") and request.stopping.max_new_tokens == 4
    assert request.response.logprobs and request.response.HasField("skip_special_tokens")
    assert not request.HasField("speculation")


@pytest.mark.parametrize(
    ("flags", "has_template", "expected"),
    [
        ([], True, [("user", "x")]),
        ([], False, "x"),
        (["--chat"], False, [("user", "x")]),
        (["--no-chat"], True, "x"),
        (["--system", "Be é."], False, [("system", "Be é."), ("user", "x")]),
    ],
)
def test_chat_or_text(fake_server, run, flags, has_template, expected):
    server = fake_server()
    server.info.has_chat_template = has_template
    assert run("generate", "x", "-t", server.target, *flags).exit_code == 0
    request = server.requests[-1]
    if isinstance(expected, str):
        assert request.WhichOneof("input") == "text" and request.text == expected
    else:
        assert [(message.role, message.content) for message in request.chat.messages] == expected


@pytest.mark.parametrize("args", [[], ["-"]])
def test_prompt_from_stdin(fake_server, run, args):
    server = fake_server()
    result = run("generate", *args, "-t", server.target, "--no-chat", input="zwei\nZeilen 🤗\n".encode())
    assert result.exit_code == 0 and server.requests[0].text == "zwei\nZeilen 🤗\n"
    assert "not UTF-8" in error_line(run("generate", *args, "-t", server.target, "--no-chat", input=b"\xff\n"))


def test_generate_json(fake_server, run):
    server = fake_server()
    result = run("generate", "x", "-t", server.target, "--json")
    events = [json.loads(line) for line in result.stdout_bytes.decode().splitlines()]
    assert "".join(event["text"] for event in events) == TEXT
    assert [event["token_ids"] for event in events] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert events[0]["summary"] is None
    assert (events[-1]["summary"]["finish_reason"], events[-1]["summary"]["seed"]) == ("eos_token", 2**64 - 1)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--seed", "-1"], "seed is -1"),
        (["--no-chat", "--system", "x"], "--system"),
        (["--timeout", "0"], "timeout_s is 0"),
        (["--tls-ca", "/nonexistent.pem"], "/nonexistent.pem: No such file"),
        (["--target", "nowhere"], "target"),
    ],
)
def test_unusable_arguments_are_one_line(fake_server, run, args, words):
    target = [] if "--target" in args else ["-t", fake_server().target]
    assert words in error_line(run("generate", "x", *target, *args))


@pytest.mark.parametrize("command", [["generate", "x"], ["info"], ["bench"]])
def test_failed_calls_are_one_line(fake_server, run, command):
    assert error_line(run(*command, "--port", "9")).startswith("error: UNAVAILABLE: ")


def test_a_failure_in_mid_stream(fake_server, run):
    server = fake_server()
    server.failure = (2, grpc.StatusCode.INTERNAL)
    result = run("generate", "x", "-t", server.target)
    assert (result.exit_code, result.stdout_bytes.decode()) == (1, "Grüße 🤗")
    assert result.stderr == "\nerror: INTERNAL: as the script says\n"  # not on the line of the text


def test_port_and_target_come_from_the_environment(fake_server, run):
    server = fake_server()
    port = server.target.rpartition(":")[2]
    assert run("info", env={"PORT": port}).exit_code == 0
    assert run("info", env={"PORT": "9", "SPECSERVE_TARGET": server.target}).exit_code == 0
    assert run("info", "--port", port, env={"PORT": "9"}).exit_code == 0
    assert server.num_calls == 3


def test_info(fake_server, run):
    server = fake_server()
    server.info.speculator.type = "mlp"
    table = run("info", "-t", server.target).stdout
    assert re.search(r"max input tokens\W+512\b", table) and re.search(r"speculator type\W+mlp", table)
    assert re.search(r"eos token ids\W+2, 7\b", table)
    document = json.loads(run("info", "-t", server.target, "--json").stdout)
    assert (document["vocab_size"], document["speculator"]["type"]) == (1000, "mlp")


def test_bench_table_and_file(fake_server, run, tmp_path):
    server = fake_server()
    path = tmp_path / "report.json"
    flags = ["--concurrency", 2, "--num-requests", 4, "--warmup", 1, "--input-tokens", 6, "--json", path]
    result = run("bench", "-t", server.target, *flags, "--ignore-eos", "--temperature", "0.7")
    assert result.exit_code == 0
    assert re.search(r"completed requests\W+4 of 4", result.stdout)
    assert re.search(r"accepted drafts\W+24 of 32 \(75.0%\)", result.stdout)
    assert re.search(r"time between tokens(\W+[\d.]+){4}", result.stdout)
    report = json.loads(path.read_text())
    assert (report["output_tokens"], report["options"]["temperature"]) == (32, 0.7)
    assert report["settings"]["num_requests"] == 4
    generated = server.requests[1:]
    assert len(generated) == 5 and all(request.stopping.ignore_eos for request in generated)
    assert {request.stopping.max_new_tokens for request in generated} == {128}


def test_bench_json_on_stdout_alone(fake_server, run):
    result = run("bench", "-t", fake_server().target, "--rate", 500, "--num-requests", 3, "--json", "-")
    report = json.loads(result.stdout)
    assert (report["completed"], report["settings"]["concurrency"], report["settings"]["rate"]) == (3, None, 500.0)


def test_bench_fails_if_all_requests_fail(fake_server, run):
    server = fake_server()
    server.failure = (0, grpc.StatusCode.RESOURCE_EXHAUSTED)
    result = run("bench", "-t", server.target, "--num-requests", 2)
    assert result.exit_code == 1
    assert re.search(r"failed: RESOURCE_EXHAUSTED\W+2", result.stdout)
    assert "exclude each other" in error_line(run("bench", "--rate", 1, "--concurrency", 1, "-t", server.target))
    assert "input_tokens is 513" in error_line(run("bench", "--input-tokens", 513, "-t", server.target))
    assert "rate is -1" in error_line(run("bench", "--rate", -1, "-t", server.target))


@pytest.mark.parametrize("command", [["generate", "x"], ["bench", "--warmup", "0"]])
def test_interrupt_cancels_the_call(fake_server, command):
    server = fake_server()
    server.hold_after = 1
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *command, "-t", server.target],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    try:
        if command[0] == "generate":
            assert process.stdout.read(5) == "Grüße"  # before the end of the stream
        else:
            while server.num_calls < 2:
                server.released.wait(0.02)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, rest, errors.strip()) == (130, "", "cancelled")
    assert server.cancelled.wait(5)


def test_text_survives_a_locale_without_its_characters(fake_server):
    environment = {"PYTHONPATH": ":".join(sys.path), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", LAUNCH, "generate", "x", "-t", fake_server().target]
    result = subprocess.run(command, capture_output=True, check=True, env=environment, timeout=60)
    assert result.stdout.decode() == TEXT
