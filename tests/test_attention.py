"""Attention backends against each other, and against attention written out."""

import itertools
import math

import pytest
import torch

from specserve.models.attention.cpu import CpuAttention
from specserve.models.attention.registry import attention_backend
from specserve.models.attention.torch import TorchAttention
from specserve.models.forward_batch import ForwardBatch

CPU = torch.device("cpu")


def make_case(lens, query_lens, heads, kv_heads, head_dim, block_size, seed=0):
    """A batch whose block tables are shuffled, its packed q, k, v, and a cache of noise."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // block_size) for length in lens]
    total = sum(num_blocks) + 3
    shuffled = torch.randperm(total, generator=generator).int()
    tables = torch.zeros(len(lens), max(num_blocks), dtype=torch.int32)
    first = 0
    for row, count in enumerate(num_blocks):
        tables[row, :count] = shuffled[first : first + count]
        first += count
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(lens, query_lens, strict=True)])
    rows = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(query_lens))
    cu_seqlens = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    batch = ForwardBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=tables[rows, positions // block_size].long() * block_size + positions % block_size,
        block_tables=tables,
        cu_seqlens_q=cu_seqlens,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(lens),
        logits_indices=cu_seqlens[1:].long() - 1,
    )
    batch.check()
    qkv = torch.randn(sum(query_lens), heads + 2 * kv_heads, head_dim, generator=generator)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    shape = (total, block_size, kv_heads, head_dim)
    return batch, q, k, v, torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def run(backend, case, window=None):
    batch, q, k, v, keys, values = case
    keys, values = keys.clone(), values.clone()
    backend.prepare(batch)
    out = backend.forward(q, k, v, keys, values, batch, scale=q.shape[-1] ** -0.5, sliding_window=window)
    return out, keys, values


def written_out(case, window):
    """Query by query, head by head, in float64."""
    batch, q, k, _, keys, values = case
    _, keys, values = run(TorchAttention(), case)
    out = torch.zeros(q.shape, dtype=torch.float64)
    block_size, group = keys.shape[1], q.shape[1] // k.shape[1]
    for b in range(len(batch.seq_lens)):
        start, end = batch.cu_seqlens_q[b : b + 2].tolist()
        for n in range(start, end):
            position = int(batch.positions[n])
            first = 0 if window is None else max(0, position - window + 1)
            where = torch.arange(first, position + 1)
            slots = batch.block_tables[b, where // block_size].long() * block_size + where % block_size
            for head in range(q.shape[1]):
                key = keys.flatten(0, 1)[slots, head // group].double()
                value = values.flatten(0, 1)[slots, head // group].double()
                weights = (key @ q[n, head].double() / math.sqrt(q.shape[-1])).softmax(0)
                out[n, head] = weights @ value
    return out


LENS, QUERY_LENS = [1, 17, 300, 700, 40, 33, 18], [1, 3, 1, 5, 40, 16, 17]


@pytest.mark.parametrize("window", [None, 1, 16, 290])
@pytest.mark.parametrize("backend", [TorchAttention, CpuAttention])
def test_matches_attention_written_out(backend, window):
    case = make_case([1, 17, 300, 9], [1, 3, 2, 9], heads=6, kv_heads=2, head_dim=8, block_size=4)
    out, _, _ = run(backend(), case, window)
    torch.testing.assert_close(out.double(), written_out(case, window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (9, 3), (8, 1)])
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_kernel_equals_the_reference(head_dim, block_size, heads, kv_heads, window):
    case = make_case(LENS, QUERY_LENS, heads, kv_heads, head_dim, block_size)
    expected, actual = run(TorchAttention(), case, window), run(CpuAttention(), case, window)
    torch.testing.assert_close(actual[0], expected[0], atol=3e-6, rtol=1e-5)
    assert torch.equal(actual[1], expected[1]) and torch.equal(actual[2], expected[2])  # what was written


@pytest.mark.parametrize("head_dim", [1, 4, 12, 40, 72, 100])
def test_kernel_takes_any_head_dim(head_dim):
    case = make_case([130, 2], [4, 1], heads=4, kv_heads=2, head_dim=head_dim, block_size=8)
    torch.testing.assert_close(run(CpuAttention(), case)[0], run(TorchAttention(), case)[0], atol=3e-6, rtol=1e-5)


def test_kernel_gives_a_token_the_same_bits_with_and_without_tokens_behind_it():
    """A draft that turns out wrong must not have changed what comes before it, nor one that was right."""
    batch, q, k, v, keys, values = make_case([400], [5], heads=4, kv_heads=2, head_dim=32, block_size=8)
    together, keys_after, values_after = run(CpuAttention(), (batch, q, k, v, keys, values), 150)
    for index in range(5):
        alone = ForwardBatch(
            input_ids=batch.input_ids[index : index + 1],
            positions=batch.positions[index : index + 1],
            slot_mapping=batch.slot_mapping[index : index + 1],
            block_tables=batch.block_tables,
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([396 + index], dtype=torch.int32),
            max_seqlen_q=1,
            max_seqlen_k=396 + index,
            logits_indices=torch.tensor([0]),
        )
        one = slice(index, index + 1)
        out, _, _ = run(CpuAttention(), (alone, q[one], k[one], v[one], keys_after, values_after), 150)
        assert torch.equal(out[0], together[index])


def test_kernel_refuses_what_it_would_misread():
    batch, q, k, v, keys, values = make_case([9], [2], heads=2, kv_heads=2, head_dim=8, block_size=4)
    with pytest.raises(AssertionError):
        run(CpuAttention(), (batch, q.transpose(0, 1).contiguous().transpose(0, 1), k, v, keys, values))
    with pytest.raises(AssertionError):
        run(CpuAttention(), (batch, q.double(), k, v, keys, values))


def test_kernel_gives_a_row_the_same_bits_alone_and_in_company():
    case = make_case([600, 5, 257, 90], [2, 1, 4, 1], heads=4, kv_heads=2, head_dim=32, block_size=8)
    batch, q, k, v, keys, values = case
    together, _, _ = run(CpuAttention(), case)
    for b in range(4):
        start, end = batch.cu_seqlens_q[b : b + 2].tolist()
        alone = ForwardBatch(
            input_ids=batch.input_ids[start:end],
            positions=batch.positions[start:end],
            slot_mapping=batch.slot_mapping[start:end],
            block_tables=batch.block_tables[b : b + 1],
            cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=batch.seq_lens[b : b + 1],
            max_seqlen_q=end - start,
            max_seqlen_k=int(batch.seq_lens[b]),
            logits_indices=torch.tensor([end - start - 1]),
        )
        out, _, _ = run(CpuAttention(), (alone, q[start:end], k[start:end], v[start:end], keys, values))
        assert torch.equal(out, together[start:end])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_kernel_gives_the_same_bits_with_any_number_of_threads(num_threads):
    case = make_case(LENS[:4], QUERY_LENS[:4], heads=6, kv_heads=3, head_dim=64, block_size=16)
    expected, _, _ = run(CpuAttention(), case)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        assert torch.equal(run(CpuAttention(), case)[0], expected)
    finally:
        torch.set_num_threads(before)


def test_a_nan_in_one_sequence_stays_there():
    case = make_case([20, 20], [1, 1], heads=2, kv_heads=1, head_dim=16, block_size=4)
    case[2][0] = torch.nan  # the new key of sequence 0
    out, _, _ = run(CpuAttention(), case)
    assert out[0].isnan().all() and out[1].isfinite().all()


def test_registry_chooses_and_refuses():
    def choose(name, dtype=torch.float32, block_size=None):
        return attention_backend(name, device=CPU, dtype=dtype, block_size=block_size)

    assert (choose("auto")[0].name, choose("auto")[1]) == ("cpu", 16)
    assert choose("auto", torch.bfloat16)[0].name == "torch"
    assert choose("torch", block_size=7)[1] == 7
    with pytest.raises(ValueError, match=r"--attention-backend cpu needs .*not cpu and bfloat16"):
        choose("cpu", torch.bfloat16)
    with pytest.raises(ValueError, match="--attention-backend flash needs a GPU"):
        choose("flash")
    with pytest.raises(ValueError, match="--attention-backend is 'xformers'; choose one of auto, torch, cpu, flash"):
        choose("xformers")
