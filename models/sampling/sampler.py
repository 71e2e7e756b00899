"""Draws tokens from rows of logits, with state that persists by row slot."""

from dataclasses import dataclass

import numpy as np
import torch

from specserve.models.sampling.history import History
from specserve.models.sampling.noise import Purpose, gumbel_scores, row_keys
from specserve.models.sampling.params import SampledToken, SamplingParams
from specserve.models.sampling.processors import Truncation, penalise, truncate
from specserve.models.sampling.row_ops import argmax, gumbel_argmax, log_z, scale, sorted_head


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row of logits: it decides the token at absolute `position` of the sequence in `row_slot`.

    num_output_tokens are emitted before; then come the tokens of draft_prefix, which penalties and
    min_new_tokens see like emitted ones.
    """

    row_slot: int
    position: int
    num_output_tokens: int
    draft_prefix: tuple[int, ...] = ()


class Sampler:
    """Sampling for up to max_rows sequences at once; a row's token does not depend on the other rows."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._params: list[SamplingParams | None] = [None] * max_rows
        self._histories: dict[int, History] = {}  # of the row slots with penalties
        self._suppressed: dict[int, torch.Tensor] = {}
        # inverse temperature, top_k, top_p, min_p, typical_p of each row slot
        self._values = torch.zeros(max_rows, 5, dtype=torch.float64, device=device)

    def admit(
        self, row_slot: int, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> None:
        """Take a sequence in; after a preemption, with the tokens it has generated already."""
        assert self._params[row_slot] is None, f"row slot {row_slot} holds a sequence already"
        self._params[row_slot] = params
        if not params.is_greedy:
            top_k = params.top_k if params.top_k < self._vocab_size else 0
            values = (1 / params.temperature, top_k, params.top_p, params.min_p, params.typical_p)
            self._values[row_slot] = torch.tensor(values, dtype=torch.float64)
        # An id beyond the vocabulary can't be chosen anyway.
        suppressed = [token_id for token_id in params.suppressed_ids if token_id < self._vocab_size]
        if params.min_new_tokens and suppressed:
            self._suppressed[row_slot] = torch.tensor(suppressed, device=self._device)
        if params.uses_penalties:
            self._histories[row_slot] = History(prompt_token_ids, output_token_ids)

    def release(self, row_slot: int) -> None:
        """Forget a sequence; nothing of it reaches the next one in its slot."""
        self._params[row_slot] = None
        self._histories.pop(row_slot, None)
        self._suppressed.pop(row_slot, None)

    def accept(self, row_slot: int, token_ids: list[int]) -> None:
        """Emitted tokens enter the history that penalties see."""
        history = self._histories.get(row_slot)
        if history is not None:
            history.add(token_ids)

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
        """One token for each row of logits [R, V] (float32, not changed); id None if there is a NaN or +inf."""
        assert logits.shape == (len(rows), self._vocab_size)
        chosen = argmax(logits)  # the plain greedy ones stand
        touched = [index for index, row in enumerate(rows) if not self._is_plain_greedy(row)]
        if touched:
            indices = self._tensor(touched)
            drawn = self._choose(logits[indices], [rows[index] for index in touched])
            chosen[indices] = torch.where(chosen[indices] < 0, -1, drawn)
        return self._with_logprobs(logits, rows, chosen.tolist())

    # ---- choosing

    def _is_plain_greedy(self, row: SampleRow) -> bool:
        is_changed = row.row_slot in self._histories or self._is_suppressed(row)
        return self._of(row.row_slot).is_greedy and not is_changed

    def _is_suppressed(self, row: SampleRow) -> bool:
        num_tokens = row.num_output_tokens + len(row.draft_prefix)
        return row.row_slot in self._suppressed and num_tokens < self._of(row.row_slot).min_new_tokens

    def _choose(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        """Logits [S, V], which are changed -> [S] token ids, -1 where none can be chosen."""
        self._process(logits, rows)
        of = [self._of(row.row_slot) for row in rows]
        greedy = [i for i, params in enumerate(of) if params.is_greedy]
        whole = [i for i, params in enumerate(of) if not params.is_greedy and not params.truncates]
        truncated = [i for i, params in enumerate(of) if not params.is_greedy and params.truncates]
        chosen = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        if greedy:
            chosen[greedy] = argmax(logits[greedy])
        for indices, draw in ((whole, self._draw_whole), (truncated, self._draw_truncated)):
            if indices:
                some_rows = [rows[i] for i in indices]
                keys = row_keys(((self._of(r.row_slot).seed, r.position) for r in some_rows), Purpose.TARGET)
                values = self._values[self._tensor([row.row_slot for row in some_rows])]
                chosen[indices] = draw(logits[indices], values, keys)
        return chosen

    def _draw_whole(self, logits: torch.Tensor, values: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
        return gumbel_argmax(logits, values[:, 0].float().contiguous(), keys)

    def _draw_truncated(self, logits: torch.Tensor, values: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
        chosen = argmax(logits)  # -1 stays where no draw can be made
        finite = (chosen >= 0).nonzero()[:, 0]
        values = values[finite]
        _, top_k, top_p, min_p, typical_p = (values[:, column : column + 1] for column in range(5))
        scaled = scale(logits[finite], values[:, 0].float())
        for row_indices, kept, token_ids in truncate(scaled, Truncation(top_k.long(), top_p, min_p, typical_p)):
            where = finite[row_indices]
            best = gumbel_scores(kept, keys[where.cpu().numpy()], token_ids).argmax(dim=1, keepdim=True)
            chosen[where] = token_ids.gather(1, best)[:, 0]
        return chosen

    # ---- penalties and masks

    def _process(self, logits: torch.Tensor, rows: list[SampleRow]) -> None:
        """Apply penalties and min_new_tokens to logits [S, V], in place."""
        penalised = [(index, row) for index, row in enumerate(rows) if row.row_slot in self._histories]
        if penalised:
            self._apply_penalties(logits, penalised)
        for index, row in enumerate(rows):
            if self._is_suppressed(row):
                logits[index, self._suppressed[row.row_slot]] = -torch.inf

    def _apply_penalties(self, logits: torch.Tensor, rows: list[tuple[int, SampleRow]]) -> None:
        """All rows' seen tokens in one flat gather and scatter."""
        seen = [self._histories[row.row_slot].seen(row.draft_prefix) for _, row in rows]
        sizes = [len(token_ids) for token_ids, _ in seen]
        of = [self._of(row.row_slot) for _, row in rows]
        strengths = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in of]
        flat = np.repeat(np.array(strengths, dtype=np.float32), sizes, axis=0).T
        where = (
            self._tensor(np.repeat([index for index, _ in rows], sizes)),
            self._tensor(np.concatenate([token_ids for token_ids, _ in seen])),
        )
        counts = self._tensor(np.concatenate([counts for _, counts in seen]))
        logits[where] = penalise(logits[where], counts, *(self._tensor(column) for column in flat))

    def _tensor(self, values: list[int] | np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, device=self._device)

    def _of(self, row_slot: int) -> SamplingParams:
        params = self._params[row_slot]
        assert params is not None, f"row slot {row_slot} holds no sequence"
        return params

    # ---- log-probabilities

    def _with_logprobs(self, logits: torch.Tensor, rows: list[SampleRow], token_ids: list[int]) -> list[SampledToken]:
        tokens = [SampledToken(None if token_id < 0 else token_id) for token_id in token_ids]
        for index, row in enumerate(rows):
            params = self._of(row.row_slot)
            if tokens[index].token_id is not None and (params.logprobs or params.top_n_tokens):
                tokens[index] = score_tokens(logits[index : index + 1], [token_ids[index]], params.top_n_tokens)[0]
        return tokens


def score_tokens(logits: torch.Tensor, token_ids: list[int], top_n: int) -> list[SampledToken]:
    """Log-probability, rank and the top_n likeliest for one given token a row of raw logits [R, V]."""
    if not token_ids:
        return []
    normalizers = log_z(logits)
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = ((logits > chosen).sum(dim=1) + 1).tolist()
    logprobs = (chosen[:, 0] - normalizers).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    if top_n:
        values, ids = sorted_head(logits, min(top_n, logits.shape[1]))
        pairs = zip(ids.tolist(), (values - normalizers[:, None]).tolist(), strict=True)
        tops = [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]
    return [SampledToken(*fields) for fields in zip(token_ids, logprobs, ranks, tops, strict=True)]
