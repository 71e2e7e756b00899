"""The life of one rank of several: rank 0 serves, the others compute along and end with it."""

import signal
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from loguru import logger

from specserve.models.hub import ModelError
from specserve.server.config import ConfigError, ServerConfig
from specserve.server.grpc_server import run_server
from specserve.server.launch import build, build_runner
from specserve.server.loading import check
from specserve.server.process import leave
from specserve.server.serving import Serving
from specserve.server.worker.executor import follow
from specserve.server.worker.ranks import Ranks


def run_rank(config: ServerConfig, on_ready: Callable[[str, Serving], None]) -> NoReturn:
    """All of the life of this process; `on_ready` as in run_server."""
    assert config.parallel.place is not None
    ranks = Ranks.connect(config.parallel.place, config.parallel.rank_timeout_s)
    if ranks.rank > 0:
        _follow(config, ranks)
    build_sharded = partial(build, ranks=ranks)
    leave(run_server(config, check, build_sharded, on_ready, failure=ranks.failure, at_exit=ranks.end))


def _follow(config: ServerConfig, ranks: Ranks) -> NoReturn:
    """The exit code is 0 if rank 0 ended as it should."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains, and ends all
    monitor = ranks.monitor
    assert monitor is not None
    monitor.on_end = lambda: leave(0)
    monitor.failure.add_done_callback(lambda failure: _give_up(ranks, failure.result()))
    try:
        follow(build_runner(config, ranks).runner, ranks.parallel.link, monitor)
    except Exception as error:
        if monitor.has_ended():
            leave(0)
        if monitor.explain(error) is not error:
            leave(1)
        is_users = isinstance(error, ModelError | ConfigError)
        monitor.report(str(error) if is_users else f"{type(error).__name__}: {error}")
        if not is_users:
            logger.opt(exception=error).error("{} has failed", ranks.name())
        leave(1)
    leave(0)


def _give_up(ranks: Ranks, error: Exception) -> None:
    logger.debug("{} ends: {}", ranks.name(), error)
    leave(1)
