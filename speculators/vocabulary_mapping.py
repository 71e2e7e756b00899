"""Which tokens of a draft vocabulary are which of the target's."""

from collections.abc import Iterable, Mapping
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
        ascends = self.target_ids.is_meta or bool((self.target_ids[1:] > self.target_ids[:-1]).all())
        assert ascends, "target ids ascend, each once"

    @classmethod
    def of_subset(cls, target_ids: torch.Tensor) -> "VocabularyMapping":
        """A draft vocabulary whose token i is target_ids[i]."""
        return cls(torch.arange(len(target_ids), device=target_ids.device), target_ids)

    @classmethod
    def of_bytes(
        cls, target: Mapping[bytes, int], draft: Mapping[bytes, int], same: Iterable[tuple[int, int]] = ()
    ) -> "VocabularyMapping":
        """Tokens that stand for the same bytes, and pairs (target id, draft id) that are the same by their role.

        Each id of either side is in one pair at most; pairs of `same` come first.
        """
        pairs = dict(same)
        taken = set(pairs.values())
        for text, target_id in target.items():
            draft_id = draft.get(text)
            if draft_id is not None and target_id not in pairs and draft_id not in taken:
                pairs[target_id] = draft_id
        ordered = torch.tensor(sorted(pairs.items()), dtype=torch.int64).reshape(-1, 2)
        return cls(ordered[:, 1].contiguous(), ordered[:, 0].contiguous())

    def to_draft(self, token_ids: torch.Tensor, *, missing: int) -> torch.Tensor:
        """Target ids -> draft ids, `missing` for those that the draft vocabulary lacks; any shape."""
        where = torch.searchsorted(self.target_ids, token_ids).clamp(max=len(self.target_ids) - 1)
        return torch.where(self.target_ids[where] == token_ids, self.draft_ids[where], missing)

    def to_target(self, indices: torch.Tensor) -> torch.Tensor:
        """Places in this pair of arrays -> target ids."""
        return self.target_ids[indices]
