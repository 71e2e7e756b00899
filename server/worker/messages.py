"""A step as ints, for the ranks that follow: new tokens, lengths and blocks; of an admission the sampling, once.

The other ranks draw drafts but no tokens, so of a request they learn what a draft depends on, and of its prompt only
the length; its tokens come with the rows that compute them.
"""

import numpy as np

from specserve.models.link import Ints
from specserve.models.sampling.params import SamplingParams
from specserve.server.engine.step import Admission, ScheduledBatch, ScheduledRow

_FLOATS = ("temperature", "top_p", "min_p", "typical_p")
_ADMISSION = 6 + len(_FLOATS)
_ROW = 7


def encode(batch: ScheduledBatch) -> Ints:
    """See decode."""
    parts: list[Ints] = [np.array([len(batch.released), len(batch.admissions), len(batch.rows), *batch.released])]
    for admission in batch.admissions:
        sampling = admission.sampling
        numbers = (
            admission.row_slot,
            len(admission.prompt_token_ids),
            len(admission.output_token_ids),
            sampling.top_k,
            sampling.is_seeded,
        )
        parts.append(np.array(numbers))
        parts.append(np.array([sampling.seed], dtype=np.uint64).view(np.int64))
        parts.append(np.array([getattr(sampling, name) for name in _FLOATS], dtype=np.float64).view(np.int64))
    for row in batch.rows:
        flags = row.samples + 2 * row.prompt_logprobs
        counts = (row.num_tokens, len(row.new_block_ids))
        shares = (row.row_slot, row.start, *counts, row.num_drafts, flags, row.max_draft_tokens)
        parts.append(np.array([*shares, *row.token_ids, *row.new_block_ids]))
    return np.concatenate(parts).astype(np.int64)


def decode(message: Ints) -> ScheduledBatch:
    """The batch; in place of tokens that were there before, there are zeros."""
    num_released, num_admissions, num_rows = message[:3].tolist()
    place = 3 + num_released
    released = message[3:place].tolist()
    admissions, rows = [], []
    for _ in range(num_admissions):
        fields = message[place : place + _ADMISSION]
        slot, num_prompt, num_output, top_k, is_seeded = fields[:5].tolist()
        floats = dict(zip(_FLOATS, fields[6:].view(np.float64).tolist(), strict=True))
        seed = int(fields[5:6].view(np.uint64)[0])
        sampling = SamplingParams(top_k=top_k, seed=seed, is_seeded=bool(is_seeded), **floats)
        admissions.append(Admission(slot, sampling, [0] * num_prompt, [0] * num_output))
        place += _ADMISSION
    for _ in range(num_rows):
        slot, start, num_tokens, num_blocks, num_drafts, flags, max_drafts = message[place : place + _ROW].tolist()
        place += _ROW
        tokens = message[place : place + num_tokens].tolist()
        blocks = message[place + num_tokens : place + num_tokens + num_blocks].tolist()
        place += num_tokens + num_blocks
        rows.append(ScheduledRow(slot, start, tokens, blocks, num_drafts, bool(flags & 1), bool(flags & 2), max_drafts))
    return ScheduledBatch(released, admissions, rows)
