"""A prefill instance in a process of its own. Prints its address, then for each line `key token token …` a ticket.

Arguments: connector, its extra config as JSON. With the line `hang key token …` it computes the first chunk only.
"""

from __future__ import annotations

import json
import select
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "transport" / "support"))

from fake_engine import FakeEngine, FakeRequest
from kv_support import make_layout

from kvferry.connectors.p2p.worker import P2pWorkerSide
from kvferry.core.messages.hand_off import Produce

P2pWorkerSide.gather_bytes = 0
"""What is computed is announced at once, as a test may wait for the first part of it: little of it would else be
announced only with the rest, unless the announcement of the hand-off's beginning happens to come late enough."""


def main() -> None:
    extra = json.loads(sys.argv[2])
    engine = FakeEngine(sys.argv[1], make_layout(num_layers=2), "kv_producer", **extra)
    address = engine.addresses[0] if engine.addresses else {}
    sys.stdout.write(json.dumps(address) + "\n")
    sys.stdout.flush()
    while True:
        while not select.select([sys.stdin], [], [], 0.002)[0]:
            engine.step(scheduled=[])
        words = sys.stdin.readline().split()
        if not words:
            break
        hang = words[0] == "hang"
        key, *tokens = words[1:] if hang else words
        request = FakeRequest(key, [int(token) for token in tokens], Produce(key))
        if hang:
            engine.add(request)
            engine.step()
        else:
            engine.run(request)
        sys.stdout.write(json.dumps(request.ticket) + "\n")
        sys.stdout.flush()
    engine.check()
    engine.close()


if __name__ == "__main__":
    main()
