"""What a model is made of: one frozen dataclass for all families, read from config.json or GGUF metadata."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from specserve.models.gguf import GGUFFile
from specserve.models.gguf_config import hub_config, rope_factors
from specserve.models.hub import CONFIG_FILE, ModelError, ModelFiles, read_json
from specserve.models.rope_config import RopeConfig, read_rope

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float32}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and variants of a decoder, over all ranks.

    `sliding_windows` has an entry a layer: the window in tokens (the token itself counts), or None for full
    attention. `local_rope` is the rotary embedding of the layers with a window where it differs from `rope`.
    """

    model_type: str
    vocab_size: int  # rows of the embedding; the tokenizer may have fewer entries
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # tokens; see also context_length
    rope: RopeConfig
    local_rope: RopeConfig | None
    sliding_windows: tuple[int | None, ...]
    attention_scale: float  # factor of q·k
    activation: str  # silu | gelu_tanh
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    torch_dtype: torch.dtype  # of the checkpoint

    @property
    def context_length(self) -> int:
        """Tokens that the model was made for, with its rope scaling."""
        rope = self.rope
        if rope.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * rope.factor)
        if rope.kind == "yarn":
            return max(self.max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
        return self.max_position_embeddings


class Fields:
    """Typed access to a configuration; errors name the source and the field."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; `default` stands for a field that is absent or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.source}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.source}: {name} is {value!r}; it must be a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        """A number; `default` stands for a field that is absent or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.source}: {name} is {value!r}; it must be a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean; `default` stands for a field that is absent or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"{self.source}: {name} is {value!r}; it must be true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Token ids given as one integer, a list, or not at all."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelError(f"{self.source}: {name} is {value!r}; it must be a token id or a list of them")
        return tuple(ids)

    def refuse(self, *names: str) -> None:
        """Refuse what would change the results and isn't implemented."""
        for name in names:
            if self.values.get(name):
                raise ModelError(f"{self.source}: {name} = {self.values[name]!r} is not supported")


def load_config(files: ModelFiles) -> ModelConfig:
    """Read the configuration of a model.

    EOS ids are the union of config.json's and generation_config.json's, or of a GGUF file's end-of-sequence,
    end-of-turn and end-of-message tokens. Raises ModelError naming the field that is missing, wrong or not supported.
    """
    if files.kind == "gguf":
        file = GGUFFile.open(files.path)
        config = parse_config(str(files.path), hub_config(file), {})
        factors = rope_factors(file)
        return config if factors is None else replace(config, rope=replace(config.rope, frequency_factors=factors))
    path = files.path / CONFIG_FILE
    generation_path = files.path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return parse_config(str(path), read_json(path), generation)


def parse_config(source: str, values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """A ModelConfig of the contents of config.json and generation_config.json; `source` is named in errors."""
    fields = Fields(source, values)
    model_type = str(values.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        hint = "; only its text-only form, gemma3_text, is" if model_type == "gemma3" else ""
        raise ModelError(
            f"{source}: model_type {model_type!r} is not supported{hint}; supported are {', '.join(sorted(FAMILIES))}"
        )
    fields.refuse("quantization_config", "is_encoder_decoder", "add_cross_attention")
    config = family(fields)
    eos_ids = fields.token_ids("eos_token_id") + Fields("generation_config.json", generation).token_ids("eos_token_id")
    config = replace(config, eos_token_ids=tuple(dict.fromkeys(eos_ids)))
    _check(source, config)
    return config


def _check(source: str, config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{source}: num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads "
            f"{config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelError(f"{source}: head_dim {config.head_dim} is odd; rotary embeddings need pairs")
    if len(config.sliding_windows) != config.num_layers:
        raise ModelError(
            f"{source}: layer_types has {len(config.sliding_windows)} entries for {config.num_layers} layers"
        )


def _decoder(fields: Fields, **overrides: Any) -> ModelConfig:
    """What the families share; `overrides` are what one of them does differently."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    head_dim: int = overrides.get("head_dim") or fields.integer("head_dim", hidden_size // num_heads)
    max_positions = fields.integer("max_position_embeddings", 2048)
    dtype = str(fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32")
    if dtype not in _DTYPES:
        raise ModelError(f"{fields.source}: dtype {dtype!r} is not supported; supported are {', '.join(_DTYPES)}")
    shared = {
        "model_type": fields.values["model_type"],
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": max_positions,
        "local_rope": None,
        "sliding_windows": (None,) * num_layers,
        "attention_scale": head_dim**-0.5,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "bos_token_id": next(iter(fields.token_ids("bos_token_id")), None),
        "eos_token_ids": (),
        "torch_dtype": _DTYPES[dtype],
    }
    if "activation" not in overrides:
        shared["activation"] = _activation(fields, "hidden_act", "silu")
    if "rope" not in overrides:
        shared["rope"] = read_rope(fields.source, fields.values, max_positions)
    return ModelConfig(**(shared | overrides))


def _activation(fields: Fields, name: str, default: str) -> str:
    value = fields.values.get(name) or default
    if value not in _ACTIVATIONS:
        raise ModelError(f"{fields.source}: {name} {value!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _llama(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    # Converters of GGUF files know of biases on q, k and v alone.
    qkv_bias = fields.flag("qkv_bias", bias)
    return _decoder(fields, qkv_bias=qkv_bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _mistral(fields: Fields) -> ModelConfig:
    window = None
    if fields.values.get("sliding_window", 4096) is not None:
        window = fields.integer("sliding_window", 4096)
    return _decoder(fields, sliding_windows=(window,) * fields.integer("num_hidden_layers"))


def _qwen2(fields: Fields) -> ModelConfig:
    return _decoder(fields, qkv_bias=True, sliding_windows=_qwen_windows(fields))


def _qwen3(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    windows, head_dim = _qwen_windows(fields), fields.integer("head_dim", 128)
    return _decoder(fields, head_dim=head_dim, qkv_bias=bias, output_bias=bias, sliding_windows=windows)


def _gemma3(fields: Fields) -> ModelConfig:
    fields.refuse("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
    head_dim, bias = fields.integer("head_dim", 256), fields.flag("attention_bias")
    pattern = fields.integer("sliding_window_pattern", 6)
    window = fields.integer("sliding_window", 4096)
    num_layers = fields.integer("num_hidden_layers")
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    max_positions = fields.integer("max_position_embeddings", 131_072)
    nested = fields.values.get("rope_parameters") or {}
    rope = {**fields.values, "rope_parameters": nested.get("full_attention")}
    local_rope = {"rope_parameters": nested.get("sliding_attention")}
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    return _decoder(
        fields,
        activation=_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope=read_rope(fields.source, rope, max_positions, default_theta=1_000_000.0),
        local_rope=read_rope(fields.source, local_rope, max_positions, default_theta=local_theta),
        sliding_windows=tuple(_windows(fields, default, window)),
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    num_layers = fields.integer("num_hidden_layers")
    if not fields.flag("use_sliding_window"):
        return (None,) * num_layers
    first = int(fields.number("max_window_layers", 28))
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return tuple(_windows(fields, default, fields.integer("sliding_window", 4096)))


def _windows(fields: Fields, default: list[str], window: int) -> Iterator[int | None]:
    for kind in fields.values.get("layer_types") or default:
        if kind not in ("sliding_attention", "full_attention"):
            raise ModelError(
                f"{fields.source}: layer_types has {kind!r}; supported are sliding_attention and full_attention"
            )
        yield window if kind == "sliding_attention" else None


FAMILIES: Mapping[str, Callable[[Fields], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3,
}
