"""config.json and generation_config.json -> ModelConfig."""

import json
import re

import pytest
import torch
import transformers

from specserve.models.config import load_config, parse_config
from specserve.models.hub import ModelError, ModelFiles
from specserve.models.layers.rotary import RotaryEmbedding, inverse_frequencies
from specserve.models.registry import MODELS

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GEMMA = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 32}


def parse(values=None, generation=None, **changes):
    fields = {**(LLAMA if values is None else values), **changes}
    return parse_config("config.json", {k: v for k, v in fields.items() if v != "absent"}, generation or {})


def load(directory, values, generation=None):
    (directory / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_config(ModelFiles(str(directory), None, directory, "hub"))


# Token ids


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        ([5, 2], None, (5, 2)),
        (None, 7, (7,)),
        (2, [2, 9, 4], (2, 9, 4)),
        ([3, 1], 8, (3, 1, 8)),
        (0, [0], (0,)),
        ("absent", "absent", ()),
    ],
)
def test_eos_ids_are_the_union(tmp_path, in_config, in_generation, expected):
    values = {k: v for k, v in {**LLAMA, "eos_token_id": in_config}.items() if v != "absent"}
    generation = None if in_generation == "absent" else {"eos_token_id": in_generation}
    assert load(tmp_path, values, generation).eos_token_ids == expected


@pytest.mark.parametrize("value", ["</s>", [1, "2"], 1.5, True])
def test_eos_ids_that_are_no_integers_are_refused(value):
    with pytest.raises(ModelError, match=rf"eos_token_id is {re.escape(repr(value))}; it must be a token id or a list"):
        parse(eos_token_id=value)
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is"):
        parse(generation={"eos_token_id": value})


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not supported; supported are gemma3_text, llama, mistral, qwen2",
        ),
        ({"model_type": "gemma3"}, "only its text-only form, gemma3_text, is"),
        ({"model_type": "absent"}, "model_type 'None' is not supported"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be a positive integer"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'; it must be a positive integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; it must be a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported are silu"),
        ({"torch_dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = .*gptq.* is not supported"),
        (
            {"rope_scaling": {"rope_type": "foo", "factor": 2.0}},
            "rope_scaling has the type 'foo'; supported are default",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling has the type 'longrope'"),
        ({"rope_parameters": {"rope_type": "bar"}}, "rope_parameters has the type 'bar'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling of type 'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "of type 'llama3' needs low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor is '2'; it must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor is 0.5; it must be at least 1"),
        ({"rope_scaling": 4}, "rope_scaling is 4; it must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
        ({"model_type": "qwen2", "layer_types": ["a"] * 3, "use_sliding_window": True}, "layer_types has 'a'"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"], "use_sliding_window": True},
            "layer_types has 1 entries for 3 layers",
        ),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ],
)
def test_what_cannot_be_served_is_named(changes, message):
    with pytest.raises(ModelError, match=f"^config.json: .*{message}") as caught:
        parse(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "not valid JSON"), (b"\xff\xfe{", "not valid JSON"), (b"3", "a int")]
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        load_config(ModelFiles("m", None, tmp_path, "hub"))


# Families


def test_each_family_has_a_model():
    from specserve.models.config import FAMILIES

    assert list(MODELS) == list(FAMILIES)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_type": "llama", "sliding_window": 5}, (None, None, None)),
        ({"model_type": "mistral"}, (4096, 4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "mistral", "sliding_window": 7}, (7, 7, 7)),
        ({"model_type": "qwen2", "sliding_window": 7}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True}, (None, None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
            (None, 7, 7),
        ),
        ({"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, (7, 7, 7)),
    ],
)
def test_sliding_windows(values, expected):
    assert parse(**values).sliding_windows == expected


def test_gemma3_in_its_older_and_newer_form():
    """Both forms of the rotary bases and of the pattern of layers give the same."""
    older = parse(
        GEMMA,
        sliding_window_pattern=3,
        rope_theta=2e6,
        rope_local_base_freq=3e4,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
    )
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    newer = parse(
        GEMMA,
        layer_types=types,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        },
    )
    assert older == newer
    assert older.sliding_windows == (32, 32, None, 32, 32, None, 32)
    assert older.local_rope is not None
    assert (older.rope.theta, older.local_rope.theta, older.local_rope.kind) == (2e6, 3e4, "default")
    assert older.tie_word_embeddings and older.head_dim == 256 and older.activation == "gelu_tanh"


def test_defaults_of_old_configurations():
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.rope.theta, config.torch_dtype) == (4, 16, 1e4, torch.float32)
    assert not config.tie_word_embeddings
    assert parse(torch_dtype="bfloat16").torch_dtype is torch.bfloat16
    assert parse(dtype="float16").torch_dtype is torch.float16


# Rotary embeddings


@pytest.mark.parametrize("name", ["rope_type", "type"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_both_names_of_the_type_and_of_the_field(name, field):
    scaling = {name: "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    theta = {"rope_theta": 5e5}
    config = parse(**{field: scaling | (theta if field == "rope_parameters" else {})}, **theta)
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("llama3", 5e5, 8.0)
    assert config.rope.original_max_position_embeddings == 64


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"type": "dynamic", "factor": 2.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}, 512),
    ],
)
def test_context_length(scaling, expected):
    assert parse(rope_scaling=scaling).context_length == expected


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 16},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "truncate": False},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_frequencies_at_real_sizes_equal_transformers(rope):
    """Head size 128, base 500000, positions up to 131071."""
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "max_position_embeddings": 131072}
    theirs = transformers.LlamaConfig(**sizes, rope_parameters={**rope, "rope_theta": 500000.0})
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    config = parse(**sizes, rope_scaling=rope, rope_theta=500000.0)
    torch.testing.assert_close(inverse_frequencies(config.rope, 128), module.inv_freq, rtol=1e-6, atol=0)
    ours = RotaryEmbedding(config.rope, 128, dtype=torch.float32, device=torch.device("cpu"))
    positions = torch.tensor([0, 1, 5, 4095, 8191, 131071])
    cos, sin = module(torch.zeros(1), positions[None])
    our_cos, our_sin = ours(positions)
    torch.testing.assert_close(our_cos[:, 0], cos[0], rtol=0, atol=2e-2)
    torch.testing.assert_close(our_sin[:, 0, 64:], sin[0, :, 64:], rtol=0, atol=2e-2)
    torch.testing.assert_close(our_sin[:4, 0, :64], -sin[0, :4, :64], rtol=0, atol=1e-3)
    torch.testing.assert_close(our_cos[:4, 0], cos[0, :4], rtol=0, atol=1e-3)
