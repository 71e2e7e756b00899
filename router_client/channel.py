"""Where a client connects to, and with which gRPC options."""

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_SCHEMES = ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "xds")
_LIST_SCHEMES = ("ipv4", "ipv6", "unix")


def resolve_target(targets: str | Sequence[str]) -> str:
    """One gRPC target for one or several servers.

    Each is "host:port", "unix:/path" or a gRPC name like "dns:///host:port". Several must be IP addresses of one
    family ("localhost" counts as 127.0.0.1) or unix sockets: gRPC has no lists of host names, but one host name
    may stand for many addresses.

    Raises:
        ValueError: no target, a malformed one, or several that can't be in one list.
    """
    names = [targets] if isinstance(targets, str) else list(targets)
    if not names:
        raise ValueError("targets is empty; give at least one, like 127.0.0.1:50051")
    if len(names) == 1:
        scheme, address = _split(names[0])
        return f"{scheme}:{address}"
    parts = [_split(_loopback(name)) for name in names]
    schemes = {scheme for scheme, _ in parts}
    if len(schemes) > 1 or not schemes <= set(_LIST_SCHEMES):
        raise ValueError(
            f"targets {', '.join(names)}: several targets must all be IPv4 addresses, all IPv6 addresses or all unix"
            " sockets; to balance over a host name, give it alone: dns:///host:port"
        )
    return f"{schemes.pop()}:{','.join(address for _, address in parts)}"


def _loopback(name: str) -> str:
    return "127.0.0.1:" + name.removeprefix("localhost:") if name.startswith("localhost:") else name


def _split(name: str) -> tuple[str, str]:
    """The gRPC scheme of a target, and what follows it."""
    scheme, colon, rest = name.partition(":")
    if colon and rest and scheme in _SCHEMES:
        return scheme, rest
    host, colon, port = name.rpartition(":")
    if "/" in name or not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"target {name!r}: must be host:port with a port in 1..65535, unix:/path or dns:///host:port")
    try:
        version = ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version
    except ValueError:
        if ":" in host:
            raise ValueError(f"target {name!r}: an IPv6 address stands in brackets, like [::1]:50051") from None
        return "dns", f"///{name}"
    if version == 6 and not host.startswith("["):
        raise ValueError(f"target {name!r}: an IPv6 address stands in brackets, like [::1]:50051")
    return f"ipv{version}", name


@dataclass(frozen=True)
class Endpoint:
    """How to open channels to one or several servers.

    Calls go round-robin over all addresses of `targets`. With `health_checked` a channel watches the health
    service of each address and sends nothing to one that isn't SERVING (a draining server keeps its streams and
    gets no new calls). `credentials` None: plain text. `options` are gRPC channel arguments, above the own ones.
    """

    targets: str | Sequence[str]
    credentials: grpc.ChannelCredentials | None = None
    options: Sequence[tuple[str, Any]] = ()
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    target: str = field(init=False)

    def __post_init__(self) -> None:
        if self.max_message_bytes < 1:
            raise ValueError(f"max_message_bytes is {self.max_message_bytes}; it must be at least 1")
        object.__setattr__(self, "target", resolve_target(self.targets))

    def channel_options(self, *, health_checked: bool) -> list[tuple[str, Any]]:
        """The arguments of a channel."""
        service_config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
        if health_checked:
            service_config["healthCheckConfig"] = {"serviceName": ""}
        own = {
            "grpc.service_config": json.dumps(service_config),
            "grpc.service_config_disable_resolution": 1,
            # Retries are made in retry.py alone, which knows whether a token has been delivered.
            "grpc.enable_retries": 0,
            # A server that comes back is found within seconds, not within gRPC's two minutes.
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.max_reconnect_backoff_ms": 2000,
            "grpc.max_receive_message_length": self.max_message_bytes,
            "grpc.max_send_message_length": self.max_message_bytes,
        }
        return list({**own, **dict(self.options)}.items())

    def open(self, *, health_checked: bool) -> grpc.Channel:
        """A channel for calls that block."""
        options = self.channel_options(health_checked=health_checked)
        if self.credentials is None:
            return grpc.insecure_channel(self.target, options)
        return grpc.secure_channel(self.target, self.credentials, options)

    def open_aio(self, *, health_checked: bool) -> grpc.aio.Channel:
        """A channel for the running event loop."""
        options = self.channel_options(health_checked=health_checked)
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.target, options)
        return grpc.aio.secure_channel(self.target, self.credentials, options)
