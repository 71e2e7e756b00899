"""What is found before the port opens: everything but the values of weights, by the code that loads them."""

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.models.hub import ModelError
from specserve.models.weights import SafetensorsFiles
from specserve.server import loading
from specserve.server.config import ConfigError, ModelOptions, SchedulerOptions, ServerConfig, SpeculatorOptions
from specserve.speculators.base import SpeculatorType


def configure(model_id, kind="none", speculator_id=None, **speculator) -> ServerConfig:
    options = SpeculatorOptions(type=SpeculatorType(kind), id=None if speculator_id is None else str(speculator_id))
    return ServerConfig(ModelOptions(str(model_id)), speculator=dataclasses.replace(options, **speculator))


@pytest.fixture
def no_weights(monkeypatch):
    """Reading a floating-point tensor is an error."""
    copy = SafetensorsFiles.copy

    def refuse(self, name, out, offset):
        assert not out.is_floating_point(), f"{name} was read"
        copy(self, name, out, offset)

    monkeypatch.setattr(SafetensorsFiles, "copy", refuse)


@pytest.mark.parametrize("kind", ["none", "mlp", "medusa", "usd"])
def test_what_fits_passes_without_its_weights_being_read(kind, tiny_model, tiny_bigram, tiny_repeating, no_weights):
    ids = {"mlp": tiny_bigram, "medusa": tiny_repeating, "usd": tiny_model}
    loading.check(configure(tiny_model, kind, ids.get(kind)))


def test_models_that_store_a_tied_head_too_pass(make_tiny_model, tmp_path, no_weights):
    make_tiny_model(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    loading.check(configure(tmp_path))


def test_what_is_not_here_is_left_to_the_download(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    loading.check(configure("nobody/nothing-of-that-name"))
    loading.check(configure(tiny_model, "mlp", "nobody/nothing-of-that-name"))


def test_misfits(tiny_model, make_tiny_model, tiny_bigram, tiny_repeating, tmp_path, no_weights):
    def expect(config: ServerConfig, message: str, error: type[Exception] = ModelError) -> None:
        with pytest.raises(error, match=message):
            loading.check(config)

    wide = make_tiny_model(tmp_path / "wide", hidden_size=64)
    expect(configure(wide, "mlp", tiny_bigram), "emb_dim is 32, but the hidden size of the model .* is 64")
    expect(configure(wide, "medusa", tiny_repeating), "the size of its heads is 32, but the hidden size .* is 64")
    expect(configure("demo", "medusa", tiny_repeating), "the size of its heads is 32, but the hidden size .* is 576")
    expect(configure(tiny_model, "mlp", tiny_bigram, num_speculative_tokens=9), "--num-speculative-tokens is 9")
    expect(configure(tiny_model, "medusa", tiny_repeating, num_speculative_tokens=3), "--num-speculative-tokens is 3")
    expect(configure(tiny_model, "usd", wide), "the draft model has .* parameters, more than")
    expect(configure(tiny_model, "mlp", tmp_path / "nowhere"), "--speculator-id .*: there is no such file")
    too_long = dataclasses.replace(configure(tiny_model), scheduler=SchedulerOptions(max_total_tokens=4096))
    expect(too_long, "--max-total-tokens is 4096; the model was made for 2048", ConfigError)

    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_model, damaged)
    tensors = load_file(damaged / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors | {"lm_head.weight": torch.zeros(7, 32)}, damaged / "model.safetensors")
    expect(configure(damaged), "missing model.norm.weight; of a wrong shape lm_head.weight is 7×32 instead of 49152×32")
    (damaged / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:-1])
    expect(configure(damaged), "model.safetensors: is truncated or not a safetensors file")
