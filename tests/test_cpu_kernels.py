"""The elementwise kernels against torch, and the choice of the library."""

import pytest
import torch
import torch.nn.functional as F

from specserve.models.cpu_kernels import binding

ROWS = [1, 2, 16, 300]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("width", [1, 7, 64, 576, 1001])
def test_rms_norm(num_rows, width):
    x, weight = torch.randn(num_rows, width) * 3, torch.randn(width)
    original = x.clone()
    torch.testing.assert_close(binding.rms_norm(x, weight, 1e-5), F.rms_norm(x, (width,), weight, 1e-5))
    assert torch.equal(x, original)


@pytest.mark.parametrize("num_rows", ROWS)
def test_rms_norm_with_a_residual_adds_in_place(num_rows):
    x, residual, weight = torch.randn(num_rows, 96), torch.randn(num_rows, 96), torch.randn(96)
    total, given = x + residual, residual.clone()
    torch.testing.assert_close(binding.rms_norm(x, weight, 1e-6, residual), F.rms_norm(total, (96,), weight, 1e-6))
    assert torch.equal(x, total) and torch.equal(residual, given)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("width", [1, 13, 1536])
def test_gated_activations(num_rows, width):
    gate_up = torch.randn(num_rows, 2 * width) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(binding.silu_mul(gate_up), F.silu(gate) * up)
    exact = F.gelu(gate.double(), approximate="tanh") * up.double()  # in float32 torch's own is less exact
    torch.testing.assert_close(binding.gelu_tanh_mul(gate_up).double(), exact, atol=1e-7, rtol=3e-6)


def test_activations_at_the_extremes():
    gate = torch.tensor([-1e30, -200.0, -90.0, -88.0, 0.0, 88.0, 200.0, 1e30, torch.nan])
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None]
    expected = F.silu(gate)[None]
    torch.testing.assert_close(binding.silu_mul(gate_up), expected, atol=1e-30, rtol=1e-6, equal_nan=True)
    gelu = F.gelu(gate, approximate="tanh")[None]
    finite = gate.abs() < 1e10  # beyond, g**3 overflows
    actual = binding.gelu_tanh_mul(gate_up)
    torch.testing.assert_close(actual[:, finite], gelu[:, finite], atol=1e-6, rtol=1e-6)
    assert actual[0, -1].isnan()


def test_rows_are_the_same_bits_alone_and_in_company():
    x, weight = torch.randn(50, 1024), torch.randn(1024)
    together = binding.rms_norm(x, weight, 1e-5)
    activated = binding.silu_mul(x)
    for row in (0, 17, 49):
        assert torch.equal(binding.rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])
        assert torch.equal(binding.silu_mul(x[row : row + 1])[0], activated[row])


def test_only_contiguous_float32_is_taken():
    x = torch.zeros(4, 8)
    assert binding.is_supported(x)
    assert not binding.is_supported(x.T) and not binding.is_supported(x.bfloat16()) and not binding.is_supported(x, x.T)


def test_a_missing_library_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(binding, "__file__", str(tmp_path / "binding.py"))
    with pytest.raises(
        binding.KernelsMissingError, match=r"pip install -e \.`, or start with --attention-backend torch"
    ):
        binding.kernels.__wrapped__()
