"""Training data from the model itself: it answers prompts, its own or given ones, and its states are kept.

The answers of a target are what its speculator will have to guess, so they are what it should learn from.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specserve.models.hub import ModelError
from specserve.models.sampling.params import SamplingParams
from specserve.server.engine.engine import Engine
from specserve.server.engine.sequence import FinishReason, Request, SequenceEvent
from specserve.server.serving import Serving
from specserve.server.stopping import StoppingParams, StopTextStream
from specserve.speculators.training.dataset import DatasetWriter, Record
from specserve.speculators.training.recorder import HiddenRecorder

TURN_TOKENS = 96  # of a user turn that the model writes itself
# Its first token is drawn from a flattened law: left to itself, a model begins most of its turns with a few words.
FIRST_TEMPERATURE, FIRST_TOP_K = 2.0, 200
TURN_TEMPERATURE = 0.8
ANSWER_TEMPERATURE = 0.8  # of every second answer; the others are greedy


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Prompts from a file or, where there is none, user turns that the model writes itself."""

    file: Path | None
    prompts: tuple[str | list[dict[str, str]], ...] = ()

    @classmethod
    def read(cls, file: Path | None) -> "PromptSource":
        """.jsonl: a line {"prompt": text} or {"messages": [...]}; else a prompt a line. ModelError, in one line."""
        if file is None:
            return cls(None)
        try:
            lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"--prompts {file}: can't be read: {error}") from error
        if not lines:
            raise ModelError(f"--prompts {file} holds no prompt; give one a line")
        if file.suffix != ".jsonl":
            return cls(file, tuple(lines))
        return cls(file, tuple(_parse_line(file, number, line) for number, line in enumerate(lines, 1)))


