"""Lossless verification of drafts that were drawn from a law of their own (Leviathan et al., arXiv 2211.17192;
Chen et al., arXiv 2302.01318).

At each position with target law p and draft law q, both over the whole vocabulary: draft x is accepted with
probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw from (p - q)+, normalised; behind the
last accepted one comes a draw from p. The emitted tokens have exactly the target's law, whatever q is, as long as it
is the law that x was drawn from.
"""

import torch


def acceptance(p: torch.Tensor, q: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
    """Laws p, q [K, V] and drafts [K] -> the probability [K] of accepting each.

    It is 0 where q(x) = 0, as x can't have been drawn then, and where p is NaN.
    """
    p_draft = p.gather(1, draft_ids[:, None])[:, 0]
    q_draft = q.gather(1, draft_ids[:, None])[:, 0]
    return torch.where(q_draft > 0, p_draft / q_draft, 0.0).nan_to_num(nan=0.0).clamp(max=1.0)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Laws [..., V] -> (p - q)+, normalised; p where nothing is left, which is where p = q up to rounding."""
    left = (p - q).clamp(min=0.0)
    total = left.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def num_accepted(probabilities: torch.Tensor, uniforms: torch.Tensor) -> int:
    """Drafts before the first one that is rejected; uniforms [K] in [0, 1)."""
    rejected = (uniforms >= probabilities).nonzero()
    return int(rejected[0, 0]) if len(rejected) else len(probabilities)
