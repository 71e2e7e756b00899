"""Steps on several ranks: rank 0 tells the others what it computes, and they compute along."""

from specserve.models.link import Link
from specserve.server.engine.step import ScheduledBatch, StepOutput
from specserve.server.worker.messages import decode, encode
from specserve.server.worker.model_runner import ModelRunner
from specserve.server.worker.monitor import Monitor


class ShardedExecutor:
    """The Executor of rank 0."""

    def __init__(self, runner: ModelRunner, link: Link, monitor: Monitor) -> None:
        self._runner, self._link, self._monitor = runner, link, monitor

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """See Executor."""
        with self._monitor.step():
            try:
                self._link.share(encode(batch))
                return self._runner.execute(batch)
            except RuntimeError as error:
                raise self._monitor.explain(error) from error


def follow(runner: ModelRunner, link: Link, monitor: Monitor) -> None:
    """The steps of another rank, up to an empty message."""
    while len(message := link.share(None)):
        with monitor.step():
            runner.execute(decode(message))
