"""The metadata of a GGUF file in the words of config.json."""

from collections.abc import Mapping
from typing import Any

from specserve.models.gguf import ROPE_FACTORS, GGUFFile

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}


def hub_config(file: GGUFFile) -> dict[str, Any]:
    """What config.json would hold; None for what the file doesn't say."""
    get, tensors = file.get, file.tensors
    heads, hidden = get("attention.head_count"), get("embedding_length")
    embedding = tensors.get("model.embed_tokens.weight")
    head_dim = get("attention.key_length", hidden // heads if hidden and heads else None)
    config = {
        "model_type": _MODEL_TYPES[file.architecture],
        "vocab_size": embedding.shape[0] if embedding is not None else get("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "qkv_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(file),
    }
    if (rotated := get("rope.dimension_count")) not in (None, head_dim):
        config["partial_rotary_factor"] = rotated / head_dim
    return config | (_gemma3_config(file, config) if file.architecture == "gemma3" else {})


def rope_factors(file: GGUFFile) -> tuple[float, ...] | None:
    """Divisors of the rotary frequencies [D/2], the form in which files hold llama3's scaling."""
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    (values,) = file.rows(tensor, 0, tensor.shape[0], tensor.shape[0])
    return tuple(values.flatten().tolist())


def _eos_token_ids(file: GGUFFile) -> list[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return [i for key in keys if (i := file.metadata.get(f"tokenizer.ggml.{key}")) is not None]


def _rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
    kind = file.get("rope.scaling.type")
    factor = file.get("rope.scaling.factor", file.get("rope.scale_linear"))
    if kind == "none" or (kind is None and factor in (None, 0, 1)):
        return None
    return {
        "rope_type": kind or "linear",
        "factor": factor,
        "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
        "beta_fast": file.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": file.get("rope.scaling.yarn_beta_slow"),
    }


def _gemma3_config(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = file.get("attention.key_length", 256)
    found: dict[str, Any] = {
        "head_dim": head_dim,
        "sliding_window": file.get("attention.sliding_window"),
        "rope_local_base_freq": file.get("rope.freq_base_swa"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "query_pre_attn_scalar": head_dim,
    }
    # Files don't hold the scale; llama.cpp, too, tells the 27B model by its number of layers.
    if config["num_hidden_layers"] == 62:
        found["query_pre_attn_scalar"] = config["hidden_size"] / config["num_attention_heads"]
    pattern = file.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        found["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    else:
        found["sliding_window_pattern"] = pattern
    return found
