"""A producer in a process of its own, to be killed. Says where it is as one line of JSON; does as lines say."""

from __future__ import annotations

import json
import os

import pipe_support  # noqa: F401 - so that its kinds of pipe are found
from kv_support import BlockRegion, Node, make_layout

from kvferry.transport.lookup_buffer.messages import Part


def produce(
    descriptor: int, environment: dict[str, str], transport: str, num_blocks: int, seed: int, block_size: int
) -> None:
    """`descriptor`: a socket to whoever tells it what to do. `seed` is of its bytes."""
    os.environ.update(environment)
    region = BlockRegion(make_layout(block_size=block_size), num_blocks, seed)
    node = Node(region, transport, engine_id="producer")
    where = {"host": node.listener.host, "port": node.listener.port}
    with open(os.dup(descriptor), "w", buffering=1) as said, open(descriptor) as told:  # noqa: PTH123 - no paths
        said.write(json.dumps(where | {"fabrics": {f.name: f.describe() for f in node.fabrics}}) + "\n")
        for line in told:
            match line.split():
                case ["open", key]:
                    node.table.open(key)
                case ["insert", key, first_block, *block_ids]:
                    num_layers = region.memory.layout.num_layers
                    node.table.insert(key, Part(0, num_layers, int(first_block), [int(text) for text in block_ids]))
                case ["seal", key]:
                    node.table.seal(key, b"meta")
            said.write("done\n")
    node.close()
    region.close()
