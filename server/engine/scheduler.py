"""Decides what each step computes. No prefill, no decode: every sequence is some tokens behind, and catches up.

A step gives each scheduled sequence some of its uncomputed tokens (drafts included) under a token budget:
sequences that are one answer token behind first, then unfinished prompts, then new ones. When blocks run out
the newest sequence that is not yet part of the step gives up its own and starts over later.
"""

import time
from collections import deque
from dataclasses import replace

from specserve.models.block_manager import BlockManager
from specserve.models.sampling.params import SampledToken
from specserve.server.engine.errors import NonFiniteLogitsError, RequestTooLargeError
from specserve.server.engine.sequence import (
    Acceptance,
    GenerationSummary,
    Request,
    Sequence,
    SequenceEvent,
    TextPiece,
    TokenOutput,
)
from specserve.server.engine.step import Admission, RowOutput, ScheduledBatch, ScheduledRow, StepOutput
from specserve.speculators.draft_length import DraftLength


class Scheduler:
    """Holds all sequences of the engine; at most max_batch_size of them run at once."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_batch_tokens: int,
        max_batch_size: int,
        draft_length: DraftLength | None = None,
    ) -> None:
        """draft_length: how much is drafted; None: nothing."""
        self.block_manager = block_manager
        self.max_batch_tokens = max_batch_tokens
        self.draft_length = draft_length or DraftLength(0)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self.num_finished = 0
        self.num_generated_tokens = 0
        self.acceptance = Acceptance()
        self._free_row_slots = list(range(max_batch_size - 1, -1, -1))
        self._released: list[int] = []
        self._scheduled: list[Sequence] = []
        self._next_request_id = 0

    def add(self, request: Request) -> int:
        """Queue a request; its id. RequestTooLargeError if it could never fit the KV cache."""
        most_tokens = len(request.prompt_token_ids) + request.max_new_tokens
        if self.block_manager.num_blocks_for(most_tokens) > self.block_manager.num_blocks:
            capacity = self.block_manager.num_blocks * self.block_manager.block_size
            raise RequestTooLargeError(
                f"stopping.max_new_tokens: prompt ({len(request.prompt_token_ids)}) and answer "
                f"({request.max_new_tokens}) together need {most_tokens} tokens of KV cache, it holds {capacity}; "
                "ask for fewer, or start the server with a larger --kv-cache-memory"
            )
        request_id = self._next_request_id
        self._next_request_id += 1
        token_ids = list(request.prompt_token_ids)
        self.waiting.append(Sequence(request_id, request, time.monotonic(), token_ids, len(token_ids)))
        return request_id

    def abort(self, request_id: int) -> None:
        """Forget a request in whatever state it is; unknown and finished ids are no error."""
        for seq in self.running:
            if seq.request_id == request_id:
                self._release(seq)
                return
        for seq in self.waiting:
            if seq.request_id == request_id:
                self.waiting.remove(seq)
                return

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running)

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when there is nothing to do."""
        rows: list[ScheduledRow] = []
        self._scheduled = []
        budget = self.max_batch_tokens
        behind_by_one = [seq for seq in self.running if seq.num_computed_tokens >= len(seq.token_ids) - 1]
        unfinished = [seq for seq in self.running if seq.num_computed_tokens < len(seq.token_ids) - 1]
        for seq in behind_by_one + unfinished:
            if budget == 0:
                break
            if seq.row_slot is None:  # preempted in this very step
                continue
            new_blocks = self._make_room(seq, budget)
            if new_blocks is not None:
                rows.append(self._row(seq, budget, new_blocks))
                budget -= rows[-1].num_tokens
        admissions = self._admit(rows, budget)
        if not rows:
            return None
        self._choose_draft_lengths(rows)
        released, self._released = self._released, []
        return ScheduledBatch(released, admissions, rows, self.draft_length.min_gain)

    def update(self, batch: ScheduledBatch, output: StepOutput, seconds: float) -> list[SequenceEvent]:
        """Take in what a step computed in so many seconds; the events to send."""
        events = []
        if not output.is_routine:
            self.draft_length.measure_catch_up(output.draft_seconds)
        elif all(row.samples and row.num_tokens == row.num_drafts + 1 for row in batch.rows):
            num_tokens, rounds = sum(row.num_tokens for row in batch.rows), max(len(r.draft_ids) for r in output.rows)
            self.draft_length.measure(num_tokens, len(batch.rows), rounds, seconds, output.draft_seconds)
        for seq, row, result in zip(self._scheduled, batch.rows, output.rows, strict=True):
            seq.num_computed_tokens = row.start + row.num_tokens - (row.num_drafts - result.num_accepted)
            seq.draft_ids = []
            seq.prompt_outputs.extend(_token_output(token) for token in result.prompt)
            if result.tokens:
                events.append(self._advance(seq, row, result))
            else:
                self.block_manager.cache_computed(seq)
        return events

    def check_integrity(self) -> None:
        """Assert that blocks and row slots are where they should be; for tests."""
        self.block_manager.check_integrity(self.running)
        slots = [seq.row_slot for seq in self.running]
        assert None not in slots and len(set(slots)) == len(slots)
        assert not set(slots) & set(self._free_row_slots)
        assert all(seq.row_slot is None and not seq.block_table for seq in self.waiting)

    # ---- scheduling

    def _make_room(self, seq: Sequence, budget: int) -> list[int] | None:
        """Blocks for the sequence's next tokens, taken from newer sequences if need be; None: it had to yield."""
        room_for_drafts = seq.request.max_new_tokens - seq.num_generated_tokens - 1
        del seq.draft_ids[max(0, min(room_for_drafts, budget - 1)) :]
        while True:
            num_tokens = seq.num_computed_tokens + min(seq.num_uncomputed_tokens, budget)
            new_blocks = self.block_manager.grow(seq, num_tokens)
            if new_blocks is not None:
                return new_blocks
            if seq.draft_ids:
                seq.draft_ids = []
                continue
            victim = next(other for other in reversed(self.running) if other not in self._scheduled)
            self._preempt(victim)
            if victim is seq:
                return None

    def _row(self, seq: Sequence, budget: int, new_block_ids: list[int]) -> ScheduledRow:
        assert seq.row_slot is not None
        self._scheduled.append(seq)
        start = seq.num_computed_tokens
        end = start + min(seq.num_uncomputed_tokens, budget)
        left = seq.request.max_new_tokens - seq.num_generated_tokens - 2  # this step's token, the next one's
        cap = self.draft_length.longest
        if seq.request.max_draft_tokens is not None:
            cap = min(cap, seq.request.max_draft_tokens)
        return ScheduledRow(
            row_slot=seq.row_slot,
            start=start,
            token_ids=seq.token_ids[start:end] + seq.draft_ids,
            new_block_ids=new_block_ids,
            num_drafts=len(seq.draft_ids),
            samples=end == len(seq.token_ids) + len(seq.draft_ids),
            prompt_logprobs=seq.wants_prompt_logprobs,
            max_draft_tokens=max(0, min(cap, left)),
        )

    def _choose_draft_lengths(self, rows: list[ScheduledRow]) -> None:
        """Up to here each row's max_draft_tokens is what it could use."""
        indices = [index for index, row in enumerate(rows) if row.samples]
        rates = [self._scheduled[index].acceptance_rate for index in indices]
        lengths = self.draft_length.choose(rates, [rows[index].max_draft_tokens for index in indices])
        for index, length in zip(indices, lengths, strict=True):
            rows[index] = replace(rows[index], max_draft_tokens=length)

    def _admit(self, rows: list[ScheduledRow], budget: int) -> list[Admission]:
        """First come, first served: a request that doesn't fit yet holds back those behind it."""
        admissions: list[Admission] = []
        while self.waiting and self._free_row_slots and budget > 0:
            seq = self.waiting[0]
            prefix = [] if seq.wants_prompt_logprobs else self.block_manager.find_prefix(seq)
            if not self.block_manager.can_admit(seq, prefix):
                break
            self.waiting.popleft()
            self.running.append(seq)
            seq.row_slot = self._free_row_slots.pop()
            self.block_manager.adopt_prefix(seq, prefix)
            if seq.first_scheduled_time is None:
                seq.first_scheduled_time = time.monotonic()
                seq.num_cached_prompt_tokens = seq.num_computed_tokens
            cached_blocks = list(seq.block_table)
            end = seq.num_computed_tokens + min(seq.num_uncomputed_tokens, budget)
            new_blocks = self.block_manager.grow(seq, end)
            assert new_blocks is not None, "can_admit promised them"
            split, request = seq.num_prompt_tokens, seq.request
            admissions.append(
                Admission(
                    seq.row_slot, request.sampling, seq.token_ids[:split], seq.token_ids[split:], request.usd_method
                )
            )
            rows.append(self._row(seq, budget, cached_blocks + new_blocks))
            budget -= rows[-1].num_tokens
        return admissions

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        self._release(seq)
        seq.draft_ids = []
        if seq.wants_prompt_logprobs:
            seq.prompt_outputs = []
        self.waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        assert seq.row_slot is not None
        self.running.remove(seq)
        self.block_manager.free(seq)
        self._released.append(seq.row_slot)
        self._free_row_slots.append(seq.row_slot)
        seq.row_slot = None

    # ---- results

    def _advance(self, seq: Sequence, row: ScheduledRow, result: RowOutput) -> SequenceEvent:
        """Append the tokens of one row up to the one that ends the sequence."""
        tokens: list[TokenOutput] = []
        text, piece = "", None
        is_first = seq.num_generated_tokens == 0
        for token in result.tokens:
            if token.token_id is None:
                return self._fail(
                    seq,
                    NonFiniteLogitsError(
                        f"the model gave non-finite logits at position {len(seq.token_ids)}; only this request ends"
                    ),
                )
            seq.token_ids.append(token.token_id)
            try:
                piece = seq.request.text_stream.push(token.token_id)
            except Exception as error:  # whatever the tokenizer trips over, the other requests go on
                return self._fail(seq, error)
            tokens.append(_token_output(token, piece.token_text))
            text += piece.delta
            if piece.finish_reason is not None:
                break
        now = time.monotonic()
        if seq.first_token_time is None:
            seq.first_token_time = now
        self.num_generated_tokens += len(tokens)
        for acceptance in (seq.acceptance, self.acceptance):
            acceptance.add(row.num_drafts, min(result.num_accepted, len(tokens)))
        self.draft_length.observe(seq.acceptance_rate, row.num_drafts, result.num_accepted)
        self.block_manager.cache_computed(seq)
        summary = None
        if piece is not None and piece.finish_reason is not None:
            summary = _summary(seq, piece, now)
            self.num_finished += 1
            self._release(seq)
        else:
            seq.draft_ids = result.draft_ids
        return SequenceEvent(
            seq.request_id,
            tuple(tokens),
            text,
            seq.num_generated_tokens,
            _prompt_details(seq) if is_first and seq.request.prompt_details else None,
            summary,
        )

    def _fail(self, seq: Sequence, error: Exception) -> SequenceEvent:
        self._release(seq)
        return SequenceEvent(seq.request_id, generated_tokens=seq.num_generated_tokens, error=error)


