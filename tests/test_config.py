"""Flags and environment to a ServerConfig, and what a wrong one costs: one line and exit code 2."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.server import cli, flags
from specserve.server.config import (
    AttentionBackendName,
    CacheOptions,
    ConfigError,
    Device,
    DraftLengthRule,
    DType,
    ListenOptions,
    LogLevel,
    LogOptions,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    ServerConfig,
    SpeculatorOptions,
)
from specserve.server.flags import parse_size
from specserve.speculators.base import SpeculatorType

# Every variable that `serve` reads, so that the tester's own environment changes nothing.
VARIABLES = [
    *("MODEL_ID", "REVISION", "HF_HUB_OFFLINE", "DTYPE", "SPECSERVE_DEVICE", "SPECSERVE_ATTENTION_BACKEND"),
    *("NUM_SHARD", "SPECSERVE_NUM_THREADS", "SPECSERVE_KV_CACHE_MEMORY", "SPECSERVE_BLOCK_SIZE"),
    *("SPECSERVE_PREFIX_CACHING", "USE_PREFIX_CACHING", "MAX_INPUT_TOKENS", "MAX_TOTAL_TOKENS", "MAX_BATCH_TOKENS"),
    *("MAX_BATCH_PREFILL_TOKENS", "MAX_BATCH_SIZE", "MAX_CONCURRENT_REQUESTS", "MAX_STOP_SEQUENCES"),
    *("MAX_TOP_N_TOKENS", "SPECULATOR", "SPECULATOR_ID", "HOSTNAME", "PORT", "SPECSERVE_UNIX_SOCKET"),
    *("SPECSERVE_MAX_MESSAGE_SIZE", "SPECSERVE_DRAIN_TIMEOUT", "LOG_LEVEL", "SPECSERVE_JSON_LOGS", "JSON_OUTPUT"),
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `specserve …` in this process: exit code, stdout, stderr."""

    def run(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["specserve", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return exit_info.value.code, captured.out, captured.err

    return run


@pytest.fixture
def served(run, monkeypatch):
    """The configuration that `specserve serve …` comes to; the server itself is not started."""
    import specserve.server.grpc_server as grpc_server

    configs = []
    monkeypatch.setattr(grpc_server, "run_server", lambda config, *_: configs.append(config) or 0)
    monkeypatch.setattr("specserve.server.logs.configure_logging", lambda options: None)

    def served(*arguments: str) -> ServerConfig:
        code, _, err = run("serve", *arguments)
        assert (code, err) == (0, "")
        return configs[-1]

    return served


def test_defaults(served):
    assert served("--model-id", "demo") == ServerConfig(ModelOptions("demo"))
    assert served("--model-id", "demo").server == ListenOptions("0.0.0.0", 3000, None)


USD = ("--speculator", "usd", "--speculator-id", "y")
ALL_FLAGS = {
    "--model-id": ("MODEL_ID", "org/né"),
    "--revision": ("REVISION", "v2"),
    "--offline": ("HF_HUB_OFFLINE", None),
    "--dtype": ("DTYPE", "bfloat16"),
    "--device": ("SPECSERVE_DEVICE", "cpu"),
    "--attention-backend": ("SPECSERVE_ATTENTION_BACKEND", "torch"),
    "--num-shard": ("NUM_SHARD", "1"),
    "--rank-timeout": ("SPECSERVE_RANK_TIMEOUT", "4.5"),
    "--num-threads": ("SPECSERVE_NUM_THREADS", "3"),
    "--kv-cache-memory": ("SPECSERVE_KV_CACHE_MEMORY", "1.5GiB"),
    "--block-size": ("SPECSERVE_BLOCK_SIZE", "32"),
    "--no-prefix-caching": ("SPECSERVE_PREFIX_CACHING", None),
    "--max-input-tokens": ("MAX_INPUT_TOKENS", "100"),
    "--max-total-tokens": ("MAX_TOTAL_TOKENS", "200"),
    "--max-batch-tokens": ("MAX_BATCH_TOKENS", "300"),
    "--max-batch-size": ("MAX_BATCH_SIZE", "5"),
    "--max-concurrent-requests": ("MAX_CONCURRENT_REQUESTS", "6"),
    "--max-stop-sequences": ("MAX_STOP_SEQUENCES", "7"),
    "--max-top-n-tokens": ("MAX_TOP_N_TOKENS", "8"),
    "--speculator": ("SPECULATOR", "mlp"),
    "--speculator-id": ("SPECULATOR_ID", "org/heads"),
    "--num-speculative-tokens": ("SPECULATE", "3"),
    "--draft-length": ("SPECSERVE_DRAFT_LENGTH", "fixed"),
    "--hostname": ("HOSTNAME", "127.0.0.1"),
    "--port": ("PORT", "0"),
    "--unix-socket": ("SPECSERVE_UNIX_SOCKET", "/tmp/s.sock"),
    "--max-message-size": ("SPECSERVE_MAX_MESSAGE_SIZE", "1MB"),
    "--drain-timeout": ("SPECSERVE_DRAIN_TIMEOUT", "0.5"),
    "--log-level": ("LOG_LEVEL", "DEBUG"),
    "--json-logs": ("SPECSERVE_JSON_LOGS", None),
}
EVERYTHING = ServerConfig(
    ModelOptions("org/né", "v2", DType.BFLOAT16, Device.CPU, AttentionBackendName.TORCH, True, None),
    CacheOptions(3 * 2**29, 32, False),
    SchedulerOptions(
        max_input_tokens=100,
        max_total_tokens=200,
        max_batch_tokens=300,
        max_batch_size=5,
        max_concurrent_requests=6,
    ),
    SpeculatorOptions(
        type=SpeculatorType.MLP, id="org/heads", num_speculative_tokens=3, draft_length=DraftLengthRule.FIXED
    ),
    parallel=ParallelOptions(1, 3, 4.5),
    server=ListenOptions("127.0.0.1", 0, Path("/tmp/s.sock"), 10**6, 0.5, 7, 8),
    log=LogOptions(LogLevel.DEBUG, True),
)


def test_every_flag(served):
    arguments = [part for flag, (_, value) in ALL_FLAGS.items() for part in (flag, value) if part is not None]
    assert served(*arguments) == EVERYTHING


def test_every_variable(served, monkeypatch):
    for flag, (name, value) in ALL_FLAGS.items():
        monkeypatch.setenv(name, value or ("false" if flag.startswith("--no-") else "true"))
    assert served() == EVERYTHING


def test_a_flag_outranks_its_variable(served, monkeypatch):
    monkeypatch.setenv("PORT", "1234")
    monkeypatch.setenv("HOSTNAME", "10.0.0.1")
    assert served("--model-id", "x").server == ListenOptions("10.0.0.1", 1234)
    assert served("--model-id", "x", "--port", "5", "--hostname", "::1").server == ListenOptions("::1", 5)


def test_other_names_of_variables(served, monkeypatch):
    monkeypatch.setenv("MAX_BATCH_PREFILL_TOKENS", "4096")
    monkeypatch.setenv("USE_PREFIX_CACHING", "0")
    monkeypatch.setenv("JSON_OUTPUT", "1")
    made = served("--model-id", "x")
    assert (made.scheduler.max_batch_tokens, made.cache.prefix_caching, made.log.json) == (4096, False, True)


@pytest.mark.parametrize(
    ("variable", "own", "result"),
    [
        ("3f2b9c", "3f2b9c", "0.0.0.0"),  # Docker's
        ("node", "node.example.org", "0.0.0.0"),
        ("node.example.org", "node.example.org", "0.0.0.0"),
        ("127.0.0.1", "3f2b9c", "127.0.0.1"),
        ("", "3f2b9c", "0.0.0.0"),
    ],
)
def test_hostname_of_the_machine_is_no_choice(served, monkeypatch, variable, own, result):
    monkeypatch.setattr(flags.socket, "gethostname", lambda: own)
    monkeypatch.setenv("HOSTNAME", variable)
    assert served("--model-id", "x").server.hostname == result
    assert served("--model-id", "x", "--hostname", own).server.hostname == own


def test_port_and_unix_socket(served):
    assert served("--model-id", "x", "--unix-socket", "/tmp/a").server.port is None
    assert served("--model-id", "x", "--unix-socket", "/tmp/a", "--port", "7").server.port == 7
    assert served("--model-id", "x", "--unix-socket", "a").server.unix_socket == Path.cwd() / "a"


@pytest.mark.parametrize(
    ("variables", "token"),
    [
        ({}, None),
        ({"HF_TOKEN": "hf_a"}, "hf_a"),
        ({"HUGGING_FACE_HUB_TOKEN": "hf_b"}, "hf_b"),
        ({"HF_TOKEN": "hf_a", "HUGGING_FACE_HUB_TOKEN": "hf_b"}, "hf_a"),
        ({"HF_TOKEN": ""}, None),
    ],
)
def test_hub_token(served, monkeypatch, variables, token):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert served("--model-id", "x").model.hub_token == token


@pytest.mark.parametrize("logs", [[], ["--json-logs"]])
def test_the_token_is_never_shown(served, run, monkeypatch, logs):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    assert "verysecret" not in repr(served("--model-id", "x"))
    _, out, _ = run("serve", "--model-id", "x", *logs)
    assert "model_id" in out and "verysecret" not in out


def test_configuration_as_json(served, run):
    served("--model-id", "x")
    _, out, _ = run("serve", "--model-id", "né", "--json-logs", "--kv-cache-memory", "1KiB")
    (line,) = out.splitlines()
    shown = json.loads(line)
    assert shown["event"] == "configuration"
    assert shown["model"]["model_id"] == "né" and shown["cache"]["kv_cache_memory"] == 1024
    assert shown["speculator"]["type"] == "none"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("7B", 7),
        ("2GiB", 2**31),
        ("512MB", 512 * 10**6),
        ("1.5 kib", 1536),
        (" 3TB ", 3 * 10**12),
    ],
)
def test_sizes(text, num_bytes):
    assert parse_size("--x", text) == num_bytes


