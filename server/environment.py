"""What must be the same on all ranks, as texts."""

import dataclasses
import hashlib
import platform
from pathlib import Path

import torch

from specserve.models.hub import ModelFiles
from specserve.server.config import ServerConfig
from specserve.server.version import package_version

SAMPLE_BYTES = 1 << 16  # of the beginning, the middle and the end of each file of weights


def environment(
    config: ServerConfig, files: ModelFiles, speculator_files: ModelFiles | None, dtype: torch.dtype, device: str
) -> dict[str, str]:
    """Versions, flags that shape a step, what auto stands for here, and what the files hold."""
    values = {
        "the version of specserve": package_version(),
        "the version of Python": platform.python_version(),
        "the version of torch": torch.__version__,
        "the processor's level": torch.backends.cpu.get_cpu_capability(),
        "--dtype": str(dtype).removeprefix("torch."),
        "--device": device,
        "the revision of the model": files.revision or "-",
        "the model's files": fingerprint(files.path),
        "the speculator's files": "-" if speculator_files is None else fingerprint(speculator_files.path),
    }
    for section in (config.cache, config.scheduler, config.speculator):
        for option in dataclasses.fields(section):
            name = f"{type(section).__name__}.{option.name}"
            if name != "SpeculatorOptions.id":  # a path may differ
                values[name] = str(getattr(section, option.name))
    values["--attention-backend"] = str(config.model.attention_backend)
    return values


def fingerprint(path: Path) -> str:
    """A hash over names, sizes and samples of a model's files."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) + sorted(path.glob("*.json"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{'' if path.is_file() else file.name} {size}\n".encode())
        with file.open("rb") as raw:
            for start in (0, max(0, (size - SAMPLE_BYTES) // 2), max(0, size - SAMPLE_BYTES)):
                raw.seek(start)
                digest.update(raw.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
