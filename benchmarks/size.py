"""The amount of code that a hand-off runs through. Files, lines and classes of the data plane, from what is imported.

`P2P over shared memory` is what a process has loaded of `kvferry.transport` and `kvferry.connectors` once both sides of
a `P2pConnector` are built and registered with `transport` "shm". `transport` is the whole folder, every medium. Lines
are all lines, with comments and docstrings; empty files do not count.

Prints a table.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from code_lines import count_text

ROOMS = ("kvferry.transport", "kvferry.connectors")
PROGRAM = """
import json, sys
from kvferry.connectors.api import ConnectorContext
from kvferry.connectors.registry import find_connector
from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.transport.memory import BlockMemory
from kvferry.transport.shared_memory import SharedSegment

config = KVTransferConfig(kv_connector="P2pConnector", kv_connector_extra_config={"transport": "shm"})
layout = KVLayout(model_fingerprint="m", layers=(LayerLayout(1, 8, 8),), dtype="float32", block_size=1)
segment = SharedSegment.create(16 * layout.block_bytes)
context = ConnectorContext(config, layout)
connector = find_connector(config)
scheduler, worker = connector.build_scheduler_side(context), connector.build_worker_side(context)
worker.register(BlockMemory.dense(layout, 16, segment.address, segment=segment.name))
scheduler.set_addresses([worker.address()])
worker.close()
scheduler.close()
segment.close()
print(json.dumps({name: module.__file__ for name, module in sys.modules.items() if name.startswith("kvferry.")}))
"""


def loaded() -> dict[str, Path]:
    """The modules of `ROOMS` that a hand-off over shared memory needs, by name."""
    answer = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {name: Path(file) for name, file in sorted(json.loads(answer).items()) if name.startswith(ROOMS)}


def measure(files: Iterable[Path]) -> dict[str, int]:
    """Files that are not empty, and what is in them."""
    texts = [text for file in files if (text := file.read_text()).strip()]
    return {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts),
        "code_lines": sum(map(count_text, texts)),
        "classes": sum(isinstance(node, ast.ClassDef) for text in texts for node in ast.walk(ast.parse(text))),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", action="store_true", help="a line for each file that a hand-off loads")
    options = parser.parse_args()
    modules = loaded()
    transport = next(file.parent for name, file in modules.items() if name == "kvferry.transport")
    sizes = {"P2P over shared memory": measure(modules.values()), "transport": measure(transport.rglob("*.py"))}
    if options.each:
        for name, file in modules.items():
            print(f"{measure([file])['lines']:6} {name}")
    for what, figures in sizes.items():
        print(f"{what:24s}" + "".join(f"{number:8} {name}" for name, number in figures.items()))


if __name__ == "__main__":
    main()
