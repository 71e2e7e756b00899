"""The one error that calls raise."""

import grpc


class SpecserveError(Exception):
    """A call that failed: its status code, and the server's (or gRPC's) message.

    The `grpc.RpcError` behind it, if there is one, is `__cause__`.
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


def error_from(error: grpc.RpcError) -> SpecserveError:
    """The same failure as a SpecserveError; raise it `from` the given one."""
    return SpecserveError(error.code(), error.details() or "no details were given")


def not_ready(target: str, timeout_s: float, status: str) -> SpecserveError:
    """The failure of waiting for a server, with what was last heard of it."""
    message = f"no server at {target} became ready within {timeout_s:g} s; the last answer: {status}"
    return SpecserveError(grpc.StatusCode.DEADLINE_EXCEEDED, message)
