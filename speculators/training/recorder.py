"""Hidden states of generated tokens, caught where a speculator would see them."""

from collections.abc import Callable

import torch

from specserve.speculators.base import Draft, ProposalInput, Speculator


class HiddenRecorder(Speculator):
    """A speculator that drafts nothing and keeps what it is asked with.

    For each request: the tokens emitted and, for each, the state after the final norm that it was drawn from.
    """

    max_draft_tokens = 1
    num_parameters = 0

    def __init__(self) -> None:
        self.requests: Callable[[], dict[int, int]] = dict  # row slot -> request, at this moment
        self._kept: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def propose(self, rows: ProposalInput) -> Draft:
        """See Speculator."""
        requests, hidden = self.requests(), rows.hidden.to("cpu", torch.bfloat16)
        for index, (slot, token_id) in enumerate(zip(rows.row_slots, rows.token_ids.tolist(), strict=True)):
            self._kept.setdefault(requests[slot], []).append((token_id, hidden[index]))
        return Draft(rows.token_ids.new_empty(len(rows.row_slots), 0), [0] * len(rows.row_slots))

    def take(self, request_id: int) -> tuple[list[int], torch.Tensor]:
        """Tokens and states [n, E] bfloat16 of a request, which is then forgotten."""
        kept = self._kept.pop(request_id, [])
        states = torch.stack([state for _, state in kept]) if kept else torch.empty(0, 0, dtype=torch.bfloat16)
        return [token_id for token_id, _ in kept], states
