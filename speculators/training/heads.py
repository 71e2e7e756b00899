"""Trainable speculators: the formulas of mlp.py and medusa.py in plain torch, and the published files they become.

`forward(states [B, E], tokens [B], following [B, n])` gives the logits of each head, [B, Vd] n times: token b is the
one drawn from state b, following[b] the ones after it, which the chain of an MLP is fed with in training. `draft`
feeds it with its own likeliest tokens, as serving does. Ids are those of the draft vocabulary; Vd stands for any
other token.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specserve.speculators.checkpoint import DRAFT_VOCABULARY
from specserve.speculators.mlp import EPS
from specserve.speculators.mlp import PREFIX as MLP_PREFIX

Tensors = dict[str, torch.Tensor]


class TrainableSpeculator(nn.Module):
    """What the trainer needs of either kind."""

    file_name: str
    num_heads: int

    def forward(self, states: torch.Tensor, tokens: torch.Tensor, following: torch.Tensor) -> list[torch.Tensor]:
        """See the module."""
        raise NotImplementedError

    def start_from(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Begin with the target's embedding and head of the drafted tokens, [Vd, E] each."""
        raise NotImplementedError

    def draft(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The greedy chain, [B, n] draft ids."""
        raise NotImplementedError

    def export(self, target_ids: torch.Tensor | None) -> tuple[Tensors, dict[str, Any]]:
        """Tensors and config.json of the published format; with a draft vocabulary, its ids as one tensor more."""
        raise NotImplementedError


class TrainableMLP(TrainableSpeculator):
    """MLPSpeculator with tied weights: one embedding, head and norm, two projections."""

    file_name = "model.safetensors"

    def __init__(
        self, *, hidden_size: int, vocab_size: int, num_drafted: int, inner_dim: int, num_heads: int, has_unknown: bool
    ) -> None:
        """num_drafted: Vd; has_unknown: a row more of the embedding, for tokens outside of it."""
        super().__init__()
        self.vocab_size, self.hidden_size, self.inner_dim, self.num_heads = (
            vocab_size,
            hidden_size,
            inner_dim,
            num_heads,
        )
        std = inner_dim**-0.5
        self.embedding = nn.Parameter(torch.randn(num_drafted + has_unknown, inner_dim) * std)
        self.head = nn.Parameter(torch.randn(num_drafted, inner_dim) * std)
        self.first = nn.Parameter(torch.randn(inner_dim, hidden_size) * hidden_size**-0.5)
        self.further = nn.Parameter(torch.randn(inner_dim, inner_dim) * std)
        self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(inner_dim)), nn.Parameter(torch.zeros(inner_dim))
        self.state_weight = 0.5 ** (0.5 / num_heads)
        self.embedding_weight = math.sqrt((1 - self.state_weight**2) * inner_dim / 2)

    @torch.no_grad()
    def start_from(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Begin with the target's embedding and head of the drafted tokens [Vd, E], in their principal directions."""
        for parameter, rows in ((self.embedding, embedding), (self.head, head)):
            size = min(self.inner_dim, *rows.shape)
            _, _, directions = torch.linalg.svd(rows - rows.mean(dim=0), full_matrices=False)
            projected = (rows - rows.mean(dim=0)) @ directions[:size].T
            rms = projected.square().mean().sqrt()
            parameter[: len(rows), :size] = projected / rms * self.inner_dim**-0.5

    def _stage(self, index: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        projected = F.linear(state, self.further if index else self.first)
        mixed = self.state_weight * projected + self.embedding_weight * F.embedding(tokens, self.embedding)
        state = F.gelu(F.rms_norm(mixed, mixed.shape[-1:], self.norm_weight, EPS) + self.norm_bias)
        return state, F.linear(state, self.head)

    def forward(self, states: torch.Tensor, tokens: torch.Tensor, following: torch.Tensor) -> list[torch.Tensor]:
        """See the module."""
        chain = torch.cat([tokens[:, None], following[:, :-1].clamp(min=0)], dim=1)
        logits = []
        for index in range(self.num_heads):
            states, scores = self._stage(index, states, chain[:, index])
            logits.append(scores)
        return logits

    def draft(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See TrainableSpeculator."""
        drafted = []
        for index in range(self.num_heads):
            states, scores = self._stage(index, states, tokens)
            tokens = scores.argmax(dim=1)
            drafted.append(tokens)
        return torch.stack(drafted, dim=1)

    def export(self, target_ids: torch.Tensor | None) -> tuple[Tensors, dict[str, Any]]:
        """See TrainableSpeculator."""
        tensors: Tensors = {"emb.0.weight": self.embedding, "head.0.weight": self.head, "proj.0.weight": self.first}
        tensors |= {"proj.1.weight": self.further} if self.num_heads > 1 else {}
        tensors |= {"ln.0.weight": self.norm_weight, "ln.0.bias": self.norm_bias}
        tensors |= {} if target_ids is None else {DRAFT_VOCABULARY: target_ids}
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": self.vocab_size,
            "emb_dim": self.hidden_size,
            "inner_dim": self.inner_dim,
            "n_predict": self.num_heads,
            "n_candidates": 1,
            "top_k_tokens_per_head": [1] * self.num_heads,
            "tie_weights": True,
            "scale_input": False,
        }
        return {MLP_PREFIX + name: tensor for name, tensor in tensors.items()}, config


class TrainableMedusa(TrainableSpeculator):
    """Medusa heads of one residual block and a vocabulary head of their own each (the first published format)."""

    file_name = "medusa_lm_head.safetensors"

    def __init__(self, *, hidden_size: int, num_drafted: int, num_heads: int) -> None:
        """num_drafted: Vd."""
        super().__init__()
        self.num_heads = num_heads
        self.weights = nn.Parameter(torch.zeros(num_heads, hidden_size, hidden_size))
        self.biases = nn.Parameter(torch.zeros(num_heads, hidden_size))
        self.heads = nn.Parameter(torch.randn(num_heads, num_drafted, hidden_size) * hidden_size**-0.5)

    @torch.no_grad()
    def start_from(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Begin with the target's head of the drafted tokens [Vd, E]; the embedding has no part."""
        self.heads[:] = head

    def forward(self, states: torch.Tensor, tokens: torch.Tensor, following: torch.Tensor) -> list[torch.Tensor]:
        """See the module; heads look at the state alone."""
        return [
            F.linear(states + F.silu(F.linear(states, weight, bias)), head)
            for weight, bias, head in zip(self.weights, self.biases, self.heads, strict=True)
        ]

    def draft(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See TrainableSpeculator."""
        return torch.stack([logits.argmax(dim=1) for logits in self(states, tokens, tokens)], dim=1)

    def export(self, target_ids: torch.Tensor | None) -> tuple[Tensors, dict[str, Any]]:
        """See TrainableSpeculator."""
        tensors = {}
        for index in range(self.num_heads):
            tensors[f"{index}.0.linear.weight"] = self.weights[index]
            tensors[f"{index}.0.linear.bias"] = self.biases[index]
            tensors[f"{index}.1.weight"] = self.heads[index]
        tensors |= {} if target_ids is None else {DRAFT_VOCABULARY: target_ids}
        return tensors, {"medusa_num_heads": self.num_heads, "medusa_num_layers": 1}
