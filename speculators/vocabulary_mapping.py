"""Which tokens of a draft vocabulary are which of the target's."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class VocabularyMapping:
    """One pair of id arrays, [n] int64: draft_ids[i] and target_ids[i] are the same token; target_ids ascends.

    Logits are gathered, ids mapped and laws scattered by this pair alone, so that no two orders can differ.
    """

    draft_ids: torch.Tensor
    target_ids: torch.Tensor

    def __post_init__(self) -> None:
        assert self.draft_ids.shape == self.target_ids.shape and self.target_ids.ndim == 1
        assert bool((self.target_ids[1:] > self.target_ids[:-1]).all()), "target ids ascend, each once"

    @classmethod
    def of_subset(cls, target_ids: torch.Tensor) -> "VocabularyMapping":
        """A draft vocabulary whose token i is target_ids[i]."""
        return cls(torch.arange(len(target_ids), device=target_ids.device), target_ids)

    def to_draft(self, token_ids: torch.Tensor, *, missing: int) -> torch.Tensor:
        """Target ids -> draft ids, `missing` for those that the draft vocabulary lacks; any shape."""
        where = torch.searchsorted(self.target_ids, token_ids).clamp(max=len(self.target_ids) - 1)
        return torch.where(self.target_ids[where] == token_ids, self.draft_ids[where], missing)

    def to_target(self, indices: torch.Tensor) -> torch.Tensor:
        """Places in this pair of arrays -> target ids."""
        return self.target_ids[indices]
