"""Draws tokens from rows of logits, with state that persists by row slot."""

from dataclasses import dataclass

import numpy as np
import torch

from specserve.models.cpu_kernels import binding
from specserve.models.sampling.noise import Purpose, gumbel_scores, row_keys
from specserve.models.sampling.params import SampledToken, SamplingParams
from specserve.models.sampling.processors import Truncation, apply_penalties, truncate


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
        self._suppressed: dict[int, torch.Tensor] = {}
        # temperature, top_k, top_p, min_p, typical_p, repetition, frequency, presence of each row slot
        self._values = torch.zeros(max_rows, 8, dtype=torch.float64, device=device)
        # Histories, allocated when the first sequence with a penalty comes.
        self._counts: torch.Tensor | None = None  # [max_rows, V] int32: times generated
        self._in_prompt: torch.Tensor | None = None  # [max_rows, V] bool

    def admit(
        self, row_slot: int, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> None:
        """Take a sequence in; after a preemption, with the tokens it has generated already."""
        self._params[row_slot] = params
        self._values[row_slot] = torch.tensor(
            [
                params.temperature,
                params.top_k if params.top_k < self._vocab_size else 0,
                params.top_p,
                params.min_p,
                params.typical_p,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            ],
            dtype=torch.float64,
        )
        if params.min_new_tokens and params.suppressed_ids:
            self._suppressed[row_slot] = torch.tensor(params.suppressed_ids, device=self._device)
        if params.uses_penalties:
            counts, in_prompt = self._histories()
            in_prompt[row_slot, self._ids(prompt_token_ids)] = True
            self._add(counts[row_slot], output_token_ids)

    def release(self, row_slot: int) -> None:
        """Forget a sequence; nothing of it reaches the next one in its slot."""
        params = self._params[row_slot]
        if params is not None and params.uses_penalties:
            counts, in_prompt = self._histories()
            counts[row_slot] = 0
            in_prompt[row_slot] = False
        self._params[row_slot] = None
        self._suppressed.pop(row_slot, None)

    def accept(self, row_slot: int, token_ids: list[int]) -> None:
        """Emitted tokens enter the history that penalties see."""
        if self._of(row_slot).uses_penalties:
            self._add(self._histories()[0][row_slot], token_ids)

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
        """One token for each row of logits [R, V] (float32, not changed); id None where they aren't finite."""
        assert logits.shape == (len(rows), self._vocab_size)
        is_finite = logits.sum(dim=1).isfinite()
        chosen = logits.argmax(dim=1)  # the greedy ones stand
        touched = [index for index, row in enumerate(rows) if not self._is_plain_greedy(row)]
        if touched:
            indices = torch.tensor(touched, device=self._device)
            some_rows = [rows[index] for index in touched]
            chosen[indices] = self._draw(logits[indices], some_rows)
        token_ids = torch.where(is_finite, chosen, -1).tolist()
        return self._with_logprobs(logits, rows, token_ids)

    # ---- choosing

    def _is_plain_greedy(self, row: SampleRow) -> bool:
        params = self._of(row.row_slot)
        return params.is_greedy and not params.uses_penalties and not self._is_suppressed(row)

    def _is_suppressed(self, row: SampleRow) -> bool:
        num_tokens = row.num_output_tokens + len(row.draft_prefix)
        return row.row_slot in self._suppressed and num_tokens < self._of(row.row_slot).min_new_tokens

    def _draw(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        """Logits [S, V], which are changed -> [S] token ids."""
        self._apply_histories(logits, rows)
        for index, row in enumerate(rows):
            if self._is_suppressed(row):
                logits[index, self._suppressed[row.row_slot]] = -torch.inf
        chosen = logits.argmax(dim=1)
        sampled = [index for index, row in enumerate(rows) if not self._of(row.row_slot).is_greedy]
        whole = [i for i in sampled if not self._of(rows[i].row_slot).truncates]
        truncated = [i for i in sampled if self._of(rows[i].row_slot).truncates]
        for indices, draw in ((whole, self._draw_whole), (truncated, self._draw_truncated)):
            if indices:
                some_rows = [rows[i] for i in indices]
                values = self._values[[row.row_slot for row in some_rows]]
                scaled = logits[indices]
                scaled = ((scaled - scaled.amax(1, keepdim=True)) / values[:, :1]).float()
                keys = row_keys(((self._of(r.row_slot).seed, r.position) for r in some_rows), Purpose.TARGET)
                chosen[indices] = draw(scaled, values, keys)
        return chosen

    def _draw_whole(self, logits: torch.Tensor, values: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
        if binding.is_supported(logits) and binding.are_built():
            return binding.gumbel_argmax(logits, keys)
        token_ids = torch.arange(self._vocab_size, device=self._device).expand(logits.shape)
        return gumbel_scores(logits, keys, token_ids).argmax(dim=1)

    def _draw_truncated(self, logits: torch.Tensor, values: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
        top_k, top_p, min_p, typical_p = (values[:, column : column + 1] for column in range(1, 5))
        params = Truncation(top_k.long(), top_p.float(), min_p.float(), typical_p.float())
        chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=self._device)
        for row_indices, kept, token_ids in truncate(logits, params):
            scores = gumbel_scores(kept, keys[row_indices.cpu().numpy()], token_ids)
            best = scores.argmax(dim=1, keepdim=True)
            chosen[row_indices] = token_ids.gather(1, best)[:, 0]
        return chosen

    # ---- histories

    def _apply_histories(self, logits: torch.Tensor, rows: list[SampleRow]) -> None:
        indices = [index for index, row in enumerate(rows) if self._of(row.row_slot).uses_penalties]
        if not indices:
            return
        all_counts, all_in_prompt = self._histories()
        slots = [rows[index].row_slot for index in indices]
        counts = all_counts[slots]  # a copy: drafts leave no trace
        for copy_index, index in enumerate(indices):
            self._add(counts[copy_index], list(rows[index].draft_prefix))
        penalties = self._values[slots].float()
        some = logits[indices]
        apply_penalties(
            some,
            all_in_prompt[slots] | (counts > 0),
            counts,
            *(penalties[:, column : column + 1] for column in range(5, 8)),
        )
        logits[indices] = some

    def _histories(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._counts is None or self._in_prompt is None:
            shape = (len(self._params), self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return self._counts, self._in_prompt

    def _add(self, counts: torch.Tensor, token_ids: list[int]) -> None:
        if token_ids:
            ids = self._ids(token_ids)
            counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))

    def _ids(self, token_ids: list[int]) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self._device)

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
    log_z = logits.logsumexp(dim=1)
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = ((logits > chosen).sum(dim=1) + 1).tolist()
    logprobs = (chosen[:, 0] - log_z).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    if top_n:
        # Ties are ordered by id, which topk does not promise: look a little further, then sort.
        width = min(top_n + 16, logits.shape[1])
        values, ids = logits.topk(width, dim=1)
        pairs = zip(ids.tolist(), (values - log_z[:, None]).tolist(), strict=True)
        tops = [
            tuple(sorted(zip(row_ids, row_values, strict=True), key=lambda pair: (-pair[1], pair[0]))[:top_n])
            for row_ids, row_values in pairs
        ]
    return [SampledToken(*fields) for fields in zip(token_ids, logprobs, ranks, tops, strict=True)]
