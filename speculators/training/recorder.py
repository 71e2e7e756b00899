"""Hidden states of generated tokens, caught where a speculator would see them."""

import torch

from specserve.speculators.base import Draft, ProposalInput


class HiddenRecorder:
    """A speculator that drafts nothing and keeps what it is asked with.

    For each row slot: the tokens emitted and, for each, the state after the final norm that it was drawn from.
    """

    max_draft_tokens = 1
    num_parameters = 0

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def propose(self, rows: ProposalInput) -> Draft:
        """See Speculator."""
        hidden = rows.hidden.to("cpu", torch.bfloat16)
        for index, (slot, token_id) in enumerate(zip(rows.row_slots, rows.token_ids.tolist(), strict=True)):
            self._rows.setdefault(slot, []).append((token_id, hidden[index]))
        return Draft(rows.token_ids.new_empty(len(rows.row_slots), 0), [0] * len(rows.row_slots))

    def take(self, row_slot: int) -> tuple[list[int], torch.Tensor]:
        """Tokens and states [n, E] bfloat16 of a row, which is then empty."""
        kept = self._rows.pop(row_slot, [])
        states = torch.stack([state for _, state in kept]) if kept else torch.empty(0, 0, dtype=torch.bfloat16)
        return [token_id for token_id, _ in kept], states
