"""`python -m specserve.server`: the same as `specserve`."""

from specserve.server.cli import main

main()
