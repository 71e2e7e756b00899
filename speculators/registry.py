"""Loads the speculator that a type names."""

from collections.abc import Callable, Sequence
from pathlib import Path

from specserve.models.hub import WEIGHTS_FILE, ModelFiles
from specserve.models.parallel import TensorParallel
from specserve.speculators import medusa, mlp, usd_loader
from specserve.speculators.base import NoSpeculator, Speculator, SpeculatorType
from specserve.speculators.checkpoint import Base


def weight_files(kind: SpeculatorType) -> Sequence[str]:
    """Names of the files that hold the weights of a kind of speculator, in the order in which they are looked for."""
    names = {SpeculatorType.MLP: mlp.WEIGHT_FILES, SpeculatorType.MEDUSA: medusa.WEIGHT_FILES}
    return names.get(kind, (WEIGHTS_FILE,))


def demo_files(kind: SpeculatorType) -> ModelFiles:
    """The speculator of the demo model that comes with this package."""
    return ModelFiles("demo", None, Path(__file__).parent / "demo" / kind.value, "hub")


def load_speculator(
    kind: SpeculatorType,
    files: ModelFiles | None,
    base: Base,
    *,
    parallel: TensorParallel,
    num_tokens: int | None,
    usd: usd_loader.UsdOptions | None = None,
) -> Speculator:
    """The speculator in `files` (none has no files) for a loaded target; num_tokens None: as many as it can draft.

    Raises ModelError for files that are damaged or don't fit the target.
    """
    if kind is SpeculatorType.NONE:
        return NoSpeculator()
    assert files is not None, "the configuration asks for an id"
    if kind is SpeculatorType.USD:
        options = usd or usd_loader.UsdOptions()
        return usd_loader.load_usd(files, base, options, parallel=parallel, num_tokens=num_tokens)
    loaders: dict[SpeculatorType, Callable[..., Speculator]] = {
        SpeculatorType.MLP: mlp.load_mlp,
        SpeculatorType.MEDUSA: medusa.load_medusa,
    }
    return loaders[kind](files, base, parallel=parallel, num_tokens=num_tokens)
