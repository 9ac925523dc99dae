"""Runs one step in this process: `python -m gpu.step NAME`. Its exit status is 0 unless the step raised."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from gpu.context import Context
from gpu.plan import choose_steps
from gpu.records import NotPossible, Recorder, Skipped


def main() -> None:
    """Run the step, and write what it records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where everything is written")
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs that may be used")
    parser.add_argument("--limit", type=float, required=True, help="seconds after which this process is ended")
    options = parser.parse_args()
    end = time.monotonic() + options.limit
    signal.signal(signal.SIGTERM, _end)
    [step] = choose_steps([options.name], options.gpus)
    record = Recorder(options.folder / f"{step.name}.jsonl")
    try:
        context = Context(options.device, options.folder, options.gpus, record, end)
        importlib.import_module(step.module).run(context)
    except NotPossible as reason:
        record.add(Skipped(str(reason)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some libraries leave threads behind that never end


def _end(signum: int, frame: FrameType | None) -> None:
    """End through the `with` blocks of the step, which stop the servers that it has started."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    main()
