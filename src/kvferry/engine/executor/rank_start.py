"""The program of a rank other than rank 0.

python -m kvferry.engine.executor.rank_start DESCRIPTOR      the descriptor of its end of the pipe
"""

from __future__ import annotations

import os
import sys

from kvferry.core.names import resolve, without_collections


def main(descriptor: int) -> None:
    """Serve rank 0 at the other end of the pipe, and exit."""
    with without_collections():
        serve = resolve("kvferry.engine.executor.rank_main:main")
    code = serve(descriptor)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that libraries leave behind must not delay the exit


if __name__ == "__main__":
    main(int(sys.argv[1]))