def _prompt_details(seq: Sequence) -> tuple[TokenOutput, ...]:
    """All prompt tokens; the first one has no log-probability, and without prompt_logprobs none has."""
    scored = len(seq.prompt_outputs)
    bare = [TokenOutput(token_id) for token_id in seq.token_ids[: seq.num_prompt_tokens - scored]]
    return (*bare, *seq.prompt_outputs)


def _token_output(token: SampledToken, text: str = "") -> TokenOutput:
    assert token.token_id is not None
    return TokenOutput(token.token_id, token.logprob, token.rank, token.top, text)


def _summary(seq: Sequence, piece: TextPiece, now: float) -> GenerationSummary:
    assert piece.finish_reason is not None
    assert seq.first_scheduled_time is not None and seq.first_token_time is not None
    return GenerationSummary(
        finish_reason=piece.finish_reason,
        prompt_tokens=seq.num_prompt_tokens,
        generated_tokens=seq.num_generated_tokens,
        seed=seq.request.sampling.seed,
        queue_seconds=seq.first_scheduled_time - seq.arrival_time,
        prefill_seconds=seq.first_token_time - seq.first_scheduled_time,
        decode_seconds=now - seq.first_token_time,
        drafted_tokens=seq.acceptance.num_drafted_tokens,
        accepted_tokens=seq.acceptance.num_accepted_tokens,
        num_drafts=seq.acceptance.num_drafts,
        accepted_per_position=tuple(seq.acceptance.per_position),
        cached_prompt_tokens=seq.num_cached_prompt_tokens,
        stop_string=piece.stop_string,
        stop_token_id=piece.stop_token_id,
    )
