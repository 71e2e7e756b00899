"""The server, with a rank that breaks: `python -m torch.distributed.run … faulty_rank.py FAULT serve …`.

FAULT is raise, hang, freeze or none, and happens in the eighth step of rank 1.
"""

import os
import signal
import sys
import time

from specserve.server.cli import main
from specserve.server.worker.model_runner import ModelRunner

STEP = 8


def break_rank_1(fault: str) -> None:
    execute, steps = ModelRunner.execute, [0]

    def broken(self, batch):
        steps[0] += 1
        if steps[0] == STEP:
            if fault == "raise":
                raise RuntimeError("injected: no more memory")
            if fault == "hang":
                time.sleep(1000)
            if fault == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
        return execute(self, batch)

    ModelRunner.execute = broken


if __name__ == "__main__":
    fault = sys.argv.pop(1)
    if os.environ["RANK"] == "1":
        break_rank_1(fault)
    main()
