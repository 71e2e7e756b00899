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

    def draws_freely(self, row_slot: int) -> bool:
        """Whether the request samples and named no seed, so that no tokens in particular are due to it."""
        params = self._of(row_slot)
        return not params.is_greedy and not params.is_seeded

    def seed_of(self, row_slot: int) -> int:
        """The seed of the request in a row slot."""
        return self._of(row_slot).seed

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
        """One token for each row of logits [R, V] (float32, not changed); id None if there is a NaN or +inf."""
        assert logits.shape == (len(rows), self._vocab_size)
        chosen = argmax(logits)  # the plain greedy ones stand
        touched = [index for index, row in enumerate(rows) if not self._is_plain_greedy(row)]
        if touched:
            indices = self._tensor(touched)
            drawn = self._choose(logits[indices], [rows[index] for index in touched])
            chosen[indices] = torch.where(chosen[indices] < 0, -1, drawn)
        return self.with_logprobs(logits, rows, chosen.tolist())

    def choose_drafts(
        self, logits: torch.Tensor, rows: list[SampleRow], target_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Columns [B] of a drafter's logits [B, Vd]: greedy rows get the first of the largest, others a draw.

        A draw uses the noise that the target's own draw at the same position will use (coupled), by the target's ids
        target_ids [Vd] (None: the columns), and the request's temperature and truncations; penalties are left to the
        target. Rows that aren't finite get column 0.
        """
        chosen = argmax(logits)
        params = [self._of(row.row_slot) for row in rows]
        sampled = [index for index, item in enumerate(params) if not item.is_greedy]
        if sampled:
            drawn = self._draw(logits[sampled], [rows[index] for index in sampled], target_ids)
            chosen[sampled] = torch.where(chosen[sampled] < 0, -1, drawn)
        return chosen.clamp_(min=0)

    def needs_law(self, row_slot: int) -> bool:
        """Whether a draft for the row is chosen by a law that all logits have a part in."""
        params = self._of(row_slot)
        return not params.is_greedy and params.truncates

    def best_drafts(
        self, logits: torch.Tensor, rows: list[SampleRow], target_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As choose_drafts of part of the columns, [B, n] for the ids target_ids [n]: [B] the best columns, [B] scores.

        Of several parts the one with the highest score has the choice; -inf where a part has none. Not for rows that
        need_law.
        """
        if not logits.shape[1]:
            empty = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
            return empty, torch.full_like(empty, -torch.inf, dtype=torch.float64)
        params = [self._of(row.row_slot) for row in rows]
        values = self._rows_of_values(rows)[:, :1]
        sampled = [index for index, item in enumerate(params) if not item.is_greedy]
        scores = logits.double()
        if sampled:
            keys = row_keys(((params[i].seed, rows[i].position) for i in sampled), Purpose.TARGET)
            scaled = scores[sampled] * values[sampled]
            scores[sampled] = gumbel_scores(scaled, keys, target_ids.expand(scaled.shape))
        best, columns = scores.max(dim=1)
        return columns, torch.where(best.isfinite(), best, -torch.inf)

    def draw_drafts(
        self, logits: torch.Tensor, rows: list[SampleRow], target_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As choose_drafts, but drawn with noise of their own: columns [B], and the laws [B, V] they were drawn from.

        Those are over the target's ids, in float64; NaN for rows that aren't finite, which get column 0.
        """
        law = self._law(logits, logits, rows)
        keys = row_keys(((self.seed_of(row.row_slot), row.position) for row in rows), Purpose.DRAFT)
        columns = torch.arange(law.shape[1], device=self._device)
        token_ids = columns if target_ids is None else target_ids
        scores = gumbel_scores(law.log(), keys, token_ids.expand(law.shape))
        chosen = torch.where(law.isfinite().all(dim=1), scores.argmax(dim=1), 0)
        whole = torch.zeros(len(rows), self._vocab_size, dtype=torch.float64, device=self._device)
        whole[:, token_ids] = law
        return chosen, whole

    def distribution(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        """The law [R, V], float64, that `sample` draws from; rows that aren't finite are NaN."""
        processed = logits.clone()
        self._process(processed, rows)
        return self._law(logits, processed, rows)

    def _law(self, logits: torch.Tensor, processed: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        """Of rows of logits, after processing: what temperature and truncations make of them."""
        law = torch.zeros(logits.shape, dtype=torch.float64, device=self._device)
        best = torch.where(argmax(logits) < 0, -1, argmax(processed))
        is_greedy = torch.tensor([self._of(row.row_slot).is_greedy for row in rows], device=self._device)
        greedy, sampled = ((best >= 0) & is_greedy).nonzero()[:, 0], ((best >= 0) & ~is_greedy).nonzero()[:, 0]
        law[best < 0] = torch.nan
        law[greedy, best[greedy]] = 1.0
        if not len(sampled):
            return law
        scaled, truncation = self._scaled(processed[sampled], [rows[index] for index in sampled.tolist()])
        for row_indices, kept, token_ids in truncate(scaled, truncation):
            law[sampled[row_indices, None], token_ids] = kept.double().softmax(dim=1)
        return law

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
        is_greedy = [self._of(row.row_slot).is_greedy for row in rows]
        chosen = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        greedy = [index for index, value in enumerate(is_greedy) if value]
        sampled = [index for index, value in enumerate(is_greedy) if not value]
        if greedy:
            chosen[greedy] = argmax(logits[greedy])
        if sampled:
            chosen[sampled] = self._draw(logits[sampled], [rows[index] for index in sampled], None)
        return chosen

    def _draw(self, logits: torch.Tensor, rows: list[SampleRow], target_ids: torch.Tensor | None) -> torch.Tensor:
        """Columns [S] drawn from logits [S, n]; `target_ids` as in choose_drafts."""
        truncates = [self._of(row.row_slot).truncates for row in rows]
        drawn = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        for kind, draw in ((False, self._draw_whole), (True, self._draw_truncated)):
            indices = [index for index, value in enumerate(truncates) if value is kind]
            if indices:
                some_rows = [rows[index] for index in indices]
                keys = row_keys(((self._of(r.row_slot).seed, r.position) for r in some_rows), Purpose.TARGET)
                drawn[indices] = draw(logits[indices], some_rows, keys, target_ids)
        return drawn

    def _draw_whole(
        self, logits: torch.Tensor, rows: list[SampleRow], keys: np.ndarray, target_ids: torch.Tensor | None
    ) -> torch.Tensor:
        inverse_temperatures = self._rows_of_values(rows)[:, 0].float().contiguous()
        if target_ids is None:
            return gumbel_argmax(logits, inverse_temperatures, keys)
        scaled = scale(logits, inverse_temperatures)
        return gumbel_scores(scaled, keys, target_ids.expand(scaled.shape)).argmax(dim=1)

    def _draw_truncated(
        self, logits: torch.Tensor, rows: list[SampleRow], keys: np.ndarray, target_ids: torch.Tensor | None
    ) -> torch.Tensor:
        chosen = argmax(logits)  # -1 stays where no draw can be made
        finite = (chosen >= 0).nonzero()[:, 0]
        if not len(finite):
            return chosen
        scaled, truncation = self._scaled(logits[finite], [rows[index] for index in finite.tolist()])
        for row_indices, kept, columns in truncate(scaled, truncation):
            where = finite[row_indices]
            token_ids = columns if target_ids is None else target_ids[columns]
            best = gumbel_scores(kept, keys[where.cpu().numpy()], token_ids).argmax(dim=1, keepdim=True)
            chosen[where] = columns.gather(1, best)[:, 0]
        return chosen

    def _rows_of_values(self, rows: list[SampleRow]) -> torch.Tensor:
        return self._values[self._tensor([row.row_slot for row in rows])]

    def _scaled(self, logits: torch.Tensor, rows: list[SampleRow]) -> tuple[torch.Tensor, Truncation]:
        """Logits [S, n] over temperature, and what is to be cut from them."""
        values = self._rows_of_values(rows)
        _, top_k, top_p, min_p, typical_p = (values[:, column : column + 1] for column in range(5))
        # Of a part of the vocabulary there may be fewer than k.
        top_k = torch.where(top_k >= logits.shape[1], 0, top_k.long())
        return scale(logits, values[:, 0].float()), Truncation(top_k, top_p, min_p, typical_p)

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

    def with_logprobs(self, logits: torch.Tensor, rows: list[SampleRow], token_ids: list[int]) -> list[SampledToken]:
        """Tokens already chosen (-1: none) from rows of logits, with what each request asked of them."""
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
