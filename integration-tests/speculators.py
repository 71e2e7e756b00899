"""Speculators made by hand for the demo model and the tiny one, in the published formats."""

import itertools
import json
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file


def _write(path: Path, config: dict, tensors: dict[str, torch.Tensor], name: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / name)
    return path


def write_bigram_mlp(path: Path, texts: list[list[int]], *, vocab: int, size: int, n: int) -> Path:
    """An MLP speculator that drafts the token that most often followed the last one in `texts`.

    Its embedding of a known token has one large entry, which the head turns into the next token; the state is not
    looked at. It knows only the tokens of the texts.
    """
    follows: dict[int, Counter] = {}
    for text in texts:
        for first, second in itertools.pairwise(text):
            follows.setdefault(first, Counter())[second] += 1
    known = sorted({token for text in texts for token in text})
    index = {token: i for i, token in enumerate(known)}
    inner = len(known) + 1
    embedding, head = torch.eye(inner), torch.zeros(len(known), inner)
    for first, counts in follows.items():
        head[index[counts.most_common(1)[0][0]], index[first]] = 1.0
    tensors = {"draft_vocabulary.target_ids": torch.tensor(known)}
    tensors |= {"emb.0.weight": embedding, "head.0.weight": head}
    tensors |= {"ln.0.weight": torch.ones(inner), "ln.0.bias": torch.zeros(inner)}
    tensors |= {"proj.0.weight": torch.zeros(inner, size), "proj.1.weight": torch.zeros(inner, inner)}
    config = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]}
    config |= {"vocab_size": vocab, "emb_dim": size, "inner_dim": inner, "n_predict": n, "tie_weights": True}
    named = {f"speculator.{name}": tensor for name, tensor in tensors.items()}
    return _write(path, config, named, "model.safetensors")


def write_random_mlp(path: Path, *, vocab: int, size: int, n: int, inner: int = 16, broken: bool = False) -> Path:
    """An MLP speculator that is hardly ever right; a broken one has NaN in its second head."""
    torch.manual_seed(3)
    tensors = {}
    for i in range(n):
        tensors |= {f"emb.{i}.weight": torch.randn(vocab, inner), f"head.{i}.weight": torch.randn(vocab, inner)}
        tensors |= {f"ln.{i}.weight": torch.ones(inner), f"ln.{i}.bias": torch.randn(inner)}
        tensors[f"proj.{i}.weight"] = torch.randn(inner, size if i == 0 else inner)
    if broken:
        tensors["head.1.weight"][7] = torch.nan
    config = {"model_type": "mlp_speculator", "vocab_size": vocab, "emb_dim": size, "inner_dim": inner, "n_predict": n}
    return _write(path, config, tensors, "model.safetensors")


def write_constant_medusa(path: Path, token: int, *, size: int, heads: int) -> Path:
    """Medusa heads that always draft one token, through a draft vocabulary of that token alone."""
    tensors = {"draft_vocabulary.target_ids": torch.tensor([token])}
    tensors |= {f"{head}.0.weight": torch.ones(1, size) for head in range(heads)}
    config = {"medusa_num_heads": heads, "medusa_num_layers": 0}
    return _write(path, config, tensors, "medusa_lm_head.safetensors")


def write_repeating_medusa(path: Path, *, size: int, heads: int) -> Path:
    """Medusa heads without effect on the state: each drafts the token that was likeliest at the last position."""
    tensors = {}
    for head in range(heads):
        tensors |= {f"{head}.0.linear.weight": torch.zeros(size, size), f"{head}.0.linear.bias": torch.zeros(size)}
    return _write(path, {"medusa_num_heads": heads, "medusa_num_layers": 1}, tensors, "medusa_lm_head.safetensors")
