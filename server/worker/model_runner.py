"""Runs one step on this rank: load, model, logits, verify, propose, collect."""

import time
from collections.abc import Sequence

import torch

from specserve.models.causal_lm import CausalLM
from specserve.models.input_buffers import InputBuffers
from specserve.models.kv_cache import KVCache
from specserve.models.layers.embedding import VocabParallelHead
from specserve.models.sampling.params import SampledToken
from specserve.models.sampling.sampler import Sampler, SampleRow, score_tokens
from specserve.server.engine.step import Admission, RowOutput, ScheduledBatch, ScheduledRow, StepOutput
from specserve.speculators.base import ProposalInput, Speculator
from specserve.speculators.verify import Verified, VerifyRow, verify

# Prompt scoring takes the logits of so many positions at once; V can be 262,144.
SCORED_ROWS_AT_ONCE = 64


class ModelRunner:
    """The model, its KV cache and the per-row state of one rank."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        speculator: Speculator,
        *,
        max_rows: int,
        max_total_tokens: int,
        rejects: bool = False,
    ) -> None:
        """rejects: requests that sample without a seed of their own are verified by rejection."""
        self._link = model.parallel.link  # rank 0 decides for all of them
        device = kv_cache.keys[0].device
        self.model = model
        self._speculator, self._rejects = speculator, rejects
        self._kv_cache = kv_cache
        self._buffers = InputBuffers(
            max_rows=max_rows,
            max_blocks=-(-max_total_tokens // kv_cache.block_size),
            block_size=kv_cache.block_size,
            device=device,
        )
        self._sampler = Sampler(max_rows, model.config.vocab_size, device)
        self._admitted: dict[int, Admission] = {}
        self._num_outputs: dict[int, int] = {}
        self._draft_probs: dict[int, torch.Tensor] = {}  # the law behind the drafts of a row slot, if they have one

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Compute one step. What a row needs of the past was given on its admission."""
        for row_slot in batch.released:
            self._buffers.release(row_slot)
            self._sampler.release(row_slot)
            self._speculator.release(row_slot)
            self._draft_probs.pop(row_slot, None)
        for admission in batch.admissions:
            self._admit(admission)
        forward_batch = self._buffers.load(batch.rows)
        forward_batch.check()
        hidden = self.model(forward_batch, self._kv_cache)  # [N, E]
        outputs = [RowOutput() for _ in batch.rows]
        result = StepOutput(outputs)
        self._decide(batch, hidden[forward_batch.logits_indices], result)
        self._score_prompts(batch.rows, hidden, outputs)
        return result

    def _admit(self, admission: Admission) -> None:
        self._admitted[admission.row_slot] = admission
        self._num_outputs[admission.row_slot] = len(admission.output_token_ids)
        self._sampler.admit(
            admission.row_slot, admission.sampling, admission.prompt_token_ids, admission.output_token_ids
        )
        token_ids = admission.prompt_token_ids + admission.output_token_ids
        self._speculator.admit(admission.row_slot, token_ids, admission.usd_method)

    def _decide(self, batch: ScheduledBatch, hidden: torch.Tensor, result: StepOutput) -> None:
        """Verify the rows whose share reaches their end, with hidden [R, E] for their logits, and draft for them."""
        deciding = [(row, output) for row, output in zip(batch.rows, result.rows, strict=True) if row.samples]
        if not deciding:
            return
        verify_rows = [self._verify_row(row) for row, _ in deciding]
        results = self._verify(self.model.compute_logits(hidden), verify_rows)
        first, drafting = 0, []
        for (row, output), verify_row, verified in zip(deciding, verify_rows, results, strict=True):
            output.tokens = verified.tokens
            output.num_accepted = verified.num_accepted
            emitted = [token.token_id for token in verified.tokens if token.token_id is not None]
            self._sampler.accept(row.row_slot, emitted)
            self._speculator.accept(row.row_slot, emitted)
            self._num_outputs[row.row_slot] += len(emitted)
            if row.max_draft_tokens and len(emitted) == len(verified.tokens):
                drafting.append((row, output, verify_row, verified, first + verified.num_accepted))
            first += row.num_drafts + 1
        if drafting:
            # The tokens before and behind it are on the host, so that the device is idle at both ends.
            started = time.perf_counter()
            result.is_routine = self._propose(drafting, hidden, batch.min_gain)
            result.draft_seconds = time.perf_counter() - started

    def _verify(self, logits: torch.Tensor, rows: list[VerifyRow]) -> list[Verified]:
        """Rank 0's decision; the other ranks take it over."""
        if self._link.group is None:
            return verify(logits, self._sampler, rows)
        results = verify(logits, self._sampler, rows) if self._link.rank == 0 else None
        message = None
        if results is not None:
            ids = [[-1 if t.token_id is None else t.token_id for t in result.tokens] for result in results]
            message = [number for row in ids for number in (len(row), *row)]
        shared = iter(self._link.share(message).tolist())
        if results is not None:
            return results
        decided = [[next(shared) for _ in range(next(shared))] for _ in rows]
        return [
            Verified([SampledToken(None if token_id < 0 else token_id) for token_id in row], len(row) - 1)
            for row in decided
        ]

    def _verify_row(self, row: ScheduledRow) -> VerifyRow:
        probs = self._draft_probs.pop(row.row_slot, None)
        return VerifyRow(
            row_slot=row.row_slot,
            position=row.start + row.num_tokens - row.num_drafts,
            num_output_tokens=self._num_outputs[row.row_slot],
            draft_ids=tuple(row.token_ids[row.num_tokens - row.num_drafts :]),
            draft_probs=None if probs is None or not row.num_drafts else probs[: row.num_drafts],
        )

    def _propose(
        self,
        drafting: list[tuple[ScheduledRow, RowOutput, VerifyRow, Verified, int]],
        hidden: torch.Tensor,
        min_gain: float,
    ) -> bool:
        """Draft behind the last emitted token of each row; the last item of a row is its index in hidden [R, E].

        Gives Draft.is_routine.
        """

        laws: dict[int, list[torch.Tensor]] = {}  # of the drafts that are drawn, by row slot

        def choose(
            logits: torch.Tensor,
            step: int,
            target_ids: torch.Tensor | None = None,
            indices: Sequence[int] | None = None,
            head: VocabParallelHead | None = None,
        ) -> torch.Tensor:
            chosen = drafting if indices is None else [drafting[index] for index in indices]
            rows = [
                SampleRow(row.row_slot, before.position + verified.num_accepted + 1 + step, 0)
                for row, _, before, verified, _ in chosen
            ]
            free = [i for i, row in enumerate(rows) if self._rejects and self._sampler.draws_freely(row.row_slot)]
            if head is not None and head.parallel.size > 1:
                if not free and not any(self._sampler.needs_law(row.row_slot) for row in rows):
                    return choose_over_ranks(self._sampler, head, logits, rows, target_ids)
                logits = head.gather(logits)
            columns = self._sampler.choose_drafts(logits, rows, target_ids)
            if free:
                columns[free], drawn_from = self._sampler.draw_drafts(logits[free], [rows[i] for i in free], target_ids)
                for index, law in zip(free, drawn_from, strict=True):
                    laws.setdefault(rows[index].row_slot, []).append(law)
            return columns

        device = hidden.device
        last_tokens = [verified.tokens[-1].token_id for _, _, _, verified, _ in drafting]
        draft = self._speculator.propose(
            ProposalInput(
                row_slots=[row.row_slot for row, *_ in drafting],
                token_ids=torch.tensor(last_tokens, device=device),
                hidden=hidden[torch.tensor([index for *_, index in drafting], device=device)],
                max_lengths=[row.max_draft_tokens for row, *_ in drafting],
                choose=choose,
                min_gain=min_gain,
            )
        )
        for index, ((row, output, *_), draft_ids) in enumerate(zip(drafting, draft.rows(), strict=True)):
            output.draft_ids = draft_ids
            if draft.probs is not None:
                self._draft_probs[row.row_slot] = draft.probs[index]
            elif row.row_slot in laws:
                self._draft_probs[row.row_slot] = torch.stack(laws[row.row_slot])
        return draft.is_routine

    def _score_prompts(self, rows: list[ScheduledRow], hidden: torch.Tensor, outputs: list[RowOutput]) -> None:
        first = 0
        for row, output in zip(rows, outputs, strict=True):
            if row.prompt_logprobs:
                admission = self._admitted[row.row_slot]
                targets = admission.prompt_token_ids[row.start + 1 : row.start + 1 + row.num_tokens]
                output.prompt = self._score(
                    hidden[first : first + len(targets)], targets, admission.sampling.top_n_tokens
                )
            first += row.num_tokens

    def _score(self, hidden: torch.Tensor, token_ids: list[int], top_n: int) -> list[SampledToken]:
        scored: list[SampledToken] = []
        for start in range(0, len(token_ids), SCORED_ROWS_AT_ONCE):
            some = slice(start, start + SCORED_ROWS_AT_ONCE)
            scored += score_tokens(self.model.compute_logits(hidden[some]), token_ids[some], top_n)
        return scored


def choose_over_ranks(
    sampler: Sampler,
    head: VocabParallelHead,
    logits: torch.Tensor,
    rows: list[SampleRow],
    target_ids: torch.Tensor | None,
) -> torch.Tensor:
    """Columns [B] of all ranks' logits, of which this rank has [B, n]: a (score, column) pair of each rank travels."""
    last = head.first + logits.shape[1]
    ids = torch.arange(head.first, last, device=logits.device) if target_ids is None else target_ids[head.first : last]
    columns, scores = sampler.best_drafts(logits, rows, ids)
    pair = torch.stack([scores, (columns + head.first).double()], dim=1)
    pairs = head.parallel.all_gather_last_dim(pair).view(len(rows), -1, 2)
    best = pairs[:, :, 0].argmax(dim=1)  # the first of equals, so the lowest column
    chosen = pairs[torch.arange(len(rows), device=logits.device), best]
    return torch.where(chosen[:, 0].isfinite(), chosen[:, 1], 0.0).long()
