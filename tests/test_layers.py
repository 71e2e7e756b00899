"""Layers: shards against the whole, kernels against torch."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from specserve.models.cpu_kernels import binding
from specserve.models.hub import ModelError, ModelFiles
from specserve.models.layers.activation import GATED_ACTIVATIONS
from specserve.models.layers.embedding import VocabParallelEmbedding, VocabParallelHead, load_vocabulary_slice
from specserve.models.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear, share_heads
from specserve.models.layers.matrix import Matrix
from specserve.models.layers.norm import HeadNorm, RMSNorm
from specserve.models.parallel import TensorParallel
from specserve.models.weights import WeightReader, open_weights


@dataclass(frozen=True)
class OneRank(TensorParallel):
    """Keeps a rank's part of a collective to itself, so that a test can put the parts together."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture
def tensors(tmp_path):
    torch.manual_seed(0)
    shapes = {"q": (48, 20), "k": (16, 20), "v": (16, 20), "o": (20, 48), "embed": (37, 20)}
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": torch.randn(shapes[name][0]) for name in "qkvo"}
    tensors |= {"q_norm.weight": torch.randn(8), "k_norm.weight": torch.randn(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


@pytest.fixture
def reader(tensors, tmp_path):
    source = open_weights(ModelFiles("m", None, tmp_path, "hub"))
    return WeightReader(source, dtype=torch.float32, device=torch.device("cpu")).scope("model")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_attention_projections_in_shards(size, tensors, reader):
    """6 query heads and 2 kv heads of 8: ranks share kv heads where there are more ranks, not always evenly."""
    x = torch.randn(5, 20)
    whole = {name: F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in "qkv"}
    summed, num_heads = torch.zeros(5, 20), 0
    for rank in range(size):
        parallel = OneRank(rank, size)
        heads, kv_heads = share_heads(6, 2, parallel)
        kv = [Projection(name, 2, 8, kv_heads) for name in "kv"]
        column = ColumnParallelLinear(reader, [Projection("q", 6, 8, heads), *kv], 20, bias=True, parallel=parallel)
        assert column.num_units == [heads[1], kv_heads[1], kv_heads[1]]
        q, k, v = column(x).split([8 * count for count in column.num_units], dim=-1)
        first_kv = heads[0] // 3  # three query heads share a kv head
        assert kv_heads[0] == first_kv and heads[1] % kv_heads[1] == 0
        torch.testing.assert_close(q, whole["q"][:, heads[0] * 8 :][:, : heads[1] * 8])
        torch.testing.assert_close(k, whole["k"][:, first_kv * 8 :][:, : kv_heads[1] * 8])
        torch.testing.assert_close(v, whole["v"][:, first_kv * 8 :][:, : kv_heads[1] * 8])
        row = RowParallelLinear(reader, Projection("o", 6, 8, heads), 20, bias=True, parallel=parallel)
        summed += row(q)
        num_heads += heads[1]
    assert num_heads == 6
    torch.testing.assert_close(summed, F.linear(whole["q"], tensors["o.weight"], tensors["o.bias"]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (8, 2), (9, 3), (9, 9), (12, 4), (64, 8)])
def test_heads_are_shared_out_whole_and_as_evenly_as_kv_heads_allow(heads, kv_heads):
    group = heads // kv_heads
    for size in range(1, heads + 1):
        try:
            shares = [share_heads(heads, kv_heads, TensorParallel(rank, size)) for rank in range(size)]
        except ModelError:
            assert size > kv_heads and -(-size // kv_heads) > group
            continue
        owned = [head for (first, count), _ in shares for head in range(first, first + count)]
        assert owned == list(range(heads))
        for (first, count), (first_kv, num_kv) in shares:
            assert count % num_kv == 0 and count > 0
            for place, head in enumerate(range(first, first + count)):
                assert head // group == first_kv + place // (count // num_kv)
        counts = [num_kv for _, (_, num_kv) in shares]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 7), (4, 4, 5), (4, 1, 8), (8, 2, 9)])
def test_more_ranks_than_heads_are_refused(heads, kv_heads, size):
    with pytest.raises(ModelError, match=rf"--num-shard is {size}, but the {heads} attention heads .*{kv_heads} KV"):
        share_heads(heads, kv_heads, TensorParallel(0, size))


