"""Lossless verification of drafts.

Where a draft follows from its prefix (and from the noise of the target's own draw, if it is coupled): sample and
match. At each position the target's own token is drawn, given the drafts before it; a draft is accepted if it is that
token, and the target's token is what is emitted either way. So the emitted tokens are those of plain decoding,
whatever was drafted, and with no draft this is plain sampling.

Where a draft comes with the law that it was drawn from: rejection (rejection.py), which keeps the law of the tokens.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from specserve.models.sampling.noise import Purpose, exponentials, gumbel_scores, row_keys
from specserve.models.sampling.params import SampledToken
from specserve.models.sampling.sampler import Sampler, SampleRow
from specserve.speculators.rejection import acceptance, num_accepted, residual


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One sequence: its next token stands at `position`, after num_output_tokens emitted ones.

    It has len(draft_ids) + 1 rows of logits; row j follows the first j drafts.
    """

    row_slot: int
    position: int
    num_output_tokens: int
    draft_ids: tuple[int, ...] = ()
    draft_probs: torch.Tensor | None = None  # [len(draft_ids), V]: the law that draft_ids was drawn from

    def sample_rows(self) -> list[SampleRow]:
        """The rows of logits."""
        return [
            SampleRow(self.row_slot, self.position + seen, self.num_output_tokens, self.draft_ids[:seen])
            for seen in range(len(self.draft_ids) + 1)
        ]


@dataclass(frozen=True, slots=True)
class Verified:
    """The accepted drafts and one more token (recovered after a rejection, bonus after none).

    The last token has no id where the logits weren't finite.
    """

    tokens: list[SampledToken]
    num_accepted: int


def verify(logits: torch.Tensor, sampler: Sampler, rows: list[VerifyRow]) -> list[Verified]:
    """Logits [R, V], R = sum of (drafts + 1), in the order of rows -> what is emitted for each row."""
    sizes = [len(row.draft_ids) + 1 for row in rows]
    assert logits.shape[0] == sum(sizes), "a row of logits for each draft and one more"
    results: list[Verified | None] = [None] * len(rows)
    for has_law, rule in ((False, _match_rows), (True, _reject_rows)):
        chosen = [index for index, row in enumerate(rows) if (row.draft_probs is not None) is has_law]
        if chosen:
            parts = torch.split(logits, sizes)
            own = logits if len(chosen) == len(rows) else torch.cat([parts[index] for index in chosen])
            for index, verified in zip(chosen, rule(own, sampler, [rows[index] for index in chosen]), strict=True):
                results[index] = verified
    return [verified for verified in results if verified is not None]


def _match_rows(logits: torch.Tensor, sampler: Sampler, rows: list[VerifyRow]) -> list[Verified]:
    """Sample and match."""
    tokens = iter(sampler.sample(logits, [row for item in rows for row in item.sample_rows()]))
    return [_match([next(tokens) for _ in range(len(row.draft_ids) + 1)], row.draft_ids) for row in rows]


def _match(tokens: list[SampledToken], draft_ids: tuple[int, ...]) -> Verified:
    num_accepted = 0
    while num_accepted < len(draft_ids) and tokens[num_accepted].token_id == draft_ids[num_accepted]:
        num_accepted += 1
    return Verified(tokens[: num_accepted + 1], num_accepted)


def _reject_rows(logits: torch.Tensor, sampler: Sampler, rows: list[VerifyRow]) -> list[Verified]:
    """The rejection rule, with noise that depends on seed and position only."""
    sample_rows = [row for item in rows for row in item.sample_rows()]
    law = sampler.distribution(logits, sample_rows)  # [R, V]
    firsts = [0, *itertools.accumulate(len(row.draft_ids) + 1 for row in rows)]
    has_draft = [first + seen for first, row in zip(firsts, rows, strict=False) for seen in range(len(row.draft_ids))]
    q = torch.cat([row.draft_probs for row in rows if row.draft_probs is not None]).double()
    draft_ids = torch.tensor([token_id for row in rows for token_id in row.draft_ids], device=logits.device)
    chances = acceptance(law[has_draft], q, draft_ids).cpu()
    uniforms = _uniforms(sampler, [sample_rows[index] for index in has_draft])
    lengths = [len(row.draft_ids) for row in rows]
    accepted = [
        num_accepted(*pair) for pair in zip(torch.split(chances, lengths), torch.split(uniforms, lengths), strict=True)
    ]
    ends = [first + count for first, count in zip(firsts, accepted, strict=False)]
    rejected = [index for index, row in enumerate(rows) if accepted[index] < len(row.draft_ids)]
    p = law[ends]
    if rejected:
        starts = list(itertools.accumulate(lengths, initial=0))
        p[rejected] = residual(p[rejected], q[[starts[index] + accepted[index] for index in rejected]])
    rejected_set = set(rejected)
    purposes = [Purpose.RESIDUAL if index in rejected_set else Purpose.TARGET for index in range(len(rows))]
    keys = np.concatenate(
        [
            row_keys([(sampler.seed_of(row.row_slot), sample_rows[end].position)], purpose)
            for row, end, purpose in zip(rows, ends, purposes, strict=True)
        ]
    )
    scores = gumbel_scores(p.log(), keys, torch.arange(p.shape[1], device=p.device).expand(p.shape))
    last = torch.where(p.isfinite().all(dim=1), scores.argmax(dim=1), -1).tolist()
    emitted = [[*row.draft_ids[:count], token] for row, count, token in zip(rows, accepted, last, strict=True)]
    kept = [first + seen for first, tokens in zip(firsts, emitted, strict=False) for seen in range(len(tokens))]
    flat = [token for tokens in emitted for token in tokens]
    tokens = iter(sampler.with_logprobs(logits[kept], [sample_rows[index] for index in kept], flat))
    return [Verified([next(tokens) for _ in range(count + 1)], count) for count in accepted]


def _uniforms(sampler: Sampler, rows: list[SampleRow]) -> torch.Tensor:
    """[K] in [0, 1): 1 - exp(-e) of a draw e of the exponential law, one for each position."""
    keys = row_keys(((sampler.seed_of(row.row_slot), row.position) for row in rows), Purpose.ACCEPT)
    return -torch.expm1(-exponentials(keys, torch.zeros(len(rows), 1, dtype=torch.int64))[:, 0])
