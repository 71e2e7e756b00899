"""Requests, targets and retries of the client, without a server."""

import json
from dataclasses import fields

import grpc
import pytest

from specserve.proto import specserve_pb2 as pb
from specserve.router_client import messages, retry
from specserve.router_client.channel import Endpoint, resolve_target
from specserve.router_client.errors import SpecserveError
from specserve.router_client.retry import Attempts, RetryPolicy
from specserve.router_client.types import (
    FinishReason,
    GenerateOptions,
    Generation,
    ServerInfo,
    SpeculatorInfo,
    StreamEvent,
    Summary,
    Token,
    Tokenization,
    TopToken,
)

EVERY_OPTION: GenerateOptions = {
    "temperature": 0.5,
    "top_k": 2**32 - 1,
    "top_p": 0.25,
    "min_p": 0.125,
    "typical_p": 0.75,
    "repetition_penalty": 1.5,
    "frequency_penalty": -2,
    "presence_penalty": 0.0,
    "seed": 0,
    "max_new_tokens": 9,
    "min_new_tokens": 0,
    "stop": ["\n\n", "é"],
    "stop_token_ids": (0, 7),
    "ignore_eos": True,
    "include_stop": False,
    "logprobs": True,
    "top_n_tokens": 4,
    "prompt_details": True,
    "skip_special_tokens": False,
    "max_draft_tokens": 0,
    "usd_method": "slem",
    "truncate": 100,
}


def test_every_option_has_its_field():
    request = messages.generate_request("é", EVERY_OPTION)
    options = {**EVERY_OPTION}
    assert options.pop("truncate") == request.truncate
    assert request.text == "é"
    for part in (request.sampling, request.stopping, request.response, request.speculation):
        for field in part.DESCRIPTOR.fields:
            value = getattr(part, field.name)
            assert (list(value) if field.is_repeated else value) == (
                list(options[field.name]) if field.is_repeated else options[field.name]
            ), field.name
            assert field.is_repeated or not field.has_presence or part.HasField(field.name)
            del options[field.name]
    assert not options
    assert set(EVERY_OPTION) == set(GenerateOptions.__annotations__)


def test_what_is_not_given_is_not_set():
    unset = dict.fromkeys(EVERY_OPTION)
    assert messages.generate_request("", unset) == messages.generate_request("", {}) == pb.GenerateRequest(text="")
    assert messages.generate_request("x", {"stop": "ab"}).stopping.stop == ["ab"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("seed", -1, r"0\.\.2\*\*64 - 1"),
        ("seed", 2**64, r"0\.\.2\*\*64 - 1"),
        ("seed", 1.0, "int, not float"),
        ("seed", True, "int, not bool"),
        ("max_new_tokens", 2**32, r"0\.\.2\*\*32 - 1"),
        ("max_new_tokens", "5", "int, not str"),
        ("truncate", -1, r"0\.\.2\*\*32 - 1"),
        ("temperature", "hot", "number, not str"),
        ("top_p", True, "number, not bool"),
        ("ignore_eos", 1, "True or False, not int"),
        ("stop", 5, "sequence"),
        ("stop", b"ab", "sequence"),
        ("stop", ["a", None], r"stop\[1\] is None; it must be a str"),
        ("stop", "\udc80", r"lone surrogate \(U\+DC80\) at index 0"),
        ("stop_token_ids", "12", "sequence"),
        ("stop_token_ids", [1, -2], r"stop_token_ids\[1\] is -2"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused(name, value, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        messages.generate_request("x", {name: value})
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("ab\ud83dc", r"prompt has a lone surrogate \(U\+D83D\) at index 2"),
        (b"bytes", "of type bytes"),
        (None, "of type NoneType"),
        (7, "of type int"),
        ([], "empty"),
        ([1, "a"], r"prompt\[1\] is 'a'; it must be an int"),
        ([1, 2**32], r"prompt\[1\] is 4294967296"),
        (["text"], r"prompt\[0\] is 'text'"),
        ([{"role": "user"}], r"prompt\[0\]"),
        ([{"role": "user", "content": "x", "name": "y"}], r"prompt\[0\]"),
        ([{"role": "user", "content": "x"}, 5], r"prompt\[1\]"),
        ([{"role": "user", "content": "\ud800"}], r"prompt\[0\]\['content'\] has a lone surrogate"),
        ([{"role": None, "content": "x"}], r"prompt\[0\]\['role'\] is None"),
    ],
)
def test_bad_prompts(prompt, reason):
    with pytest.raises(ValueError, match=reason):
        messages.generate_request(prompt, {})
    with pytest.raises(ValueError, match="token ids" if isinstance(prompt, list) and prompt[:1] == [1] else reason[:5]):
        messages.tokenize_request(prompt, None)


@pytest.mark.parametrize(
    ("message", "cls"),
    [
        (pb.InfoResponse, ServerInfo),
        (pb.SpeculatorInfo, SpeculatorInfo),
        (pb.GenerationSummary, Summary),
        (pb.GenerateStreamResponse, StreamEvent),
        (pb.GenerateResponse, Generation),
        (pb.TokenDetails, Token),
        (pb.TopToken, TopToken),
        (pb.TokenizeResponse, Tokenization),
    ],
)
def test_types_have_all_fields_of_their_messages(message, cls):
    assert {item.name for item in fields(cls)} == {field.name for field in message.DESCRIPTOR.fields}


def test_info_is_whole():
    message = pb.InfoResponse()
    for number, field in enumerate(pb.InfoResponse.DESCRIPTOR.fields, 1):
        if field.name == "eos_token_ids":
            message.eos_token_ids.extend([7, 2])
        elif field.name == "speculator":
            message.speculator.CopyFrom(
                pb.SpeculatorInfo(
                    type="usd", id="é", accepted_tokens=2**40, accepted_per_position=[3, 2], usd_method="tli"
                )
            )
        else:
            setattr(message, field.name, str(number) if field.type == field.TYPE_STRING else number)
    info = messages.info_from(message)
    assert info.speculator == SpeculatorInfo("usd", "é", 0, 0, 0, 2**40, 0, (3, 2), None, "tli")
    assert info.eos_token_ids == (7, 2)
    for field in pb.InfoResponse.DESCRIPTOR.fields:
        if field.name not in ("eos_token_ids", "speculator"):
            assert getattr(info, field.name) == getattr(message, field.name)


def test_every_finish_reason_is_known():
    names = [name.removeprefix("FINISH_REASON_") for name in pb.FinishReason.keys()]  # noqa: SIM118
    assert {reason.name for reason in FinishReason} == set(names)
    for name, value in pb.FinishReason.items():
        reason = messages.summary_from(pb.GenerationSummary(finish_reason=value)).finish_reason
        assert reason.name == name.removeprefix("FINISH_REASON_")
    assert messages.summary_from(pb.GenerationSummary(finish_reason=99)).finish_reason is FinishReason.UNSPECIFIED


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("127.0.0.1:5", "ipv4:127.0.0.1:5"),
        ("[::1]:5", "ipv6:[::1]:5"),
        ("host.example:65535", "dns:///host.example:65535"),
        ("dns:///a.b:1", "dns:///a.b:1"),
        ("unix:/tmp/a.sock", "unix:/tmp/a.sock"),
        (["localhost:5"], "dns:///localhost:5"),
        (["localhost:5", "10.0.0.2:6"], "ipv4:127.0.0.1:5,10.0.0.2:6"),
        (["[::1]:5", "ipv6:[::2]:6"], "ipv6:[::1]:5,[::2]:6"),
        (["unix:/a", "unix:/b"], "unix:/a,/b"),
    ],
)
def test_targets(targets, expected):
    assert resolve_target(targets) == expected


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        ([], "empty"),
        ("host", "must be host:port"),
        ("host:", "must be host:port"),
        (":80", "must be host:port"),
        ("host:0", "1..65535"),
        ("host:65536", "1..65535"),
        ("host:²", "1..65535"),
        ("http://host:80", "must be host:port"),
        ("::1:80", "in brackets"),
        ("fe80::x:80", "in brackets"),
        (["a.example:1", "b.example:1"], "must all be IPv4"),
        (["127.0.0.1:1", "unix:/a"], "must all be IPv4"),
    ],
)
def test_bad_targets(targets, reason):
    with pytest.raises(ValueError, match=reason):
        resolve_target(targets)