def test_features_that_do_not_divide(tensors, reader):
    sizes = [
        ColumnParallelLinear(reader, [Projection("q", 48)], 20, bias=False, parallel=OneRank(rank, 5))
        for rank in range(5)
    ]
    assert [column.num_units for column in sizes] == [[10], [10], [10], [9], [9]]
    with pytest.raises(ModelError, match="--num-shard is 50, but q has 48 units"):
        ColumnParallelLinear(reader, [Projection("q", 48)], 20, bias=False, parallel=OneRank(49, 50))


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_the_vocabulary_in_padded_slices(size, tensors, reader):
    """37 tokens don't divide; rows past the end are zero and their logits are cut."""
    ids, hidden = torch.tensor([0, 36, 7, 20, 36, 19]), torch.randn(4, 20)
    embedded, logits = torch.zeros(6, 20), []
    for rank in range(size):
        parallel = OneRank(rank, size)
        rows = load_vocabulary_slice(reader, "embed.weight", 37, 20, parallel)
        assert rows.shape == (-(-37 // size), 20)
        matrix = Matrix(rows)
        embedded += VocabParallelEmbedding(matrix, parallel)(ids)
        logits.append(VocabParallelHead(matrix, 10**6, parallel)(hidden))
    assert torch.equal(embedded, tensors["embed.weight"][ids])
    gathered = torch.cat(logits, dim=-1)
    torch.testing.assert_close(gathered[:, :37], hidden @ tensors["embed.weight"].T)
    assert not gathered[:, 37:].any()
    assert VocabParallelHead(matrix, 3, OneRank())(hidden).shape == (4, 3)


@pytest.fixture(params=["kernels", "torch"])
def implementation(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(binding, "are_built", lambda: False)
        monkeypatch.setattr(binding, "kernels", lambda: pytest.fail("a kernel was called"))
    else:
        assert binding.are_built()


@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm(unit_offset, tensors, reader, implementation):
    norm = RMSNorm(reader.scope("q_norm"), 8, 1e-3, unit_offset=unit_offset)
    x, residual = torch.randn(2, 5, 8)
    weight = tensors["q_norm.weight"] + unit_offset

    def expected(value):
        return value / (value.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight

    torch.testing.assert_close(norm(x), expected(x))
    strided = torch.randn(5, 16)[:, ::2]
    torch.testing.assert_close(norm(strided), expected(strided))
    total = x + residual
    normalized, summed = norm.add(x.clone(), residual.clone())
    torch.testing.assert_close(summed, total)
    torch.testing.assert_close(normalized, expected(total))


@pytest.mark.parametrize("unit_offset", [False, True])
def test_head_norm(unit_offset, tensors, reader):
    norm = HeadNorm(reader, {"q_norm": 3, "k_norm": 2}, 8, 1e-3, unit_offset=unit_offset)
    heads = torch.randn(4, 7, 8)[:, :5]  # as a part of qkv: not contiguous
    normalized = heads / (heads.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    weights = (tensors[f"{name}.weight"] + unit_offset for name in ("q_norm", "k_norm"))
    q, k = (part * weight for part, weight in zip(normalized.split([3, 2], dim=1), weights, strict=True))
    torch.testing.assert_close(norm(heads), torch.cat((q, k), dim=1))


@pytest.mark.parametrize("name", GATED_ACTIVATIONS)
def test_gated_activations(name, implementation):
    gate, up = torch.randn(2, 6, 33) * 4
    reference = {"silu": F.silu(gate), "gelu_tanh": F.gelu(gate, approximate="tanh")}[name] * up
    torch.testing.assert_close(GATED_ACTIVATIONS[name](torch.cat((gate, up), dim=-1)), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multiplies", [True, False])
def test_a_quantized_matrix_is_near_the_weight_and_its_rows_are_what_it_multiplies_with(dtype, multiplies):
    """Rows of very different sizes, one of zeros: each has a factor of its own."""
    torch.manual_seed(1)
    weight = (torch.randn(37, 24) * torch.logspace(-4, 3, 37)[:, None]).to(dtype)
    weight[5] = 0
    matrix, x, bias = (
        Matrix(weight.clone(), multiplies=multiplies),
        torch.randn(3, 24).to(dtype),
        torch.randn(37).to(dtype),
    )
    matrix.quantize()
    rows = matrix.rows(torch.arange(37))
    assert rows.dtype is dtype and matrix.weight.dtype is torch.int8 and matrix.weight.abs().max() == 127
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    assert ((rows.float() - weight.float()).abs() <= largest * (0.5 / 127 + (dtype is torch.bfloat16) * 0.01)).all()
    kept = matrix.weight.clone()
    matrix.quantize()  # once is enough
    assert torch.equal(matrix.weight, kept)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    expected = x.float() @ rows.float().T
    atol = tolerance * float(expected.abs().max())
    torch.testing.assert_close(matrix(x).float(), expected, atol=atol, rtol=tolerance)
    torch.testing.assert_close(matrix(x, bias).float(), expected + bias.float(), atol=atol, rtol=tolerance)
