"""GGUF files as a source of weights, under the names and in the layout that the Hub format uses."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from specserve.models.gguf_metadata import GGUFTensor, read_gguf_header
from specserve.models.hub import ModelError

# Dequantizing takes several times the memory of its result, so it goes by so many elements at once.
_CHUNK_ELEMENTS = 1 << 20

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
ROPE_FACTORS = "rope_freqs.weight"  # configuration in the form of a tensor
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """One GGUF file; tensors are read and dequantized on demand, a piece at a time."""

    path: Path
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]  # by Hub name; a tensor of unknown meaning keeps its own name

    @classmethod
    def open(cls, path: Path) -> "GGUFFile":
        """Read the header; ModelError if the file is corrupt, cut short, or of an architecture that isn't supported."""
        metadata, directory = read_gguf_header(path)
        architecture = metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path}: general.architecture {architecture!r} is not supported; supported are "
                f"{', '.join(ARCHITECTURES)}"
            )
        size = path.stat().st_size
        for tensor in directory:
            end = tensor.offset + _num_bytes(path, tensor)
            if end > size:
                raise ModelError(
                    f"{path}: is truncated: tensor {tensor.name!r} ends at byte {end}, but the file has {size}"
                )
        return cls(path, architecture, metadata, {_hub_name(architecture, t.name): t for t in directory})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight by its Hub name."""
        return {name: tensor.shape for name, tensor in self.tensors.items() if name != ROPE_FACTORS}

    def describe(self, name: str) -> str:
        """Where a tensor is, for error messages."""
        return f"{self.path} ({self.tensors[name].name})"

    def copy(self, name: str, out: torch.Tensor, offset: tuple[int, ...]) -> None:
        """Fill `out` with the part of tensor `name` that begins at `offset`.

        Architecture llama stores the rows of q and k so that rotary pairs are neighbours; here they come in the
        Hub's order, in which the halves of a head are pairs. For those tensors, `out` holds whole heads.
        """
        tensor = self.tensors[name]
        head_dim = self._interleaved_head_dim(name)
        step = max(1, _CHUNK_ELEMENTS // (math.prod(tensor.shape[1:]) * head_dim)) * head_dim
        done = 0
        for piece in self.rows(tensor, offset[0], out.shape[0], step):
            if head_dim > 1:
                pairs = piece.view(-1, head_dim // 2, 2, *piece.shape[1:])
                piece = pairs.transpose(1, 2).reshape(piece.shape)
            if self.architecture == "gemma3" and name.endswith("norm.weight"):
                piece = piece - 1.0  # the file has 1 + weight
            for dim in range(1, out.ndim):
                piece = piece.narrow(dim, offset[dim], out.shape[dim])
            out[done : done + len(piece)].copy_(piece)
            done += len(piece)

    def rows(self, tensor: GGUFTensor, start: int, count: int, step: int) -> Iterator[torch.Tensor]:
        """Rows start .. start + count as float32, at most `step` at a time."""
        kind = gguf.GGMLQuantizationType(tensor.kind)
        row_bytes = _num_bytes(self.path, tensor) // tensor.shape[0]
        for first in range(start, start + count, step):
            num_rows = min(step, start + count - first)
            raw = np.fromfile(self.path, np.uint8, num_rows * row_bytes, offset=tensor.offset + first * row_bytes)
            try:
                values = gguf.dequantize(raw, kind)
            except NotImplementedError as error:
                raise ModelError(f"{self.path}: tensor {tensor.name!r} has the type {kind.name}: {error}") from error
            yield torch.from_numpy(values.astype(np.float32, copy=False).reshape(num_rows, *tensor.shape[1:]))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key that belongs to the architecture."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def _interleaved_head_dim(self, name: str) -> int:
        """Rows of a head if they are interleaved, else 1."""
        projection = name.rpartition(".")[0].rpartition(".")[2]
        if self.architecture != "llama" or projection not in ("q_proj", "k_proj"):
            return 1
        heads = self.get("attention.head_count")
        if projection == "k_proj":
            heads = self.get("attention.head_count_kv", heads)
        return int(self.tensors[name].shape[0] // heads)


def _num_bytes(path: Path, tensor: GGUFTensor) -> int:
    try:
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    except ValueError as error:
        raise ModelError(f"{path}: tensor {tensor.name!r} has the unknown type {tensor.kind}") from error
    whole_blocks = block == 1 or (len(tensor.shape) > 1 and tensor.shape[-1] % block == 0)
    if 0 in tensor.shape or not tensor.shape or not whole_blocks:
        raise ModelError(f"{path}: tensor {tensor.name!r} of shape {tensor.shape} isn't rows of blocks of {block}")
    return math.prod(tensor.shape) // block * int(block_bytes)


def _hub_name(architecture: str, name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    names = _LAYER_NAMES | (_GEMMA_LAYER_NAMES if architecture == "gemma3" else {})
    if layer is not None and layer[2] in names:
        return f"model.layers.{layer[1]}.{names[layer[2]]}.{suffix}"
    return f"{_GLOBAL_NAMES[stem]}.{suffix}" if stem in _GLOBAL_NAMES else name