def test_channel_options():
    options = dict(Endpoint("localhost:1", max_message_bytes=77).channel_options(health_checked=True))
    assert options["grpc.enable_retries"] == 0
    assert options["grpc.max_reconnect_backoff_ms"] <= 2000
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 77
    config = {"loadBalancingConfig": [{"round_robin": {}}]}
    assert json.loads(options["grpc.service_config"]) == config | {"healthCheckConfig": {"serviceName": ""}}
    options = dict(Endpoint("a:1", options=[("grpc.enable_retries", 1)]).channel_options(health_checked=False))
    assert options["grpc.enable_retries"] == 1 and json.loads(options["grpc.service_config"]) == config
    with pytest.raises(ValueError, match="max_message_bytes is 0"):
        Endpoint("a:1", max_message_bytes=0)


def test_backoff_doubles_up_to_its_bound_with_jitter(monkeypatch):
    policy = RetryPolicy(max_attempts=2000, initial_backoff_s=0.1, max_backoff_s=1.0)
    bounds = []
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: bounds.append((low, high)) or high)
    assert [policy.backoff_s(n) for n in (1, 2, 3, 4, 5, 1999)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert set(bounds) == {(0.5, 1.0)}


def test_attempts(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(retry.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: high)
    policy = RetryPolicy(max_attempts=3, initial_backoff_s=1.0, max_backoff_s=2.0)
    attempts = Attempts(policy, 2.5)
    assert attempts.delay_before_retry(grpc.StatusCode.UNAVAILABLE) == 1.0
    now[0] = 101.0
    assert attempts.remaining_s == 1.5
    assert attempts.delay_before_retry(grpc.StatusCode.UNAVAILABLE) is None  # 2 s don't fit into 1.5 s
    now[0] = 103.0
    assert attempts.remaining_s == 0.0
    endless = Attempts(policy, None)
    unavailable = [endless.delay_before_retry(grpc.StatusCode.UNAVAILABLE) for _ in range(3)]
    assert unavailable == [1.0, 2.0, None] and endless.remaining_s is None
    assert Attempts(policy, float("inf")).remaining_s is None
    assert Attempts(policy, 9).delay_before_retry(grpc.StatusCode.DEADLINE_EXCEEDED) is None


@pytest.mark.parametrize("arguments", [(0,), (5, 0.0), (5, 3.0, 2.0), (5, 1.0, float("inf")), (5, 1.0, 2.0, 0.5)])
def test_bad_retry_policies(arguments):
    with pytest.raises(ValueError, match="must be"):
        RetryPolicy(*arguments)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_bad_timeouts(timeout_s):
    with pytest.raises(ValueError, match="timeout_s"):
        Attempts(RetryPolicy(), timeout_s)


def test_errors_read_well():
    assert str(SpecserveError(grpc.StatusCode.NOT_FOUND, "no é")) == "NOT_FOUND: no é"
