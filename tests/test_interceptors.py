"""The table of statuses, and the line a call leaves in the log."""

import asyncio
import json
import logging

import grpc
import pytest
from loguru import logger

from specserve.proto import specserve_pb2 as pb
from specserve.server.config import LogLevel, LogOptions
from specserve.server.engine import errors as engine_errors
from specserve.server.errors import InvalidRequestError, NotReadyError, UnsupportedError
from specserve.server.interceptors import MAX_DETAILS_CHARACTERS, status_of
from specserve.server.logs import configure_logging

S = grpc.StatusCode


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("x"), S.INVALID_ARGUMENT),
        (engine_errors.RequestTooLargeError("x"), S.INVALID_ARGUMENT),
        (UnsupportedError("x"), S.UNIMPLEMENTED),
        (engine_errors.QueueFullError("x"), S.RESOURCE_EXHAUSTED),
        (NotReadyError("x"), S.UNAVAILABLE),
        (engine_errors.DrainingError("x"), S.UNAVAILABLE),
        (engine_errors.EngineDeadError("x"), S.UNAVAILABLE),
        (engine_errors.NonFiniteLogitsError("x"), S.INTERNAL),
    ],
)
def test_known_errors(error, code):
    assert status_of(error) == (code, "x")


def test_every_engine_error_has_a_status():
    kinds = [kind for kind in vars(engine_errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if kind is not engine_errors.EngineError:
            assert status_of(kind("said"))[1] == "said", kind


@pytest.mark.parametrize("error", [ValueError("secret"), KeyError(3), engine_errors.EngineError("secret")])
def test_other_errors_are_faults_of_the_server(error):
    code, details = status_of(error)
    assert code == S.INTERNAL
    assert "secret" not in details and type(error).__name__ in details


def test_details_are_one_line_of_bounded_length():
    _, details = status_of(InvalidRequestError("field\n" + "é" * 5000 + "\tlimit"))
    assert details.startswith("field é") and details.endswith("é limit")
    assert len(details) <= MAX_DETAILS_CHARACTERS + 3


@pytest.fixture
def records():
    """What was logged, as loguru's records."""
    found = []
    handler = logger.add(lambda message: found.append(message.record), level="INFO")
    yield found
    logger.remove(handler)


@pytest.fixture
async def server(server_helpers):
    async with server_helpers.running() as running:
        yield running


def calls(records):
    return [record["extra"] for record in records if "status" in record["extra"]]


async def test_one_line_a_call(server, records):
    request = pb.GenerateRequest(text="hé", stopping=pb.StoppingParameters(max_new_tokens=5))
    await server.stub.Generate(request)
    async for _ in server.stub.GenerateStream(request):
        pass
    with pytest.raises(grpc.aio.AioRpcError):
        await server.stub.Generate(pb.GenerateRequest(text="x" * 100))
    unary, stream, failed = calls(records)
    for line, method in ((unary, "Generate"), (stream, "GenerateStream")):
        assert (line["method"], line["status"]) == (method, "OK")
        assert (line["prompt_tokens"], line["generated_tokens"]) == (4, 5)
        assert (line["queue_seconds"], line["prefill_seconds"], line["decode_seconds"]) == (0.25, 0.5, 1.5)
        assert 0 <= line["seconds"] < 20
    assert (failed["method"], failed["status"]) == ("Generate", "INVALID_ARGUMENT")
    assert failed["details"].startswith("text has 101 tokens")
    assert all("\n" not in record["message"] and record["level"].name == "INFO" for record in records)


@pytest.mark.parametrize(("timeout", "status"), [(None, "CANCELLED"), (0.2, "DEADLINE_EXCEEDED")])
async def test_ended_calls_say_how(server, records, timeout, status):
    server.engine.hold_at = 1
    call = server.stub.GenerateStream(pb.GenerateRequest(text="hé"), timeout=timeout)
    await call.read()
    if timeout is None:
        call.cancel()
    else:
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    while not calls(records):
        await asyncio.sleep(0.01)
    assert [(line["status"], line["generated_tokens"]) for line in calls(records)] == [(status, 2)]


async def test_faults_are_logged_with_their_stack(server, records):
    server.engine.error = ZeroDivisionError("the secret")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.stub.Generate(pb.GenerateRequest(text="hé"))
    assert caught.value.code() == S.INTERNAL and "secret" not in caught.value.details()
    fault, line = records
    assert fault["exception"].type is ZeroDivisionError and fault["level"].name == "ERROR"
    assert line["extra"]["status"] == "INTERNAL"


async def test_health_is_not_logged(server, records):
    await server.channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
    assert records == []


@pytest.fixture
def restore_logging():
    yield
    logger.remove()


def test_json_lines(capsys, restore_logging):
    configure_logging(LogOptions(LogLevel.INFO, json=True))
    logger.debug("not this")
    logger.bind(method="Generate", tokens=3).info("Grüße {}", "{braces}\n🤗")
    try:
        {}["prompt"]
    except KeyError:
        logger.exception("failed")
    first, second = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (first["level"], first["message"]) == ("info", "Grüße {braces}\n🤗")
    assert (first["method"], first["tokens"]) == ("Generate", 3)
    assert "Traceback" in second["exception"] and "KeyError" in second["exception"]


def test_text_lines(capsys, restore_logging):
    configure_logging(LogOptions(LogLevel.WARNING))
    logger.info("not this")
    logger.warning("Grüße {}", "{braces}")
    logging.getLogger("some.library").warning("old %s", "style")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("WARNING")[2].strip() for line in lines] == ["Grüße {braces}", "some.library: old style"]
