"""GGUF files: configuration, names, the layout of q and k, and damage."""

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GgufConfig

from specserve.models.config import load_config
from specserve.models.gguf import GGUFFile
from specserve.models.gguf_metadata import read_gguf_header
from specserve.models.hub import ModelError, ModelFiles
from specserve.models.layers.rotary import inverse_frequencies
from specserve.models.rope_config import RopeConfig
from specserve.models.tokenizer import load_tokenizer

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GEMMA = {**SIZES, "num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
CASES = {
    "llama": ("llama", "LlamaForCausalLM", SIZES),
    "llama-bias": ("llama", "LlamaForCausalLM", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", "LlamaForCausalLM", {**SIZES, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", SIZES),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {**SIZES, "head_dim": 16}),
    "gemma3": ("gemma3", "Gemma3ForCausalLM", GEMMA),
}


@torch.no_grad()
def reference(name: str):
    architecture, class_name, sizes = CASES[name]
    kind = getattr(transformers, class_name)
    torch.manual_seed(7)
    model = kind(kind.config_class(**sizes)).eval()
    for key, parameter in model.named_parameters():
        parameter.normal_(0.0, 0.2)
        if "norm" in key and architecture != "gemma3":
            parameter += 1.0
    return architecture, model


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter: the two halves of each head interleaved."""
    pairs = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weights.shape))


def add_metadata(writer: gguf.GGUFWriter, config, **extra) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6 if hasattr(config, "query_pre_attn_scalar") else config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None)
    if head_dim not in (None, config.hidden_size // config.num_attention_heads):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if hasattr(config, "query_pre_attn_scalar"):
        writer.add_sliding_window(config.sliding_window)
    for key, value in extra.items():
        getattr(writer, f"add_{key}")(value)


def write(path, name: str, kind: str = "F32", **extra):
    """Write a case as a GGUF file and give its transformers model."""
    architecture, model = reference(name)
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, model.config, **extra)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], model.config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.numpy().copy()
        if architecture == "llama" and "q_proj" in key:
            values = permute(values, model.config.num_attention_heads)
        if architecture == "llama" and "k_proj" in key:
            values = permute(values, model.config.num_key_value_heads)
        if architecture == "gemma3" and "norm" in key:
            values = values + 1.0
        target = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert target is not None, key
        writer.add_tensor(target, values if values.ndim == 1 else values.astype(kind.replace("F", "float")))
    finish(writer)
    return model


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def files(path) -> ModelFiles:
    return ModelFiles(str(path), None, path, "gguf")


@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 1e-5), ("F16", 1e-2)])
@pytest.mark.parametrize("name", CASES)
def test_the_same_model_as_safetensors_and_as_gguf(name, kind, tolerance, tmp_path, model_helpers):
    path = tmp_path / "model.gguf"
    write(path, name, kind).save_pretrained(tmp_path)
    from_hub, from_gguf = model_helpers.load(tmp_path), model_helpers.load(path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 160, length).tolist() for length in (30, 3, 17)]
    for one, other in zip(
        model_helpers.paged_logits(from_gguf, prompts), model_helpers.paged_logits(from_hub, prompts), strict=True
    ):
        assert (one - other).abs().max() < tolerance * other.abs().max()
    if kind == "F32":
        assert model_helpers.greedy(from_gguf, prompts, 64) == model_helpers.greedy(from_hub, prompts, 64)


def test_quantized_tensors_come_in_chunks_that_equal_the_whole(tmp_path, monkeypatch):
    """A part of a tensor (a shard's) and many chunks give what the package gives for all of it."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    weights = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    quantized = gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    for name in ("attn_q", "attn_k", "attn_v", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer)
    monkeypatch.setattr("specserve.models.gguf._CHUNK_ELEMENTS", 700)
    file = GGUFFile.open(path)
    whole = torch.from_numpy(gguf.dequantize(quantized, gguf.GGMLQuantizationType.Q8_0))
    for name, num_heads in (("q", 4), ("k", 2), ("v", None)):
        expected = whole
        if num_heads:
            expected = whole.view(num_heads, -1, 2, 96).transpose(1, 2).reshape(64, 96)
        out = torch.empty(32, 96)
        file.copy(f"model.layers.0.self_attn.{name}_proj.weight", out, (32, 0))
        assert torch.equal(out, expected[32:])
    out = torch.empty(64, 30)
    file.copy("model.layers.0.mlp.down_proj.weight", out, (0, 50))
    assert torch.equal(out, whole[:, 50:80])


def test_peak_memory(tmp_path, peak_growth):
    """Large tensors come in pieces: a whole one as float32 would add twice the bytes that it has here."""
    path = tmp_path / "a.gguf"
    sizes = {**SIZES, "vocab_size": 100_000, "hidden_size": 512, "num_hidden_layers": 1}
    writer = gguf.GGUFWriter(path, "llama")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    add_metadata(writer, model.config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for key, parameter in model.named_parameters():
        target = names.get_name(key, try_suffixes=(".weight",))
        writer.add_tensor(target, np.ones(tuple(parameter.shape), np.float16))
    finish(writer)
    growth, weights = peak_growth(path, "gguf", "bfloat16")
    assert weights > 200e6
    assert growth < 1.3 * weights


# Configuration


def test_end_tokens_of_the_metadata(tmp_path):
    write(tmp_path / "a.gguf", "llama", eos_token_id=5, eot_token_id=7, bos_token_id=3)
    config = load_config(files(tmp_path / "a.gguf"))
    assert (config.eos_token_ids, config.bos_token_id) == ((5, 7), 3)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_of_the_metadata(tmp_path, kind):
    write(
        tmp_path / "a.gguf",
        "llama",
        rope_scaling_type=gguf.RopeScalingType(kind),
        rope_scaling_factor=4.0,
        rope_scaling_orig_ctx_len=32,
    )
    rope = load_config(files(tmp_path / "a.gguf")).rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == (kind, 4.0, 32)


def test_llama3_scaling_comes_as_a_tensor(tmp_path):
    """The factors that converters write divide the frequencies as llama3's formula does."""
    scaled = RopeConfig(
        theta=10000.0, kind="llama3", factor=8.0, original_max_position_embeddings=64, max_position_embeddings=128
    )
    plain = RopeConfig(theta=10000.0, max_position_embeddings=128, original_max_position_embeddings=128)
    factors = inverse_frequencies(plain, 16) / inverse_frequencies(scaled, 16)
    assert factors.max() == 8.0 and factors.min() == 1.0
    path = tmp_path / "a.gguf"
    architecture, model = reference("llama")
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, model.config)
    writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.add_tensor("token_embd.weight", np.zeros((160, 64), np.float32))
    finish(writer)
    rope = load_config(files(path)).rope
    torch.testing.assert_close(inverse_frequencies(rope, 16), inverse_frequencies(scaled, 16))


def test_gemma3_layers(tmp_path):
    write(tmp_path / "a.gguf", "gemma3")
    config = load_config(files(tmp_path / "a.gguf"))
    assert config.sliding_windows == (8, 8, 8, 8, 8, None, 8)
    assert config.local_rope is not None
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)
    assert config.attention_scale == 32**-0.5


