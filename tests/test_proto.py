"""The generated code is what proto/specserve.proto says."""

import itertools
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from specserve.proto import specserve_pb2 as pb
from specserve.proto import specserve_pb2_grpc

PROTO = Path(pb.__file__).parent
# Not importable by name without grpcio-tools, which only developers need.
GENERATORS = ("grpcio-tools", "mypy-protobuf")


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """Folder with freshly generated files."""
    for name in GENERATORS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
    out = tmp_path_factory.mktemp("proto")
    plugins = [
        f"--plugin=protoc-gen-{name}={Path(sys.executable).parent / f'protoc-gen-{name}'}"
        for name in ("mypy", "mypy_grpc")
    ]
    kinds = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-Ispecserve/proto={PROTO}"),
            *(*plugins, *kinds, f"--descriptor_set_out={out / 'descriptors'}", str(PROTO / "specserve.proto")),
        ],
        check=True,
        capture_output=True,
    )
    return out


def test_descriptors_are_current(generated):
    files = descriptor_pb2.FileDescriptorSet.FromString((generated / "descriptors").read_bytes())
    for message in files.file[0].message_type:
        for field in message.field:
            field.ClearField("json_name")  # written for plugins only
    committed = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(committed)
    assert files.file[0] == committed


@pytest.mark.parametrize(
    "name", ["specserve_pb2.py", "specserve_pb2.pyi", "specserve_pb2_grpc.py", "specserve_pb2_grpc.pyi"]
)
def test_generated_files_are_current(generated, name):
    if metadata.version("grpcio-tools") != specserve_pb2_grpc.GRPC_GENERATED_VERSION:
        pytest.skip("another version of the generator writes other text; test_descriptors_are_current holds for any")
    assert (PROTO / name).read_text() == (generated / "specserve" / "proto" / name).read_text()


def test_imports_go_through_the_package():
    source = (PROTO / "specserve_pb2_grpc.py").read_text()
    assert "from specserve.proto import specserve_pb2" in source
    assert not re.search(r"^import specserve_pb2", source, re.MULTILINE)


def test_every_field_has_a_comment_or_a_name_that_says_it():
    """Every range is documented: numbers without a comment are those whose message explains them."""
    text = (PROTO / "specserve.proto").read_text()
    for message in ("SamplingParameters", "StoppingParameters", "ResponseOptions", "SpeculationParameters"):
        body = text.split(f"message {message} {{")[1].split("\n}")[0]
        lines = [line.strip() for line in body.splitlines() if line.strip()]
        for before, line in itertools.pairwise(lines):
            if not line.startswith("//"):
                assert before.startswith("//"), f"{message}: {line} has no comment"
