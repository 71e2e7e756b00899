"""Real server processes, real gRPC, real small models. Ports are free ones; every process is ended by its own id."""

import contextlib
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gemma3_parts import join_parts
from mixed import CACHE, LOCAL, SMALL
from processes import ServerProcess
from transformers import LlamaConfig, LlamaForCausalLM

from specserve.models.config import load_config
from specserve.models.hub import resolve_model
from specserve.models.tokenizer import load_tokenizer
from specserve.router_client.client import Client

TINY_PROMPTS = json.loads((Path(__file__).parent / "data" / "tiny_prompts.json").read_text("utf-8"))


@pytest.fixture
def start_server():
    """start(*flags) -> ServerProcess, ended with the test whatever happens."""
    with contextlib.ExitStack() as stack:

        def start(*args: str, env: dict[str, str] | None = None) -> ServerProcess:
            server = ServerProcess(*args, env=env)
            stack.callback(server.end)
            return server

        yield start


@contextlib.contextmanager
def running(*args: str) -> Iterator[tuple[str, ServerProcess]]:
    server = ServerProcess(*args)
    try:
        yield server.wait_ready(), server
    finally:
        server.end()


def write_tiny_model(path: Path, *, seed: int = 0, **overrides) -> Path:
    """A random two-layer Llama with the demo model's tokenizer, in Hub format."""
    files = resolve_model("demo")
    vocab_size = load_config(files).vocab_size
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "initializer_range": 0.4,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **overrides,
        }
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer = load_tokenizer(files, vocab_size)
    tokenizer.backend.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(tokenizer.chat_template or "")
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}')
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def make_tiny_model():
    return write_tiny_model


@pytest.fixture(scope="session")
def demo_address() -> Iterator[str]:
    with running("--model-id", "demo", *LOCAL) as (address, _):
        yield address


@pytest.fixture(scope="session")
def plain_tiny_address(tiny_model) -> Iterator[str]:
    """The tiny model without a speculator."""
    with running("--model-id", str(tiny_model), *SMALL, *CACHE, *LOCAL) as (address, _):
        yield address


@pytest.fixture(scope="session")
def tiny_bigram(plain_tiny_address, speculators, tmp_path_factory) -> Path:
    """An MLP speculator that is nearly always right about the greedy answers to TINY_PROMPTS."""
    with Client(plain_tiny_address, timeout_s=120) as client:
        texts = [client.generate(p, max_new_tokens=60, ignore_eos=True).token_ids for p in TINY_PROMPTS]
    return speculators.write_bigram_mlp(tmp_path_factory.mktemp("bigram"), texts, vocab=49152, size=32, n=3)


@pytest.fixture(scope="session")
def tiny_repeating(speculators, tmp_path_factory) -> Path:
    """A Medusa speculator that is seldom right."""
    return speculators.write_repeating_medusa(tmp_path_factory.mktemp("repeating"), size=32, heads=2)


@pytest.fixture(scope="session", params=["none", "mlp", "medusa"])
def tiny_address(request, tiny_model, plain_tiny_address) -> Iterator[str]:
    """Without a speculator and with each kind."""
    if request.param == "none":
        yield plain_tiny_address
        return
    folder = request.getfixturevalue({"mlp": "tiny_bigram", "medusa": "tiny_repeating"}[request.param])
    flags = ("--speculator", request.param, "--speculator-id", str(folder), "--draft-length", "fixed")
    with running("--model-id", str(tiny_model), *flags, *SMALL, *CACHE, *LOCAL) as (address, _):
        yield address


@pytest.fixture
def demo(demo_address) -> Iterator[Client]:
    with Client(demo_address, timeout_s=120) as client:
        yield client


@pytest.fixture
def tiny(tiny_address) -> Iterator[Client]:
    with Client(tiny_address, timeout_s=120) as client:
        yield client
        wait_idle(client)  # whatever the test did, everything is back


@pytest.fixture
def plain_tiny(plain_tiny_address) -> Iterator[Client]:
    with Client(plain_tiny_address, timeout_s=120) as client:
        yield client


def wait_idle(client: Client, seconds: float = 10.0) -> None:
    """Wait until nothing runs, waits or holds a block."""
    deadline = time.monotonic() + seconds
    while True:
        info = client.info()
        if not info.running_requests and not info.waiting_requests and info.free_blocks == info.num_blocks:
            return
        assert time.monotonic() < deadline, f"still busy: {info}"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def speculators():
    """The module speculators.py: speculators made by hand."""
    spec = importlib.util.spec_from_file_location("handmade_speculators", Path(__file__).parent / "speculators.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def gemma3_file(tmp_path_factory) -> Path:
    return join_parts(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture
def wait_until_idle():
    return wait_idle
