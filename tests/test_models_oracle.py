"""Logits of every family against transformers, in float32."""

import random

import pytest
import torch
import transformers

from specserve.models.cpu_kernels import binding

BASE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GEMMA = {
    **BASE,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 24,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FULL, SLIDING = "full_attention", "sliding_attention"

CASES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-mha": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama-mqa": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama-attention-bias": ("LlamaForCausalLM", {"attention_bias": True}),
    "llama-mlp-bias": ("LlamaForCausalLM", {"mlp_bias": True}),
    "llama-head-dim": ("LlamaForCausalLM", {"head_dim": 20}),
    "llama-theta": ("LlamaForCausalLM", {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}),
    "llama-linear": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-llama3": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "llama3", **LLAMA3}}),
    "llama-yarn": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "llama-yarn-factor": ("LlamaForCausalLM", {"rope_parameters": {**YARN, "attention_factor": 0.7}}),
    "llama-yarn-mscale": (
        "LlamaForCausalLM",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8, "truncate": False}},
    ),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 16}),
    "mistral-full": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 20}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3-bias-window": (
        "Qwen3ForCausalLM",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    "gemma3-untied": ("Gemma3ForCausalLM", {**GEMMA, "tie_word_embeddings": False}),
    "gemma3-linear": (
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
}


@pytest.fixture(scope="module")
def reference():
    """Builds the transformers model of a case by its name, with weights large enough for every part to matter."""

    def build(name: str):
        model_class, variant = CASES[name]
        kind = getattr(transformers, model_class)
        torch.manual_seed(len(name))
        model = kind(kind.config_class(**(BASE | variant))).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.normal_(0.0, 0.3 if "norm" not in key else 0.5)
                if "norm" in key and "Gemma" not in model_class:
                    parameter += 1.0
        return model

    return build


def prompts(vocab_size: int, lengths=(5, 61, 1, 90, 17)) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def expected_logits(model, sequence: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([sequence])).logits[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, f"relative error {error:.2e}"


@pytest.mark.parametrize("attention", ["torch", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_logits_of_ragged_chunked_batches(name, attention, reference, tmp_path, model_helpers):
    model = reference(name)
    model.save_pretrained(tmp_path)
    sequences = prompts(BASE["vocab_size"])
    actual = model_helpers.paged_logits(model_helpers.load(tmp_path, attention=attention), sequences)
    for logits, sequence in zip(actual, sequences, strict=True):
        assert_close(logits, expected_logits(model, sequence))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_same_bits_however_they_are_batched(name, reference, tmp_path, model_helpers, monkeypatch):
    """Under the CPU kernels: alone or in company, in other chunks, and replayed or not."""
    reference(name).save_pretrained(tmp_path)
    sequences = prompts(BASE["vocab_size"])
    model = model_helpers.load(tmp_path, attention="cpu")
    together = model_helpers.paged_logits(model, sequences)
    assert model.replays is not None and model.replays.is_recorded
    for index in (0, 3):
        (alone,) = model_helpers.paged_logits(model, [sequences[index]], num_decoded=20, seed=index)
        assert torch.equal(alone, together[index])
    monkeypatch.setattr(model, "replays", None)
    assert all(map(torch.equal, model_helpers.paged_logits(model, sequences, seed=9), together))


def test_greedy_decoding_in_one_batch_with_others(reference, tmp_path, model_helpers):
    """Beyond the window and the original context; every step feeds back what came out."""
    for name in ("llama-llama3", "llama-dynamic", "mistral-window", "gemma3"):
        model = reference(name)
        directory = tmp_path / name
        model.save_pretrained(directory)
        sequences = prompts(BASE["vocab_size"], (60, 3, 33))
        model.generation_config.eos_token_id = None  # it would be masked
        outputs = model_helpers.greedy(model_helpers.load(directory), sequences, 60)
        for output, prompt in zip(outputs, sequences, strict=True):
            whole = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60)
            assert output == whole[0, len(prompt) :].tolist(), name


def test_dynamic_scaling_goes_by_position(reference, tmp_path, model_helpers, monkeypatch):
    """Past max_position_embeddings decoding equals transformers' with a cache, and neighbours change nothing."""
    monkeypatch.setitem(
        CASES, "short", ("LlamaForCausalLM", {**CASES["llama-dynamic"][1], "max_position_embeddings": 32})
    )
    model = reference("short")
    model.save_pretrained(tmp_path)
    ours = model_helpers.load(tmp_path)
    assert ours.config.context_length == 128
    (sequence, other) = prompts(BASE["vocab_size"], (70, 50))
    cache, expected = transformers.DynamicCache(), []
    with torch.no_grad():
        expected.append(model(torch.tensor([sequence[:32]]), past_key_values=cache).logits[0])
        for token in sequence[32:]:
            expected.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0])
    actual, _ = model_helpers.paged_logits(ours, [sequence, other])
    assert_close(actual, torch.cat(expected))
    plain = reference("llama")
    plain.load_state_dict(model.state_dict())
    error = (actual - expected_logits(plain, sequence)).abs().amax(-1)
    assert error[:32].max() < 1e-3 < error[33:].min()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_bfloat16_is_as_near_float32_as_transformers_is(name, reference, tmp_path, model_helpers):
    model = reference(name).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    sequences = prompts(BASE["vocab_size"], (40, 70, 90))
    runner = model_helpers.PagedRunner(model_helpers.load(tmp_path, torch.bfloat16), 3, 90, torch.bfloat16)
    actual = torch.cat(list(runner.step(dict(enumerate(sequences))).values()))
    theirs = torch.cat([expected_logits(model, sequence) for sequence in sequences]).float()
    exact = torch.cat([expected_logits(model.float(), sequence) for sequence in sequences])
    assert actual.dtype is torch.float32
    assert (actual - exact).norm() < 1.5 * (theirs - exact).norm()


def test_the_backends_agree(reference, tmp_path, model_helpers):
    """The kernels and torch: the same model with the kernels switched off."""
    reference("gemma3").save_pretrained(tmp_path)
    sequences = prompts(BASE["vocab_size"])
    fast = model_helpers.paged_logits(model_helpers.load(tmp_path), sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding, "are_built", lambda: False)
        patch.setattr(binding, "kernels", lambda: pytest.fail("a kernel was called"))
        slow = model_helpers.paged_logits(model_helpers.load(tmp_path), sequences)
    for one, other in zip(fast, slow, strict=True):
        assert_close(one, other)
