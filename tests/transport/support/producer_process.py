"""A producer in a process of its own, to be killed. Says where it is as one line of JSON; does as stdin's lines say.

Arguments: transport, number of blocks, seed of its bytes, scale of the layout.
"""

from __future__ import annotations

import json
import sys

import pipe_support  # noqa: F401 - so that its kinds of pipe are found
from kv_support import Node, Region, make_layout

from kvferry.transport.lookup_buffer.messages import Part


def main() -> None:
    transport, num_blocks, seed, block_size = sys.argv[1], *(int(text) for text in sys.argv[2:5])
    region = Region(make_layout(block_size=block_size), num_blocks, seed)
    node = Node(region, transport, engine_id="producer")
    where = {"host": node.listener.host, "port": node.listener.port}
    sys.stdout.write(json.dumps(where | {"fabrics": {f.name: f.describe() for f in node.fabrics}}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        match line.split():
            case ["open", key]:
                node.table.open(key)
            case ["insert", key, first_block, *block_ids]:
                num_layers = region.memory.layout.num_layers
                node.table.insert(key, Part(0, num_layers, int(first_block), [int(text) for text in block_ids]))
            case ["seal", key]:
                node.table.seal(key, b"meta")
        sys.stdout.write("done" + "\n")
        sys.stdout.flush()
    node.close()
    region.close()


if __name__ == "__main__":
    main()
