#!/usr/bin/env python3
"""Write the diagrams of the docs to docs/images: `make diagrams`. Look at them before you commit them.

Each function draws one, and its name is the file's. Colours mean the same as on the page of a router: purple is a
queue, blue prefill, amber KV on its way, green decode.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from drawing import Box, Drawing

FOLDER = Path(__file__).parents[1] / "docs" / "images"


def disaggregation() -> Drawing:
    """Steps over time, on one instance and on two."""
    d = Drawing(
        "Tokens of an answer over time: on one instance a long prompt stops them, with P and D apart it does not", 262
    )
    d.text(16, 18, "One instance: a step computes prompts and answers together", "bold")
    d.text(16, 64, "instance", "dim")
    d.ticks(100, 250, 50, 28, 9)
    d.bar(254, 50, 240, 28, "prefill", "someone's prompt of 1,024 tokens")
    d.ticks(498, 700, 50, 28, 9)
    d.wire((254, 84), (254, 90), (494, 90), (494, 84), kind="bad")
    d.text(374, 104, "the answer stands still: 328 ms", "bad", "middle")
    d.text(16, 142, "Two instances: P computes prompts, D generates", "bold")
    d.text(16, 172, "P", "prefill bold")
    d.bar(254, 160, 240, 24, "prefill")
    d.arrow((496, 184), (512, 204), kind="kv strong")
    d.text(524, 190, "hand-off: its KV goes to D", "kv")
    d.text(16, 218, "D", "decode bold")
    d.ticks(100, 700, 204, 28, 9)
    d.text(100, 248, "each tick is a token of an answer; longest gap 34 ms", "dim")
    d.text(704, 248, "time →", "dim", "end")
    return d


def serving() -> Drawing:
    """The life of a request."""
    d = Drawing("One request over time: queue and prefill on P, layers of KV fetched meanwhile, tokens from D", 300)
    lanes = {"client": 40, "router": 92, "P": 150, "D": 236}
    for name, y in lanes.items():
        d.wire((86, y), (700, y), kind="line dashed")
        d.text(16, y, name, "bold")
    d.arrow((100, 40), (116, 88))
    d.arrow((120, 92), (138, 136))
    d.arrow((120, 92), (146, 226), kind="line dashed")
    d.text(130, 78, "both legs at once, one transfer id", "dim")
    d.bar(140, 138, 40, 24, "queue", "queue")
    d.bar(182, 138, 180, 24, "prefill")
    d.text(196, 128, "prefill, in chunks", "prefill")
    for x in (262, 295, 328, 360):
        d.arrow((x, 164), (x + 14, 222), kind="kv strong")
    d.text(198, 184, "each layer's KV", "kv", "middle")
    d.text(198, 202, "as it is ready", "kv", "middle")
    d.bar(150, 224, 82, 24, "queue")
    d.text(150, 262, "D has reserved blocks", "queue")
    d.bar(234, 224, 146, 24, "kv")
    d.text(320, 262, "fetch", "kv")
    d.arrow((362, 138), (378, 48), kind="prefill strong", label="first token: P's", at=(306, 62))
    d.ticks(386, 690, 224, 24, 12)
    for x in (606, 640, 674):
        d.arrow((x, 222), (x + 10, 48), kind="decode")
    d.text(560, 262, "decode: the other tokens", "decode", "middle")
    d.wire((364, 158), (376, 158), (388, 158), kind="kv dashed")
    d.text(420, 158, "lease: until D has the KV", "kv")
    d.text(704, 286, "time →", "dim", "end")
    return d


def _pair(d: Drawing, x: float, y: float, gap: float = 110) -> tuple[Box, Box]:
    """A P and a D beside each other."""
    return d.box(x, y, 56, 40, "P", kind="prefill"), d.box(x + 56 + gap, y, 56, 40, "D", kind="decode")


def connectors() -> Drawing:
    """Where KV goes with each family of connectors."""
    d = Drawing("KV goes from P to D directly, through a store that both reach, or both ways", 232)
    for x, name in ((8, "hand-off, directly"), (248, "through a store"), (488, "both: MultiConnector")):
        d.area(x, 8, 224, 178, name)
    p, e = _pair(d, 20, 70, 88)
    d.arrow(p.right, e.left, kind="kv thick", label="KV, once", at=(120, 72))
    d.text(120, 134, "D reads P's memory;", "dim", "middle")
    d.text(120, 152, "a ticket says where", "dim", "middle")
    p, e = _pair(d, 260, 40, 88)
    store = d.box(306, 104, 108, 40, "store")
    d.arrow(p.bottom, (p.bottom[0], 124), store.left, kind="kv thick")
    d.arrow(store.right, (e.bottom[0], 124), e.bottom, kind="kv thick")
    d.text(360, 164, "blocks by hash, kept", "kv", "middle")
    p, e = _pair(d, 500, 40, 88)
    store = d.box(546, 104, 108, 40, "store")
    d.arrow(p.right, e.left, kind="kv thick")
    d.arrow(p.bottom, (p.bottom[0], 124), store.left, kind="kv strong")
    d.arrow(store.right, (e.bottom[0], 124), e.bottom, kind="kv strong")
    d.text(120, 202, "P2p, Nixl, Mooncake, P2pNccl", "", "middle")
    d.text(360, 202, "KVStore, SharedStorage,", "", "middle")
    d.text(360, 219, "Offloading, LMCache", "", "middle")
    d.text(600, 202, "the first that has most loads,", "", "middle")
    d.text(600, 219, "all save", "", "middle")
    return d


def vllm() -> Drawing:
    """What runs in vLLM and what is in front of it."""
    d = Drawing("Unmodified vLLM servers with kvferry's connector inside, kvferry's router in front", 218)
    d.area(190, 8, 250, 88, "vllm serve, kv_producer")
    d.area(190, 118, 250, 92, "vllm serve, kv_consumer")
    clients = d.box(8, 88, 66, 40, "clients")
    router = d.box(100, 88, 72, 40, "router", kind="")
    p = d.box(206, 34, 110, 48, "P", "vLLM's engine", kind="prefill")
    cp = d.box(326, 34, 104, 48, "connector", "kvferry's")
    e = d.box(206, 146, 110, 48, "D", "vLLM's engine", kind="decode")
    cd = d.box(326, 146, 104, 48, "connector", "kvferry's")
    d.arrow(clients.right, router.left)
    d.arrow(router.right, (181, 108), (181, 58), p.left)
    d.arrow(router.right, (181, 108), (181, 170), e.left)
    d.arrow(cp.bottom, cd.top, kind="kv thick", label="KV", at=(398, 108))
    d.text(456, 40, "1. P answers with a ticket", "")
    d.text(456, 58, "(kv_transfer_params) and one token", "dim")
    d.text(456, 92, "2. the router passes the ticket to D", "")
    d.text(456, 126, "3. D fetches the KV from P", "kv")
    d.text(456, 144, "and answers the client", "dim")
    d.text(456, 178, "no change in vLLM: a plugin, named in", "dim")
    d.text(456, 196, "--kv-transfer-config", "code")
    return d


def stacks() -> Drawing:
    """Which stack is in front of which."""
    d = Drawing(
        "kvferry's router in front of SGLang, Dynamo or vLLM, and Dynamo's frontend in front of kvferry's engine",
        258,
    )
    d.text(16, 18, "kvferry's router in front", "bold")
    router = d.box(16, 92, 84, 44, "router", "kvferry's")
    rows = (
        ("SGLang", "Mooncake's engine", "both legs at once, a bootstrap room"),
        ("Dynamo's workers", "NIXL, kvferry's", "over Dynamo's own request plane"),
        ("vLLM", "NIXL, kvferry's", "P first, then D with its ticket"),
    )
    for number, (name, medium, how) in enumerate(rows):
        y = 34 + number * 62
        d.area(130, y, 410, 54)
        d.text(142, y + 18, name, "bold")
        d.text(142, y + 37, medium, "kv")
        p, e = d.box(330, y + 8, 50, 38, "P", kind="prefill"), d.box(480, y + 8, 50, 38, "D", kind="decode")
        d.arrow(p.right, e.left, kind="kv thick", label="KV", at=(430, y + 15))
        d.arrow(router.right, (115, 114), (115, y + 27), (130, y + 27))
        first, second = (
            how.rsplit(", ", 1) if ", " in how else (how.rsplit(" ", 2)[0], " ".join(how.rsplit(" ", 2)[1:]))
        )
        d.text(552, y + 18, first, "dim")
        d.text(552, y + 36, second, "dim")
    d.text(16, 228, "Or Dynamo's frontend in front:", "bold")
    front = d.box(270, 216, 150, 30, "Dynamo's frontend")
    own = d.box(456, 216, 250, 30, "kvferry's engine as a worker")
    d.arrow(front.right, own.left)
    return d


def stores() -> Drawing:
    """Tiers, and who shares which."""
    d = Drawing(
        "Instances of two machines with tiers of stores: memory of the machine, files, a server that all share", 262
    )
    for x, name in ((8, "machine 1"), (300, "machine 2")):
        d.area(x, 8, 276, 176, name)
        p = d.box(x + 24, 34, 100, 36, "P", kind="prefill")
        e = d.box(x + 152, 34, 100, 36, "D", kind="decode")
        memory = d.box(x + 24, 94, 228, 32, "memory of this machine")
        files = d.box(x + 24, 144, 228, 32, "files on a disk")
        d.arrow(p.bottom, (p.bottom[0], 94), kind="kv strong")
        d.arrow((e.bottom[0], 94), e.bottom, kind="kv strong")
        d.arrow((memory.bottom[0] - 40, 126), (files.top[0] - 40, 144), kind="kv strong")
        d.arrow((files.top[0] + 40, 144), (memory.bottom[0] + 40, 126), kind="kv strong")
        d.arrow((x + 98, 176), (x + 98, 214), kind="kv strong")
        d.arrow((x + 178, 214), (x + 178, 176), kind="kv strong")
    d.box(32, 214, 520, 36, "Valkey, Mooncake, LMCache, or files that all machines mount")
    for y, first, second in (
        (102, "fastest tier:", "one copy"),
        (152, "behind it,", "larger"),
        (224, "shared by", "all machines"),
    ):
        d.text(590, y, first)
        d.text(590, y + 17, second, "dim")
    d.text(590, 40, "down: written", "kv")
    d.text(590, 57, "up: read, copied", "kv")
    return d


def keys() -> Drawing:
    """A hand-off by keys, in order."""
    d = Drawing("A proxy hands off by a key: P stores KV under it, D loads it", 226)
    columns = {"proxy": 70, "P": 270, "store": 460, "D": 650}
    for name, x in columns.items():
        kind = {"P": "prefill", "D": "decode"}.get(name, "")
        box = d.box(x - 50, 8, 100, 30, name, kind=kind)
        d.wire(box.bottom, (x, 218), kind="line dashed")
    d.arrow((70, 70), (270, 70), label="prompt, store under key", at=(170, 58))
    d.bar(264, 72, 12, 34, "prefill")
    d.arrow((276, 100), (460, 100), kind="kv strong", label="blocks, key → hashes", at=(366, 88))
    d.arrow((270, 122), (70, 122), label="done: the KV is there", at=(170, 111))
    d.arrow((70, 158), (650, 158), label="prompt, load by key", at=(170, 147))
    d.arrow((460, 184), (644, 184), kind="kv strong", label="blocks, verified", at=(555, 173))
    d.ticks(646, 650, 186, 24, 9)
    d.arrow((650, 210), (70, 210), kind="decode", label="answer", at=(170, 199))
    return d


def tools() -> Drawing:
    """The text that a model writes, and the fields that clients get."""
    d = Drawing("The text of a model is told apart: reasoning, content and tool calls", 186)
    d.text(16, 18, "what the model writes, token by token →", "dim")
    pieces = (
        (16, 228, "queue", "<think>a city: ask</think>", "reasoning"),
        (250, 150, "line", "Let me look.", "content"),
        (406, 298, "decode", '<tool_call>{"name": "weather", …', "tool_calls"),
    )
    for x, width, kind, text, field in pieces:
        piece = d.box(x, 36, width, 36, kind=kind)
        d.text(
            x + width / 2, 54, text if len(text) * 7.3 < width else text[: int(width / 7.3) - 1] + "…", "code", "middle"
        )
        target = d.box(x + width / 2 - 68, 112, 136, 32, field, kind=kind)
        d.arrow(piece.bottom, target.top, kind=kind)
    d.text(16, 168, "Each field streams as soon as its text is certain; forced calls follow a grammar.", "dim")
    return d


MASKS = (("pack", 1411), ("s", 28), (" =", 1), (" ", 1), ("1", 10), ("0", 11), ("0", 11), ("end", 1))
"""Each token of `packs = 100` by kvferry/tiny-python's tokenizer, and how many of its 4,096 tokens llguidance permits
there under `REGEX`."""
REGEX, NUM_TOKENS = "[a-z]{2,5} = [0-9]{1,3}", 4096


def structured() -> Drawing:
    """The mask of a grammar, step by step."""
    d = Drawing(f"The regular expression {REGEX} permits other tokens at each step", 170)
    d.text(16, 18, f"regex  {REGEX}", "code")
    d.text(360, 18, "how many of 4,096 tokens each step may sample", "dim")
    for number, (token, count) in enumerate(MASKS):
        x = 16 + number * 88
        step = d.box(x, 40, 72, 40, f"{count:,}", kind="queue")
        if number:
            d.arrow((x - 16, 60), step.left)
        d.bar(x, 86, 72, 8, "line")
        d.bar(x, 86, max(2.0, 72 * count / NUM_TOKENS), 8, "decode")
        d.arrow((x + 36, 98), (x + 36, 114), kind="decode")
        d.text(x + 36, 128, token if token == "end" else f"'{token}'", "code bold", "middle")
    d.text(16, 156, "The mask leaves these tokens; the model's own probabilities choose among them.", "dim")
    return d


def fleet() -> Drawing:
    """A roll: members over time."""
    d = Drawing("A roll over time: a new P and D start and serve before the old ones drain and end", 226)
    rows = (
        ("prefill-0", "prefill", 0),
        ("decode-0", "decode", 0),
        ("prefill-1", "prefill", 1),
        ("decode-1", "decode", 1),
    )
    for number, (name, kind, generation) in enumerate(rows):
        y = 44 + number * 38
        d.text(16, y + 12, name, f"{kind} bold")
        if generation == 0:
            d.bar(110, y, 300, 24, kind)
            d.bar(410, y, 120, 24, "line")
            d.text(470, y + 12, "draining", "on", "middle")
        else:
            d.bar(210, y, 110, 24, "queue")
            d.text(265, y + 12, "starting", "on", "middle")
            d.bar(320, y, 380, 24, kind)
    for x, label, anchor in (
        (210, "apply", "middle"),
        (410, "enough pairs serve", "middle"),
        (530, "nothing runs there", "start"),
    ):
        d.wire((x, 30), (x, 196), kind="line dashed")
        d.text(x, 18, label, "", anchor)
    d.text(110, 212, "revision 1", "dim")
    d.text(704, 212, "revision 2", "dim", "end")
    return d


def deployment() -> Drawing:
    """Processes and ports on two machines."""
    d = Drawing("Two machines: router and P on one, D on the other; requests over HTTP, KV from P to D", 218)
    d.area(150, 8, 300, 202, "10.0.0.1")
    d.area(520, 8, 192, 202, "10.0.0.2")
    clients = d.box(8, 50, 90, 44, "clients", "`--api-key`")
    router = d.box(168, 46, 116, 52, "router", "`:8000`")
    p = d.box(168, 136, 116, 58, "P", "`:8001`", kind="prefill")
    kp = d.box(340, 140, 96, 50, "KV", "`:8101`", kind="kv")
    e = d.box(580, 46, 116, 52, "D", "`:8002`", kind="decode")
    kd = d.box(590, 140, 96, 50, "KV", "`:8101`", kind="kv")
    d.arrow(clients.right, router.left)
    d.arrow(router.bottom, p.top)
    d.arrow(router.right, e.left, label="HTTP, signed", at=(430, 60))
    d.wire(p.right, kp.left, kind="kv strong")
    d.wire(e.bottom, kd.top, kind="kv strong")
    d.arrow(kp.right, kd.left, kind="kv thick", label="D reads P's KV", at=(513, 152))
    d.text(513, 182, "TCP; RDMA never run", "dim", "middle")
    return d


def kubernetes() -> Drawing:
    """The objects that are written."""
    d = Drawing(
        "Objects on Kubernetes: a Service, routers, Deployments of P and D that register, a controller",
        268,
    )
    service = d.box(16, 54, 100, 44, "Service", "chat :8000")
    d.area(150, 8, 156, 142, "StatefulSet")
    routers = [d.box(168, 36 + 56 * number, 120, 44, f"router {number}") for number in range(2)]
    d.area(350, 8, 360, 100, "Deployment of prefill")
    d.area(350, 122, 360, 100)
    d.text(698, 138, "Deployment of decode", "dim", "end")
    p = [d.box(366 + 112 * number, 40, 96, 46, f"P {number}", "pod", kind="prefill") for number in range(2)]
    e = [d.box(366 + 112 * number, 154, 96, 46, f"D {number}", "pod", kind="decode") for number in range(3)]
    for router in routers:
        d.arrow(service.right, (133, 76), (133, router.left[1]), router.left)
    d.arrow((306, 60), (350, 60))
    d.arrow((306, 120), (328, 120), (328, 172), (350, 172))
    d.arrow((p[0].bottom[0], 86), (e[0].top[0], 154), kind="kv thick", label="KV", at=(392, 122))
    d.arrow((p[1].bottom[0], 86), (e[1].top[0], 154), kind="kv thick")
    d.text(596, 62, "pods register at", "dim")
    d.text(596, 80, "each router", "dim")
    controller = d.box(16, 186, 176, 56, "controller", "with [scale]: one acts")
    d.arrow(controller.right, (228, 214), (228, 150), label="traffic", at=(262, 190))
    d.arrow(
        (192, 236), (530, 236), (530, 224), kind="line dashed", label="patches the numbers of replicas", at=(360, 250)
    )
    return d


def gateway() -> Drawing:
    """Envoy asks, the picker chooses, Envoy sends."""
    d = Drawing("Envoy asks the picker over gRPC where a request goes, and sends it there itself", 218)
    client = d.box(8, 46, 80, 44, "client")
    envoy = d.box(170, 40, 110, 56, "Envoy")
    picker = d.box(150, 150, 150, 56, "kvferry picker", "chooses")
    e = d.box(560, 42, 150, 52, "D", kind="decode")
    p = d.box(560, 138, 150, 52, "P", kind="prefill")
    d.arrow(client.right, envoy.left, label="1. request", at=(129, 54))
    d.arrow((200, 96), (200, 150), label="2. which? (gRPC)", at=(136, 124))
    d.arrow((250, 150), (250, 96), label="3. this endpoint", at=(306, 124))
    d.arrow(envoy.right, e.left, label="4. request", at=(420, 54))
    d.text(392, 84, "x-prefiller-host-port: P", "code", "middle")
    d.arrow(p.top, e.bottom, kind="kv thick", label="KV", at=(654, 116))
    d.arrow((560, 178), picker.right, kind="line dashed", label="health, metrics, KV events", at=(430, 192))
    d.arrow((560, 80), (500, 80), (500, 164), (300, 164), kind="line dashed")
    return d


def simulator() -> Drawing:
    """What is the real code, and what is replaced."""
    d = Drawing("In a simulation the code of router, engine and connectors is real; four things are replaced", 236)
    d.area(8, 8, 452, 220, "the code that serves, unchanged")
    router = d.box(28, 84, 108, 52, "router", "its policies")
    engine_p = d.box(180, 44, 122, 60, "P", "scheduler, blocks", kind="prefill")
    engine_d = d.box(180, 136, 122, 60, "D", "scheduler, blocks", kind="decode")
    links = [d.box(330, y, 116, 60, "connector", "leases, fence") for y in (44, 136)]
    d.arrow(router.right, (158, 110), (158, 74), engine_p.left)
    d.arrow(router.right, (158, 110), (158, 166), engine_d.left)
    d.wire(engine_p.right, links[0].left, kind="kv strong")
    d.wire(engine_d.right, links[1].left, kind="kv strong")
    d.arrow(links[0].bottom, links[1].top, kind="kv thick")
    d.area(476, 8, 236, 220, "replaced")
    rows = (
        ("forward pass", "by its measured time"),
        ("network, files, memory", "by latency and bandwidth"),
        ("start of a process", "by its measured time"),
        ("clock and chance", "by a seed: same run again"),
    )
    for number, (what, how) in enumerate(rows):
        d.box(488, 36 + number * 47, 212, 40, what, how, kind="queue dashed")
    return d


def scaling() -> Drawing:
    """What is measured, predicted and decided."""
    d = Drawing(
        "The controller's loop: requests are measured, fleets predicted, and the cheapest that meets the goal is made",
        214,
    )
    steps = (
        ("measured", "requests as they arrive,", "times of each phase", ""),
        ("predicted", "of 1 P + 1 D, 2 P + 1 D, …:", "share within the targets", "queue"),
        ("decided", "the cheapest that meets", "the goal, few changes", "kv"),
    )
    boxes = [d.box(16 + number * 240, 16, 208, 72, *lines[:3], kind=lines[3]) for number, lines in enumerate(steps)]
    for before, after in pairwise(boxes):
        d.arrow(before.right, after.left)
    d.arrow(
        boxes[2].bottom,
        (600, 112),
        (120, 112),
        boxes[0].bottom,
        label="a role changes, instances start, or drain and end",
        at=(360, 124),
    )
    d.text(16, 156, "a role changes", "bold")
    d.text(16, 174, "at once", "dim")
    d.text(16, 196, "nothing has to start", "dim")
    d.text(256, 156, "an instance starts", "bold")
    d.text(256, 174, "in tens of seconds", "dim")
    d.text(256, 196, "growth is looked at this far ahead", "dim")
    d.text(496, 156, "an instance is released", "bold")
    d.text(496, 174, "after cool_down, drained first", "dim")
    d.text(496, 196, "what bursts need is held", "dim")
    return d


def security() -> Drawing:
    """Which key opens which door."""
    d = Drawing(
        "Doors of a deployment and the keys that open them: API keys, the admin key, keys derived from the token", 232
    )
    d.area(182, 8, 530, 216, "processes that hold KVFERRY_AUTH_TOKEN, which is never sent")
    client = d.box(8, 44, 88, 44, "client")
    operator = d.box(8, 140, 88, 44, "operator")
    router = d.box(220, 84, 100, 60, "router")
    p = d.box(560, 40, 120, 48, "P", kind="prefill")
    e = d.box(560, 164, 120, 48, "D", kind="decode")
    d.arrow(client.right, (140, 66), (140, 104), (220, 104), label="API key", at=(140, 52))
    d.arrow(operator.right, (140, 162), (140, 126), (220, 126), label="admin key", at=(140, 178))
    d.arrow(router.right, (440, 114), (440, 64), p.left)
    d.text(452, 86, "signed for one")
    d.text(452, 103, "server, once")
    d.arrow((440, 114), (440, 188), e.left)
    d.arrow(p.bottom, e.top, kind="kv thick", label="KV", at=(606, 116))
    d.text(636, 116, "a key a", "kv")
    d.text(636, 133, "connection", "kv")
    d.text(452, 157, "P's ticket,")
    d.text(452, 174, "sealed by P")
    return d


def router() -> Drawing:
    """Filter, score, choose."""
    d = Drawing("The router filters instances, scores the rest for both legs, and takes the best pair", 228)
    columns = (("all instances", 16), ("can serve this request", 256), ("scores: lower is better", 496))
    for name, x in columns:
        d.text(x, 18, name, "bold")
    rows = (
        ("P 0", "prefill", "0.9 s", True),
        ("P 1", "prefill", "0.2 s", True),
        ("D 0", "decode", "31 ms", True),
        ("D 1", "decode", "", False),
        ("D 2", "decode", "18 ms", True),
    )
    for number, (name, kind, score, stays) in enumerate(rows):
        y = 36 + number * 34
        first = d.box(16, y, 90, 28, name, kind=kind)
        if stays:
            second = d.box(256, y, 90, 28, name, kind=kind)
            d.arrow(first.right, second.left)
            best = name in ("P 1", "D 2")
            third = d.box(496, y, 90, 28, score, kind=f"{kind} strong" if best else "line")
            d.arrow(second.right, third.left)
            if best:
                d.text(600, y + 14, "chosen", f"{kind} bold")
        else:
            d.wire(first.right, (160, y + 14), kind="bad")
            d.text(168, y + 14, "× down", "bad bold")
    d.text(256, 214, "D must be able to read P's KV; after a failure, again with the rest", "dim")
    return d


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    make.__name__: make
    for make in (
        disaggregation, serving, connectors, vllm, stacks, stores, keys, tools, structured, fleet, deployment,
        kubernetes, gateway, simulator, scaling, security, router,
    )
}  # fmt: skip


def main() -> None:
    """Write all of them."""
    for name, make in DIAGRAMS.items():
        (FOLDER / f"{name}.svg").write_text(make().svg())


if __name__ == "__main__":
    main()