@pytest.mark.parametrize("text", ["", "2G", "GiB", "-1", "1e9", "2 GiB B", "nan", "1,5GiB"])
def test_wrong_sizes(text):
    with pytest.raises(ConfigError, match=r"^--x is '.*'; it must be a size like 2GiB"):
        parse_size("--x", text)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["--model-id", "MODEL_ID", "demo"]),
        (["--model-id", "x", "--port", "99999"], ["--port", "65535"]),
        (["--model-id", "x", "--port", "eins"], ["--port"]),
        (["--model-id", "x", "--dtype", "int3"], ["--dtype", "int3", "bfloat16"]),
        (
            ["--model-id", "demo", "--speculator", "usd"],
            ["--speculator is usd, but --speculator-id is missing", ".gguf"],
        ),
        (["--model-id", "x", "--speculator-dtype", "int8"], ["--speculator-dtype is int8", "--speculator is none"]),
        (["--model-id", "x", "--usd-method", "slem", "--speculator", "mlp"], ["--usd-method is slem", "is mlp"]),
        (["--model-id", "x", "--speculator-num-shard", "1"], ["--speculator-num-shard is 1", "--speculator is none"]),
        (
            ["--model-id", "x", *USD, "--num-shard", "4", "--speculator-num-shard", "2"],
            ["--speculator-num-shard is 2", "1 or the 4 of --num-shard"],
        ),
        (["--model-id", "x", "--verification", "rejection"], ["--verification is 'rejection'", "--speculator is none"]),
        (["--model-id", "x", "--speculator", "mlp"], ["--speculator is mlp", "--speculator-id is missing"]),
        (["--model-id", "x", "--num-speculative-tokens", "2"], ["--num-speculative-tokens is 2", "is none"]),
        (["--model-id", "x", "--num-speculative-tokens", "0"], ["--num-speculative-tokens", "1"]),
        (["--model-id", "x", "--speculator", "magic"], ["--speculator", "magic"]),
        (["--model-id", "x", "--speculator-id", "y"], ["--speculator-id is 'y'", "--speculator is none"]),
        (["--model-id", "x", "--rank-timeout", "0.5"], ["--rank-timeout is 0.5", "1 or more seconds"]),
        (["--model-id", "x", "--kv-cache-memory", "2Q"], ["--kv-cache-memory is '2Q'", "2GiB"]),
        (["--model-id", "x", "--kv-cache-memory", "0"], ["--kv-cache-memory is '0'", "more than 0"]),
        (["--model-id", "x", "--max-message-size", "1000"], ["--max-message-size is '1000'", "1024.."]),
        (["--model-id", "x", "--max-message-size", "2GiB"], ["--max-message-size is '2GiB'", "2147483647"]),
        (["--model-id", "x", "--drain-timeout", "-1"], ["--drain-timeout is -1", "0 or more"]),
        (["--model-id", "x", "--drain-timeout", "nan"], ["--drain-timeout is nan"]),
        (["--model-id", "x", "--drain-timeout", "inf"], ["--drain-timeout is inf"]),
        (
            ["--model-id", "x", "--max-input-tokens", "9", "--max-total-tokens", "9"],
            ["--max-input-tokens is 9", "--max-total-tokens, which is 9"],
        ),
        (
            ["--model-id", "x", "--max-batch-tokens", "7", "--max-batch-size", "8"],
            ["--max-batch-tokens is 7", "--max-batch-size, which is 8"],
        ),
        (["--model-id", "x", "--max-batch-size", "0"], ["--max-batch-size"]),
        (["--model-id", "x", "--block-size", "0"], ["--block-size"]),
        (["--model-id", "x", "--hostname", ""], ["--hostname is empty"]),
        (["--model-id", "x", "--unix-socket", "/tmp/" + "a" * 110], ["--unix-socket is", "at most 107 bytes"]),
        (["--model-id", "x", "--nope"], ["--nope"]),
    ],
)
def test_wrong_flags_cost_one_line(run, arguments, parts):
    code, out, err = run("serve", *arguments)
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert out == ""
    for part in parts:
        assert part in err


def test_wrong_variables_are_named(run, monkeypatch):
    monkeypatch.setenv("PORT", "tcp://10.0.0.1:3000")
    code, _, err = run("serve", "--model-id", "x")
    assert code == 2 and "PORT" in err and err.count("\n") == 1


def test_version_and_help(run):
    code, out, _ = run("--version")
    assert code == 0 and out.startswith("specserve ")
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in ("serve", "download", "generate", "info", "bench"))


def test_download_of_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    code, out, err = run("download", "/no/such/directory")
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and "/no/such/directory" in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["info", "--target", "127.0.0.1:1"], ["serve"]])
def test_no_torch_for_what_needs_no_model(arguments):
    assert heavy_modules(arguments) == "[]"


def test_no_torch_before_the_port_is_bound():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        arguments = ["serve", "--model-id", "demo", "--hostname", "127.0.0.1", "--port", str(port)]
        assert heavy_modules(arguments) == "[]"


def heavy_modules(arguments) -> str:
    """What a command has imported of what takes seconds."""
    script = (
        "import sys\n"
        "from specserve.server.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]
