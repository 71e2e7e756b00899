"""Tells the target's tokens of a request in the tokens of a draft model.

Tokens with a role (the end of a turn, say) go over as such where the draft has the same: one with the same text, or one
that ends a text too. Else they are written out, as the draft may know what they look like.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specserve.models.tokenizer import Tokenizer
from specserve.speculators.retokenizer import WINDOW, Retokenizer


@dataclass(slots=True)
class DraftContext:
    """One request's text in tokens of the draft; the first num_fixed are never tokenized again."""

    token_ids: list[int] = field(default_factory=list)
    num_fixed: int = 0

    @property
    def num_final(self) -> int:
        """Tokens that no addition will change (but for rare ones)."""
        return max(self.num_fixed, len(self.token_ids) - WINDOW)


class Translator:
    """From one vocabulary to another, or, if they are the same, to itself."""

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self.target, self.draft = target, draft
        self.is_identity = _are_same(target, draft)
        self.roles = _roles(target, draft)
        self.to_draft = Retokenizer(draft, draft.ids_by_bytes)
        self._start = [] if draft.bos_token_id is None or not draft.adds_bos else [draft.bos_token_id]
        ends = [token_id for token_id in draft.eos_token_ids if token_id < draft.vocab_size]
        self._nothing = self._start or ends[:1] or [0]  # a model can't continue no token at all

    def extend(self, context: DraftContext, target_ids: Sequence[int]) -> None:
        """Add tokens of the target to the context."""
        if self.is_identity:
            known = min(self.draft.size, self.draft.vocab_size)  # the draft may have fewer rows than the tokenizer ids
            context.token_ids += [token_id if token_id < known else 0 for token_id in target_ids]
            context.num_fixed = len(context.token_ids)
            return
        if not context.token_ids:
            context.token_ids, context.num_fixed = list(self._start), len(self._start)
        text = b""
        for token_id in target_ids:
            role = self.roles.get(token_id)
            if token_id == self.target.bos_token_id and not text and len(context.token_ids) <= len(self._start):
                continue  # the draft's own way to begin is there
            if role is None:
                text += self.target.token_bytes(token_id)
                continue
            self._add_text(context, text)
            text = b""
            context.token_ids.append(role)
            context.num_fixed = len(context.token_ids)
        self._add_text(context, text)
        if not context.token_ids:
            context.token_ids, context.num_fixed = list(self._nothing), len(self._nothing)

    def _add_text(self, context: DraftContext, text: bytes) -> None:
        if text:
            context.token_ids = self.to_draft.extend(context.token_ids, text, first=context.num_fixed)


def _are_same(target: Tokenizer, draft: Tokenizer) -> bool:
    """Whether every id stands for the same."""
    return (
        target.size == draft.size
        and target.special_ids == draft.special_ids
        and all(target.token_bytes(token_id) == draft.token_bytes(token_id) for token_id in range(target.size))
    )


def _roles(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Special tokens of the target -> those of the draft that mean the same."""
    roles = {
        token_id: draft.special_id_of[text]
        for text, token_id in target.special_id_of.items()
        if draft.special_id_of.get(text, draft.vocab_size) < draft.vocab_size
    }
    ends = [token_id for token_id in draft.eos_token_ids if token_id < draft.vocab_size]
    if ends:
        roles |= {token_id: ends[0] for token_id in target.eos_token_ids if token_id not in roles}
    return roles
