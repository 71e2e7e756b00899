"""Tokens of models split over several ranks are those of one rank, whatever is asked and whoever drafts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sharded_worker
import torch
from safetensors.torch import load_file, save_file
from small_tokenizer import sentencepiece_backend
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specserve.server.worker.ranks import Ranks

VOCAB = 321  # divides by neither 2 nor 4
SIZE = 36
WORKER = Path(sharded_worker.__file__)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}


def write_model(path, tokenizer, *, family="llama", heads=4, kv_heads=2, head_dim=8, seed=0, inner=37, **more):
    """A random model; `inner`, the size of its MLP, divides by nothing."""
    config_type, model_type = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_type(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=family == "gemma3",
        eos_token_id=2,
        bos_token_id=1,
        **more,
    )
    model = model_type(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return str(path)


def write_shuffled(path, model):
    """The same model with its tokens in another order."""
    shutil.copytree(model, path)
    old, new = sentencepiece_backend(), sentencepiece_backend(is_shuffled=True)
    new.save(str(path / "tokenizer.json"))
    order = list(range(VOCAB))
    for piece, token_id in new.get_vocab().items():
        order[token_id] = old.get_vocab()[piece]
    tensors = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][order]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


@pytest.fixture(scope="module")
def cases(speculators, tmp_path_factory):
    """Every number of KV heads, every family, every speculator; KV memory for 15 blocks of 4 tokens on one rank."""
    folder, tokenizer = tmp_path_factory.mktemp("sharded"), sentencepiece_backend()

    def case(name, **options):
        heads = options.get("kv_heads", 2) * options.get("head_dim", 8)
        model = write_model(folder / name, tokenizer, **options)
        return {"name": name, "model": model, "kv_bytes": 15 * 4 * 2 * 2 * heads * 4}

    made = [
        case("1 KV head", kv_heads=1),
        case("2 KV heads", kv_heads=2),
        case("3 KV heads of 9", heads=9, kv_heads=3),
        case("9 KV heads", heads=9, kv_heads=9),
        case("mistral", family="mistral", sliding_window=8),
        case("qwen2", family="qwen2"),
        case("qwen3", family="qwen3", heads=6, kv_heads=3),
        case(
            "gemma3", family="gemma3", kv_heads=1, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
        ),
    ]
    plain = {**made[2], "kv_bytes": 4 * made[2]["kv_bytes"]}
    texts = sharded_worker.answers(plain, Ranks())["tokens"]
    mlp = speculators.write_bigram_mlp(folder / "mlp", texts, vocab=VOCAB, size=SIZE, n=3)
    medusa = speculators.write_repeating_medusa(folder / "medusa", size=SIZE, heads=2)
    draft = write_model(folder / "draft", tokenizer, inner=20)
    shuffled = write_shuffled(folder / "shuffled", Path(plain["model"]))
    usd = {**plain, "kind": "usd", "kv_bytes": 2 * plain["kv_bytes"]}
    made += [
        {**plain, "name": "mlp", "kind": "mlp", "id": str(mlp)},
        {**plain, "name": "medusa", "kind": "medusa", "id": str(medusa)},
        {**usd, "name": "usd", "id": draft},
        {**usd, "name": "usd, whole", "id": draft, "shards": 1},
        {**usd, "name": "usd, tli", "id": shuffled, "method": "tli"},
        {**usd, "name": "usd, slem", "id": shuffled, "method": "slem"},
        {**usd, "name": "usd, rejection", "id": shuffled, "rejects": True},
        {**plain, "name": "mlp, rejection", "kind": "mlp", "id": str(mlp), "rejects": True},
    ]
    return made


@pytest.fixture(scope="module")
def expected(cases):
    return [sharded_worker.answers(case, Ranks()) for case in cases]


def run_sharded(cases, size, folder, *flags):
    (folder / "cases.json").write_text(json.dumps(cases))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size))
    files = (str(folder / "cases.json"), str(folder / "answers.json"))
    run = subprocess.run([*launcher, str(WORKER), *files, *flags], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads((folder / "answers.json").read_text())


def assert_same(cases, expected, got):
    for case, one, several in zip(cases, expected, got, strict=True):
        assert several["tokens"] == one["tokens"], case["name"]
        assert several["scores"].keys() == one["scores"].keys()
        for key, rows in one["scores"].items():
            for (token, rank, logprob, top), other in zip(rows, several["scores"][key], strict=True):
                assert (token, rank, top) == (other[0], other[1], other[3]), case["name"]
                assert abs(logprob - other[2]) < 3e-3


@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_give_the_tokens_of_one(size, cases, expected, tmp_path):
    got = run_sharded(cases, size, tmp_path)
    assert_same(cases, expected, got)
    assert all(result["shares"] for result in got)
    assert all(result["preemptions"] > 0 for result in expected[:8])
    assert size > 2 or sum(result["preemptions"] > 0 for result in got) > 2
    accepted = {case["name"]: result["accepted"] for case, result in zip(cases, got, strict=True)}
    alone = {case["name"]: result["accepted"] for case, result in zip(cases, expected, strict=True)}
    assert accepted["mlp"] > 50 and accepted["mlp, rejection"] > 0
    for name in ("usd", "usd, whole", "usd, tli", "usd, rejection"):  # the same drafts
        assert accepted[name] == alone[name] > 10, name


def test_without_shared_memory_too(cases, expected, tmp_path):
    """As between machines: gloo over sockets, sums in the same order."""
    some = [index for index, case in enumerate(cases) if case["name"] in {"3 KV heads of 9", "gemma3", "mlp"}]
    got = run_sharded([cases[i] for i in some], 2, tmp_path, "--no-shared-memory")
    assert not any(result["shares"] for result in got)
    assert_same([cases[i] for i in some], [expected[i] for i in some], got)


def test_too_many_ranks_for_the_heads_are_refused(cases, tmp_path):
    """1 KV head of 4 query heads over 5 ranks."""
    (tmp_path / "cases.json").write_text(json.dumps(cases[:1]))
    command = (sys.executable, "-m", "specserve.server", "serve", "--model-id", cases[0]["model"], "--num-shard", "5")
    run = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert (
        "--num-shard is 5, but the 4 attention heads of the model (1 KV heads) can't give each shard one" in run.stderr
    )
    assert "listening on" not in run.stderr and "Traceback" not in run.stderr
