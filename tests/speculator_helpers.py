"""Writes checkpoints of speculators in the published formats, and computes them by their formulas in float64."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file


def mlp_tensors(*, vocab, emb, inner, n, tied=False, embeddings=None, seed=0, scale=0.3):
    """The tensors of an MLPSpeculator, as published (prefix `speculator.`)."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator) * scale

    tensors = {}
    for index in range(n):
        if not tied or index == 0:
            tensors[f"emb.{index}.weight"] = random(embeddings or vocab, inner)
            tensors[f"head.{index}.weight"] = random(vocab, inner)
            tensors[f"ln.{index}.weight"], tensors[f"ln.{index}.bias"] = 1 + random(inner), random(inner)
        if not tied or index < 2:
            tensors[f"proj.{index}.weight"] = random(inner, emb if index == 0 else inner)
    return {f"speculator.{name}": tensor for name, tensor in tensors.items()}


def mlp_config(*, vocab, emb, inner, n, tied=False, scaled=False):
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": vocab,
        "emb_dim": emb,
        "inner_dim": inner,
        "n_predict": n,
        "tie_weights": tied,
        "scale_input": scaled,
    }


def write(path: Path, config: dict, tensors: dict, name: str = "model.safetensors") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / name)
    else:
        torch.save(tensors, path / name)
    return path


def mlp_reference(tensors, hidden, token, config, steps=None, prefix="speculator."):
    """One row: logits of every stage, each fed with the likeliest token of the one before it."""
    n, inner, tied = config["n_predict"], config["inner_dim"] or config["emb_dim"], config["tie_weights"]
    get = {name.removeprefix(prefix): tensor.double() for name, tensor in tensors.items()}
    state_weight = 0.5 ** (0.5 / n)
    emb_weight = math.sqrt((1 - state_weight**2) * inner / 2)
    state = hidden.double()
    if config["scale_input"]:
        state = state / torch.sqrt((state**2).mean() + 1e-6) / math.sqrt(2)
    logits = []
    for index in range(steps or n):
        own, own_proj = (0, min(index, 1)) if tied else (index, index)
        state = get[f"proj.{own_proj}.weight"] @ state
        state = state_weight * state + emb_weight * get[f"emb.{own}.weight"][token]
        state = state / torch.sqrt((state**2).mean() + 1e-6) * get[f"ln.{own}.weight"] + get[f"ln.{own}.bias"]
        state = state * 0.5 * (1 + torch.erf(state / math.sqrt(2)))
        logits.append(get[f"head.{own}.weight"] @ state)
        token = int(logits[-1].argmax())
    return logits


def medusa_tensors(*, vocab, size, heads, layers, own_head=True, seed=0, scale=0.3):
    """The tensors of Medusa heads, as published: with own vocabulary heads (V1) or without (V2)."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator) * scale

    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = random(size, size)
            tensors[f"{head}.{layer}.linear.bias"] = random(size)
        if own_head:
            tensors[f"{head}.{layers}.weight"] = random(vocab, size)
    return tensors


def medusa_reference(tensors, hidden, head, layers, base_head):
    state = hidden.double()
    for layer in range(layers):
        inner = tensors[f"{head}.{layer}.linear.weight"].double() @ state + tensors[f"{head}.{layer}.linear.bias"]
        state = state + inner / (1 + torch.exp(-inner))
    return tensors.get(f"{head}.{layers}.weight", base_head).double() @ state


def shard(path: Path) -> None:
    """Split model.safetensors in two files with an index."""
    from safetensors.torch import load_file

    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
