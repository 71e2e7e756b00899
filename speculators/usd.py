"""Universal speculative decoding: a draft model whose tokenizer may be another (arXiv 2502.05202).

TLI, token-level intersection: the draft's head is cut to the tokens that stand for the same bytes in both vocabularies,
so that what it drafts are tokens of the target; its law is that of the whole head, restricted and normalised.

SLEM, string-level exact match: the draft writes text in its own tokens, greedily, and the target's tokenizer makes
tokens of it, behind those that are there already.

Where both vocabularies are the same there is nothing to restrict. In every case the draft reads the text of the request
in its own tokens (translator.py).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specserve.models.sampling.row_ops import argmax, log_z
from specserve.speculators.base import Draft, ProposalInput, RowsRoom, Speculator, UsdMethod
from specserve.speculators.confidence import Confidence
from specserve.speculators.draft_model import DraftModel, Logits
from specserve.speculators.retokenizer import WINDOW, Retokenizer
from specserve.speculators.translator import DraftContext, Translator
from specserve.speculators.vocabulary_mapping import VocabularyMapping

METHODS = (UsdMethod.TLI, UsdMethod.SLEM)


@dataclass(slots=True)
class _Row:
    """One request."""

    method: UsdMethod
    pending: list[int]  # tokens of the target that the context lacks
    context: DraftContext = field(default_factory=DraftContext)
    last_ids: list[int] = field(default_factory=list)  # the target's, as many as SLEM tokenizes again
    drafted: list[int] = field(default_factory=list)  # at last, in tokens of the target
    chain: "_Chain | None" = None  # behind that


@dataclass(slots=True)
class _Chain:
    """A draft in the making."""

    length: int  # wanted, in tokens
    draft_ids: list[int] = field(default_factory=list)
    target_ids: list[int] = field(default_factory=list)  # the same tokens (TLI)
    confidences: list[float] = field(default_factory=list)
    chance: float = 1.0  # that all of it is right


class UsdSpeculator(Speculator):
    """Several rows draft in one forward of the draft model."""

    def __init__(
        self,
        model: DraftModel,
        mapping: VocabularyMapping | None,
        translator: Translator,
        *,
        method: UsdMethod,
        max_draft_tokens: int,
        num_parameters: int,
    ) -> None:
        """model: with a head for each of METHODS."""
        self.method: UsdMethod = method
        self.mapping, self.translator = mapping, translator
        self.max_draft_tokens, self.num_parameters = max_draft_tokens, num_parameters
        self._model = model
        self._to_target = Retokenizer(translator.target, translator.target.ids_by_bytes)
        self._rows: dict[int, _Row] = {}
        self._confidence = {method: Confidence() for method in METHODS}

    def kv_bytes_per_token(self) -> int:
        """See Speculator."""
        return self._model.kv_bytes_per_token()

    def allocate(self, room: RowsRoom) -> None:
        """See Speculator."""
        self._model.allocate(room)

    def admit(self, row_slot: int, token_ids: list[int], method: UsdMethod | None = None) -> None:
        """See Speculator."""
        self._rows[row_slot] = _Row(method or self.method, list(token_ids))

    def accept(self, row_slot: int, token_ids: list[int]) -> None:
        """See Speculator."""
        row = self._rows[row_slot]
        same = 0
        while same < min(len(token_ids), len(row.drafted)) and token_ids[same] == row.drafted[same]:
            same += 1
        if row.chain is not None:
            self._confidence[row.method].observe(row.chain.confidences, self._num_right(row, row.chain, same))
        row.drafted, row.chain = [], None
        row.pending += token_ids

    def release(self, row_slot: int) -> None:
        """See Speculator."""
        self._rows.pop(row_slot, None)
        self._model.release(row_slot)

    def propose(self, rows: ProposalInput) -> Draft:
        """See Speculator."""
        rows.check()
        states = [self._rows[row_slot] for row_slot in rows.row_slots]
        num_behind = 0
        for row_slot, row in zip(rows.row_slots, states, strict=True):
            num_behind = max(num_behind, len(row.pending))
            self._follow(row_slot, row)
        chains = [_Chain(min(length, self.max_draft_tokens)) for length in rows.max_lengths]
        self._run(rows, states, chains)
        self._model.end()
        drafts = [self._finish(row, chain) for row, chain in zip(states, chains, strict=True)]
        longest = max(map(len, drafts))
        padded = torch.tensor([draft + [0] * (longest - len(draft)) for draft in drafts], dtype=torch.int64)
        is_routine = num_behind <= self.max_draft_tokens + 1
        return Draft(padded.to(rows.token_ids.device), [len(draft) for draft in drafts], is_routine=is_routine)

    def _follow(self, row_slot: int, row: _Row) -> None:
        """Take in what was emitted since the last draft."""
        self.translator.extend(row.context, row.pending)
        row.last_ids = (row.last_ids + row.pending)[-WINDOW:]
        row.pending = []
        self._model.continue_as(row_slot, row.context.token_ids, METHODS.index(row.method))

    def _run(self, rows: ProposalInput, states: Sequence[_Row], chains: Sequence[_Chain]) -> None:
        """Lengthen the chains, a round of all rows at a time, as far as that pays."""
        active, logits = self._model.catch_up(
            rows.row_slots, [chain.length for chain in chains], [row.context.num_final for row in states]
        )
        while active:
            self._choose(rows, states, chains, active, logits)
            alive = [index for index in active if len(chains[index].draft_ids) < chains[index].length]
            alive = [index for index in alive if chains[index].draft_ids[-1] not in self.translator.draft.special_ids]
            averages = (self._confidence[states[index].method].average for index in alive)
            if sum(chains[i].chance * average for i, average in zip(alive, averages, strict=True)) < rows.min_gain:
                break
            active = alive
            if active:
                logits = self._model.append(
                    [rows.row_slots[index] for index in active], [chains[index].draft_ids[-1] for index in active]
                )

    def _choose(
        self,
        rows: ProposalInput,
        states: Sequence[_Row],
        chains: Sequence[_Chain],
        active: Sequence[int],
        logits_of_heads: Logits,
    ) -> None:
        """One more token for each active chain, from the logits behind it."""
        for number, logits in logits_of_heads.items():
            method = METHODS[number]
            indices = [index for index in active if states[index].method is method]
            step = len(chains[indices[0]].draft_ids)
            if method is UsdMethod.SLEM:
                draft_ids = target_ids = argmax(logits).clamp_(min=0)
            else:
                shared_ids = None if self.mapping is None else self.mapping.target_ids
                columns = rows.choose(logits, step, shared_ids, indices)
                draft_ids = columns if self.mapping is None else self.mapping.draft_ids[columns]
                target_ids = columns if self.mapping is None else self.mapping.to_target(columns)
            confidences = (logits.amax(dim=1) - log_z(logits)).exp().nan_to_num(0.0)
            lists = (draft_ids.tolist(), target_ids.tolist(), confidences.tolist())
            for index, draft_id, target_id, confidence in zip(indices, *lists, strict=True):
                chains[index].draft_ids.append(draft_id)
                chains[index].target_ids.append(target_id)
                chains[index].confidences.append(confidence)
                chains[index].chance *= self._confidence[method].chance(confidence)

    def _finish(self, row: _Row, chain: _Chain) -> list[int]:
        """The draft in tokens of the target."""
        is_text = row.method is UsdMethod.SLEM
        row.drafted = self._retokenize(row, chain)[: chain.length] if is_text else chain.target_ids
        row.chain = chain if row.drafted else None
        return row.drafted

    def _num_right(self, row: _Row, chain: _Chain, num_accepted: int) -> int:
        """Tokens of the chain that were right, where so many of the draft were accepted."""
        if row.method is UsdMethod.TLI:
            return num_accepted
        sizes = [len(self.translator.draft.token_bytes(token_id)) for token_id in chain.draft_ids]
        accepted = sum(len(self.translator.target.token_bytes(token_id)) for token_id in row.drafted[:num_accepted])
        return sum(end <= accepted for end in itertools.accumulate(sizes))

    def _retokenize(self, row: _Row, chain: _Chain) -> list[int]:
        draft, added = self.translator.draft, b""
        for token_id in chain.draft_ids:
            if token_id in draft.special_ids:
                break
            added += draft.token_bytes(token_id)
        return self._to_target.continuation(row.last_ids, added) if added else []
