"""The program of a rank other than rank 0.

python -m kvferry.engine.executor.rank_start DESCRIPTOR      the descriptor of its end of the pipe
"""

from __future__ import annotations

import sys
from typing import NoReturn

from kvferry.core.names import resolve, without_collections
from kvferry.core.runtime.process_exit import exit_process


def main(descriptor: int) -> NoReturn:
    """Serve rank 0 at the other end of the pipe, and exit."""
    with without_collections():
        serve = resolve("kvferry.engine.executor.rank_main:main")
    exit_process(serve(descriptor))


if __name__ == "__main__":
    main(int(sys.argv[1]))
