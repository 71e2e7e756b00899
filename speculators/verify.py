"""Lossless verification of drafts by sample and match.

At each position the target's own token is drawn, given the drafts before it; a draft is accepted if it is that
token, and the target's token is what is emitted either way. So the emitted tokens are those of plain decoding,
whatever was drafted, and with no draft this is plain sampling.
"""

from dataclasses import dataclass

import torch

from specserve.models.sampling.params import SampledToken
from specserve.models.sampling.sampler import Sampler, SampleRow


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One sequence: its next token stands at `position`, after num_output_tokens emitted ones.

    It has len(draft_ids) + 1 rows of logits; row j follows the first j drafts.
    """

    row_slot: int
    position: int
    num_output_tokens: int
    draft_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """The accepted drafts and one more token (recovered after a rejection, bonus after none).

    The last token has no id where the logits weren't finite.
    """

    tokens: list[SampledToken]
    num_accepted: int


def verify(logits: torch.Tensor, sampler: Sampler, rows: list[VerifyRow]) -> list[Verified]:
    """Logits [R, V], R = sum of (drafts + 1), in the order of rows -> what is emitted for each row."""
    sample_rows = [
        SampleRow(row.row_slot, row.position + num_seen, row.num_output_tokens, row.draft_ids[:num_seen])
        for row in rows
        for num_seen in range(len(row.draft_ids) + 1)
    ]
    assert logits.shape[0] == len(sample_rows), "a row of logits for each draft and one more"
    tokens = iter(sampler.sample(logits, sample_rows))
    return [_match([next(tokens) for _ in range(len(row.draft_ids) + 1)], row.draft_ids) for row in rows]


def _match(tokens: list[SampledToken], draft_ids: tuple[int, ...]) -> Verified:
    num_accepted = 0
    while num_accepted < len(draft_ids) and tokens[num_accepted].token_id == draft_ids[num_accepted]:
        num_accepted += 1
    return Verified(tokens[: num_accepted + 1], num_accepted)
