"""Runs models over the paged cache in ragged, chunked batches; used through fixtures in conftest.py."""

import itertools
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from specserve.models.attention.registry import attention_backend
from specserve.models.causal_lm import CausalLM
from specserve.models.config import load_config
from specserve.models.forward_batch import ForwardBatch
from specserve.models.hub import ModelFiles
from specserve.models.kv_cache import KVCache
from specserve.models.parallel import TensorParallel
from specserve.models.registry import load_model

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32, attention: str = "torch") -> CausalLM:
    """Load a model from a directory or .gguf file onto the CPU."""
    files = ModelFiles(str(path), None, path, "gguf" if path.suffix == ".gguf" else "hub")
    config = load_config(files)
    backend, _ = attention_backend(attention, device=CPU, dtype=dtype, block_size=BLOCK_SIZE)
    return load_model(files, config, dtype=dtype, device=CPU, parallel=TensorParallel(), attention=backend)


class PagedRunner:
    """Feeds sequences to a model; blocks of the sequences are interleaved and out of order."""

    def __init__(self, model: CausalLM, num_sequences: int, max_len: int, dtype: torch.dtype = torch.float32) -> None:
        config = model.config
        per_sequence = -(-max_len // BLOCK_SIZE)
        num_blocks = num_sequences * per_sequence + 1
        self.model = model
        self.cache = KVCache.allocate(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_kv_heads=model.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=CPU,
        )
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.fill_(float("nan"))  # a read of what was never written shows
        blocks = list(range(1, num_blocks))
        random.Random(0).shuffle(blocks)
        self.tables = [blocks[i::num_sequences] for i in range(num_sequences)]
        self.lengths = [0] * num_sequences

    @torch.inference_mode()
    def step(self, pieces: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Sequence -> its next tokens; gives the logits [len, V] after each of them."""
        slots, positions = [], []
        for sequence, tokens in pieces.items():
            start = self.lengths[sequence]
            for position in range(start, start + len(tokens)):
                positions.append(position)
                slots.append(self.tables[sequence][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            self.lengths[sequence] = start + len(tokens)
        lengths = [len(tokens) for tokens in pieces.values()]
        used = [self.tables[sequence] for sequence in pieces]
        batch = ForwardBatch(
            input_ids=torch.tensor(list(itertools.chain(*pieces.values()))),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor(used, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
            seq_lens=torch.tensor([self.lengths[s] for s in pieces], dtype=torch.int32),
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(self.lengths[s] for s in pieces),
            logits_indices=torch.arange(sum(lengths)),
        )
        batch.check()
        logits = self.model.compute_logits(self.model(batch, self.cache))
        return dict(zip(pieces, logits.split(lengths), strict=True))


def paged_logits(
    model: CausalLM, sequences: list[list[int]], *, num_decoded: int = 3, seed: int = 1
) -> list[torch.Tensor]:
    """Logits [len, V] of each sequence: the start in chunks of several sizes, the last tokens one by one."""
    runner = PagedRunner(model, len(sequences), max(map(len, sequences)))
    rng = random.Random(seed)
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(done < len(s) for done, s in zip(runner.lengths, sequences, strict=True)):
        pieces = {}
        for index, sequence in enumerate(sequences):
            done, first_decoded = runner.lengths[index], len(sequence) - num_decoded
            size = rng.randint(2, 40) if done < first_decoded else 1
            end = min(done + size, first_decoded if done < first_decoded else len(sequence))
            if end > done:
                pieces[index] = sequence[done:end]
        for index, logits in runner.step(pieces).items():
            rows[index].append(logits)
    return [torch.cat(parts) for parts in rows]


def greedy(model: CausalLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations, all prompts in one batch."""
    runner = PagedRunner(model, len(prompts), max(map(len, prompts)) + num_tokens)
    outputs: list[list[int]] = [[] for _ in prompts]
    pieces = dict(enumerate(prompts))
    for _ in range(num_tokens):
        for index, logits in runner.step(pieces).items():
            outputs[index].append(int(logits[-1].argmax()))
        pieces = {index: output[-1:] for index, output in enumerate(outputs)}
    return outputs


LOADER = """
    import sys
    from pathlib import Path
    import torch
    from specserve.models.attention.torch import TorchAttention
    from specserve.models.config import load_config
    from specserve.models.hub import ModelFiles
    from specserve.models.parallel import TensorParallel
    from specserve.models.registry import load_model

    def peak():  # unlike ru_maxrss, it doesn't begin with what the parent process had
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    files = ModelFiles("m", None, Path(sys.argv[1]), sys.argv[2])
    before = peak()
    model = load_model(
        files, load_config(files), dtype=getattr(torch, sys.argv[3]), device=torch.device("cpu"),
        parallel=TensorParallel(), attention=TorchAttention(),
    )
    print(peak() - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""


def peak_growth(path: Path, kind: str, dtype: str) -> tuple[int, int]:
    """Bytes by which loading raises the peak of resident memory, and bytes of the weights."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOADER), str(path), kind, dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    growth, weights = map(int, run.stdout.split())
    return growth, weights