def test_a_rotation_of_a_part_of_the_head_is_refused(tmp_path):
    write(tmp_path / "a.gguf", "qwen3", rope_dimension_count=8, key_length=16)
    with pytest.raises(ModelError, match=r"a\.gguf: partial_rotary_factor other than 1"):
        load_config(files(tmp_path / "a.gguf"))


# Damage


def test_other_architectures_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "rwkv7")
    finish(writer)
    with pytest.raises(ModelError, match=r"a\.gguf: general\.architecture 'rwkv7' is not supported; supported are lla"):
        load_config(files(tmp_path / "a.gguf"))


@pytest.mark.parametrize("lost", [1, 5000])
def test_a_cut_file_is_refused(tmp_path, lost):
    path = tmp_path / "a.gguf"
    write(path, "llama")
    path.write_bytes(path.read_bytes()[:-lost])
    with pytest.raises(ModelError, match=r"a\.gguf: is truncated: tensor .* ends at byte \d+, but the file has \d+"):
        load_config(files(path))


def test_a_git_lfs_pointer_is_told(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 98765\n")
    with pytest.raises(ModelError, match="it is a Git-LFS pointer; fetch the file itself with: git lfs pull"):
        load_config(files(path))


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        ("blk.1.ffn_up.weight", None, r"missing model\.layers\.1\.mlp\.up_proj\.weight"),
        (None, "blk.0.ffn_gate_exps.weight", r"not known in this architecture blk\.0\.ffn_gate_exps\.weight"),
        ("token_embd.weight", None, "vocab_size is missing"),
    ],
)
def test_tensors_are_accounted_for(tmp_path, model_helpers, drop, add, message):
    path, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    model = write(path, "llama")
    writer = gguf.GGUFWriter(other, "llama")
    add_metadata(writer, model.config)
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name != drop:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    if add:
        writer.add_tensor(add, np.zeros((8, 4), np.float32))
    finish(writer)
    with pytest.raises(ModelError, match=message):
        model_helpers.load(other)


