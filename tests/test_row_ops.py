"""Operations on rows of logits: the C and the torch form against each other and against plain torch."""

import pytest
import torch

from specserve.models.cpu_kernels import binding
from specserve.models.sampling import row_ops

SIZES = [1, 2, 31, 32, 33, 257, 1024, 5000]


@pytest.fixture(params=["C", "torch"])
def form(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(row_ops, "uses_kernels", lambda *tensors: False)
    else:
        assert row_ops.uses_kernels(torch.zeros(1, 1))


def rows_of(size):
    """Rows with ties, extremes, masked tokens, zeros of both signs."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(10, size, generator=generator) * 5
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[3, torch.randperm(size, generator=generator)[: size // 2]] = -torch.inf
    logits[4] = logits[4].sign() * 0.0
    logits[5] *= 1e37
    logits[6] = -3e38
    logits[7] = logits[7].abs().neg() - 1e6
    logits[8] = torch.arange(size)
    logits[9] = torch.arange(size, 0, -1).float()
    return logits


@pytest.mark.parametrize("size", SIZES)
def test_argmax_is_the_first_of_the_largest(form, size):
    logits = rows_of(size)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert row_ops.argmax(logits).tolist() == expected


@pytest.mark.parametrize("place", [0, 300, 4999])
def test_argmax_tells_rows_without_one(form, place):
    logits = rows_of(5000)
    logits[1, place], logits[2, place], logits[3, place] = torch.nan, torch.inf, -torch.nan
    logits[5] = -torch.inf
    expected = [row.index(max(row)) for row in logits.tolist()]
    for row in (1, 2, 3, 5):
        expected[row] = -1
    assert row_ops.argmax(logits).tolist() == expected


@pytest.mark.parametrize("size", SIZES)
def test_sorted_head_is_the_start_of_a_stable_sort(form, size):
    logits = rows_of(size)
    values, token_ids = logits.sort(dim=1, descending=True, stable=True)
    for num_tokens in sorted({1, 2, size // 9 + 1, size // 5 + 1, size // 3 + 1, size}):
        if num_tokens <= size:
            head_values, head_ids = row_ops.sorted_head(logits, num_tokens)
            assert torch.equal(head_values, values[:, :num_tokens])
            assert torch.equal(head_ids, token_ids[:, :num_tokens])


def test_sorted_head_of_nans_reads_and_writes_in_bounds(form):
    logits = torch.full((3, 700), torch.nan)
    logits[1, 350] = 1.0
    logits[2, ::2] = -1.0
    values, token_ids = row_ops.sorted_head(logits, 64)
    assert values.shape == token_ids.shape == (3, 64)
    assert int(token_ids.min()) >= 0 and int(token_ids.max()) < 700


@pytest.mark.parametrize("size", SIZES)
def test_row_mass(form, size):
    logits = rows_of(size)
    shifted = (logits - logits.amax(dim=1, keepdim=True)).double()
    weights = shifted.exp()
    mass = row_ops.row_mass(logits)
    torch.testing.assert_close(mass[:, 0].float(), logits.amax(dim=1))
    torch.testing.assert_close(mass[:, 1], weights.sum(dim=1), rtol=1e-6, atol=0)
    weighted = torch.where(weights > 0, shifted * weights, 0.0).sum(dim=1)
    torch.testing.assert_close(mass[:, 2], weighted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(row_ops.log_z(logits), logits.double().logsumexp(dim=1), rtol=1e-6, atol=1e-6)


def test_rows_are_the_same_bits_alone_and_in_company_and_with_any_threads():
    logits = rows_of(5000)
    before = torch.get_num_threads()
    mass = binding.row_mass(logits)
    try:
        torch.set_num_threads(3)
        for row in range(10):
            assert torch.equal(binding.row_mass(logits[row : row + 1])[0], mass[row])
        assert torch.equal(binding.row_mass(logits), mass)
        assert torch.equal(binding.argmax(logits), row_ops.argmax(logits))
    finally:
        torch.set_num_threads(before)