def _parse_line(file: Path, number: int, line: str) -> str | list[dict[str, str]]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ModelError(f"--prompts {file}: line {number} is not JSON: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return str(value["prompt"])
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return list(value["messages"])
    raise ModelError(f'--prompts {file}: line {number} has neither "prompt", a text, nor "messages", a list')


class SelfDistillation:
    """Generates records one after the other; the same seed gives the same ones, on whatever batch size."""

    def __init__(
        self,
        serving: Serving,
        engine: Engine,
        recorder: HiddenRecorder,
        source: PromptSource,
        *,
        seed: int,
        length: int,
    ) -> None:
        """Raises ModelError if there are no prompts and the model can't write any."""
        self._serving, self._engine, self._recorder, self._source = serving, engine, recorder, source
        self._seed, self._length = seed, length
        self._header = ""  # before what a user says
        if source.file is None and not serving.chat_template.exists:
            raise ModelError(
                f"{serving.description.model_id} has no chat template, so it can't write prompts itself; give --prompts"
            )
        if source.file is None:
            self._header = serving.chat_template.user_header()
        self._most = min(serving.description.max_total_tokens, max(TURN_TOKENS + 2 * length, 1024))
        if length > self._most // 2:
            raise ModelError(
                f"--max-new-tokens is {length}; prompt and answer together may have {self._most} tokens, so give at "
                f"most {self._most // 2}"
            )
        recorder.requests = lambda: {
            seq.row_slot: seq.request_id for seq in engine.scheduler.running if seq.row_slot is not None
        }
        # So many that none is ever preempted and computed twice.
        stats = engine.stats()
        self._num_rows = min(serving.description.max_batch_size, stats.num_blocks * stats.block_size // self._most)

    def run(self, writer: DatasetWriter, num_tokens: int, on_progress: Callable[[int], None]) -> None:
        """Append records until num_tokens tokens have a state, or a prompt file is through."""
        next_index = writer.num_records
        running: dict[int, _Work] = {}
        done: dict[int, tuple[Record, torch.Tensor]] = {}
        while writer.num_tokens < num_tokens:
            while len(running) < self._num_rows and self._has_prompt(next_index):
                self._begin(running, next_index)
                next_index += 1
            if not running:
                return
            for event in self._engine.step():
                work = running[event.request_id]
                work.token_ids += [token.token_id for token in event.tokens]
                if event.is_terminal:
                    self._finish(running, event, done)
            while writer.num_records in done:
                writer.add(*done.pop(writer.num_records))
                on_progress(writer.num_tokens)
        for request_id in running:
            self._engine.abort(request_id)

    def _has_prompt(self, index: int) -> bool:
        return self._source.file is None or index < len(self._source.prompts)

    def _begin(self, running: "dict[int, _Work]", index: int) -> None:
        if self._source.file is None:
            header = self._encode(self._header, TURN_TOKENS)
            self._add(running, _Work(index, None), header, _first_token(self._seed + index), 1)
        else:
            self._begin_answer(running, index, self._source.prompts[index])

    def _begin_answer(self, running: "dict[int, _Work]", index: int, prompt: str | list[dict[str, str]]) -> None:
        is_chat = self._serving.chat_template.exists
        try:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = self._serving.chat_template.render(messages) if is_chat else str(prompt)
        except ValueError as error:
            raise ModelError(f"--prompts {self._source.file}: prompt {index + 1}: {error}") from error
        temperature = ANSWER_TEMPERATURE if index % 2 else 0.0
        sampling = SamplingParams(temperature=temperature, seed=self._seed + index)
        self._add(running, _Work(index, text), self._encode(text, self._length), sampling, self._length)

    def _continue_turn(self, running: "dict[int, _Work]", work: "_Work") -> None:
        prompt = [*self._encode(self._header, TURN_TOKENS), *work.turn]
        sampling = SamplingParams(temperature=TURN_TEMPERATURE, seed=self._seed + work.index)
        self._add(running, work, prompt, sampling, TURN_TOKENS)

    def _encode(self, text: str, length: int) -> list[int]:
        """The end of a text that leaves room for an answer of `length` tokens."""
        is_chat = self._serving.chat_template.exists
        token_ids = self._serving.tokenizer.encode(text, add_special_tokens=not is_chat)
        return token_ids[-(self._most - length) :]

    def _add(
        self, running: "dict[int, _Work]", work: "_Work", prompt: list[int], sampling: SamplingParams, length: int
    ) -> None:
        stopping = StoppingParams(
            max_new_tokens=length,
            min_new_tokens=0,
            stop_strings=(),
            stop_token_ids=frozenset(),
            eos_token_ids=frozenset(self._serving.description.eos_token_ids),
        )
        text = StopTextStream(self._serving.tokenizer, stopping)
        running[self._engine.add(Request(prompt, sampling, text, length))] = work

    def _finish(
        self, running: "dict[int, _Work]", event: SequenceEvent, done: dict[int, tuple[Record, torch.Tensor]]
    ) -> None:
        work = running.pop(event.request_id)
        if event.error is not None:
            raise ModelError(f"prompt {work.index + 1} failed: {event.error}") from event.error
        recorded, states = self._recorder.take(event.request_id)
        assert recorded == work.token_ids[: len(recorded)], "states belong to the tokens of another request"
        if work.prompt is not None:
            done[work.index] = Record(work.index, work.prompt, work.token_ids, len(recorded)), states
            return
        is_first, work.turn, work.token_ids = not work.turn, work.turn + work.token_ids, []
        if is_first and event.summary is not None and event.summary.finish_reason is FinishReason.LENGTH:
            self._continue_turn(running, work)
        else:
            text = self._serving.tokenizer.decode(work.turn, skip_special_tokens=True)
            self._begin_answer(running, work.index, text.strip() or "Hello")


class _Work:
    """A request under way: a user turn (prompt None) or an answer."""

    def __init__(self, index: int, prompt: str | None) -> None:
        self.index, self.prompt = index, prompt
        self.token_ids: list[int] = []
        self.turn: list[int] = []


def _first_token(seed: int) -> SamplingParams:
    return SamplingParams(temperature=FIRST_TEMPERATURE, top_k=FIRST_TOP_K, seed=seed)


def meta_of(serving: Serving, hidden_size: int, source: PromptSource, *, seed: int, length: int) -> dict[str, Any]:
    """What data must have in common to be continued."""
    return {
        "model_id": serving.description.model_id,
        "revision": serving.description.revision,
        "dtype": serving.description.dtype,
        "hidden_size": hidden_size,
        "prompts": None if source.file is None else str(source.file),
        "turns": [FIRST_TEMPERATURE, FIRST_TOP_K, TURN_TEMPERATURE, TURN_TOKENS] if source.file is None else None,
        "seed": seed,
        "length": length,
    }
