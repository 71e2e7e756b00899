"""Draft models made by hand for usd: the demo model in another vocabulary, and tiny ones."""

import json
import random
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

from specserve.models.config import load_config
from specserve.models.hub import resolve_model
from specserve.models.tokenizer import load_tokenizer
from specserve.models.weights import open_weights

EMBEDDING = "model.embed_tokens.weight"
DROP_EVERY = 40  # of those that no other token is made of


def write_shuffled_demo(path: Path) -> tuple[Path, set[bytes]]:
    """The demo model with its vocabulary thinned and in another order; the bytes of the tokens that it lost."""
    files = resolve_model("demo")
    config = load_config(files)
    tokenizer = load_tokenizer(files, config.vocab_size)
    state = json.loads(tokenizer.backend.to_str())
    kept, lost = _thin(state, tokenizer)
    path.mkdir(parents=True)
    (path / "tokenizer.json").write_text(json.dumps(state))
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}')
    source, tensors = open_weights(files), {}
    for name, shape in source.shapes().items():
        tensors[name] = torch.empty(shape, dtype=torch.float32)
        source.copy(name, tensors[name], (0,) * len(shape))
    tensors[EMBEDDING] = tensors[EMBEDDING][torch.tensor(kept)].contiguous()
    save_file({name: tensor.to(torch.float16) for name, tensor in tensors.items()}, path / "model.safetensors")
    sizes = {
        "vocab_size": len(kept),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": True,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
    }
    (path / "config.json").write_text(json.dumps(sizes))
    return path, lost


def _thin(state: dict, tokenizer) -> tuple[list[int], set[bytes]]:
    """Change the tokenizer's state; the old id of each new one."""
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    added = {token["content"] for token in state["added_tokens"]}
    parts = {part for merge in merges for part in merge}
    leaves = [token for token in sorted(vocab) if token not in parts and token not in added and len(token) > 1]
    dropped = set(leaves[::DROP_EVERY])
    lost = {tokenizer.token_bytes(vocab[token]) for token in dropped}
    kept = [token for token in sorted(vocab, key=vocab.get) if token not in dropped]
    random.Random(3).shuffle(kept)
    old_ids = [vocab[token] for token in kept]
    new_ids = {token: index for index, token in enumerate(kept)}
    state["model"]["vocab"] = new_ids
    state["model"]["merges"] = [merge for merge in merges if "".join(merge) not in dropped]
    for token in state["added_tokens"]:
        token["id"] = new_ids[token["content"]]
    return old_ids, lost


def write_letters_tokenizer(path: Path) -> int:
    """A SentencePiece-like tokenizer of bytes and a few pieces; its number of tokens."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"etaoinshrdlu",
        "▁t",
        "he",
        "▁the",
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(
        vocab, [("▁", "t"), ("h", "e"), ("▁t", "he")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true}')
    return len(pieces)