# Real models

PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, there was a 🦊 who"]


def assert_greedy_equal(path, theirs, tokenizer, model_helpers, num_tokens: int) -> None:
    theirs.generation_config.eos_token_id = None
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    outputs = model_helpers.greedy(model_helpers.load(path), prompts, num_tokens)
    for prompt, output in zip(prompts, outputs, strict=True):
        whole = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens)
        assert output == whole[0, len(prompt) :].tolist()


@torch.no_grad()
def test_the_demo_model_continues_as_in_transformers(demo_gguf, demo_tokenizer, model_helpers):
    """Its Llama with tensors that the gguf package dequantizes whole; its own loader of GGUF files takes minutes."""
    config = load_config(files(demo_gguf))
    assert (config.eos_token_ids, config.tie_word_embeddings, config.num_kv_heads) == ((2,), True, 3)
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    rope = {"rope_theta": 100000.0, "rope_type": "default"}
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **sizes, **heads, rope_parameters=rope, tie_word_embeddings=True, rms_norm_eps=1e-5
            )
        )
    theirs.to_empty(device="cpu").eval().tie_weights()
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    _, directory = read_gguf_header(demo_gguf)
    tensors = {tensor.name: tensor for tensor in directory}
    for key, parameter in theirs.named_parameters():
        tensor = tensors.pop(names.get_name(key, try_suffixes=(".weight",)))
        kind = gguf.GGMLQuantizationType(tensor.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = np.fromfile(demo_gguf, np.uint8, parameter.numel() // block * size, offset=tensor.offset)
        values = gguf.dequantize(raw, kind).reshape(tuple(parameter.shape))
        for part, num_heads in (("q_proj", 9), ("k_proj", 3)):
            if part in key:
                values = values.reshape(num_heads, 32, 2, -1).swapaxes(1, 2).reshape(values.shape)
        parameter.copy_(torch.from_numpy(values))
    assert not tensors
    assert_greedy_equal(demo_gguf, theirs, demo_tokenizer, model_helpers, 8)


def transformers_model(path):
    quantization = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=quantization
    ).eval()


@pytest.mark.slow
def test_the_demo_model_continues_as_in_transformers_own_loader(demo_gguf, demo_tokenizer, model_helpers):
    assert_greedy_equal(demo_gguf, transformers_model(demo_gguf), demo_tokenizer, model_helpers, 32)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gemma3_equals_transformers(gemma3_gguf, model_helpers):
    """Hidden states far past the window of 512, and greedy text.

    A few positions are ill-conditioned: there, transformers in float32 is 1e-4 away from itself in float64.
    """
    theirs, ours = transformers_model(gemma3_gguf), model_helpers.load(gemma3_gguf)
    tokenizer = load_tokenizer(files(gemma3_gguf), 262144)
    ids = tokenizer.encode(" ".join(f"{i} times {i + 3} is {i * (i + 3)}." for i in range(70)))
    assert len(ids) > 800
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "compute_logits", lambda hidden: hidden)
        (actual, _) = model_helpers.paged_logits(ours, [ids, ids[5:40]])
        expected = theirs.model(torch.tensor([ids])).last_hidden_state[0]
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 2e-5
    assert errors.max() < 1e-3
    assert_greedy_equal(gemma3_gguf, theirs, tokenizer, model_helpers, 32)
