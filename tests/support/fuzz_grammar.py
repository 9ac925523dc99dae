"""Requests for an OpenAI server, by a grammar: valid, nearly valid, malformed and forged.

Request `number` of a `seed` is always the same, so that one that did harm can be sent again by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

Fields = list[tuple[str, str]]
"""Names and values as JSON text, so that a body can say what no JSON library would write."""

JSON = ("content-type", "application/json")
WORDS = ["the", "ferry", "0", "é", "日本", "🎉", "\n", " ", "a", "def f(x):", "<|end|>", "\\", '"', "\u0000", "\u202e"]
NUMBERS = [
    *(
        "0",
        "-1",
        "1",
        "2",
        "0.5",
        "-0.0",
        "1.0",
        "1e-320",
        "1e-39",
        "1e39",
        "1e308",
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
    ),
    *(
        "2147483648",
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775809",
        "1" * 400,
        "9" * 5000,
        "0" * 9,
    ),
]
ODD = [
    *(
        "null",
        "true",
        "false",
        '""',
        "[]",
        "{}",
        "[[]]",
        "[null]",
        '{"":null}',
        '"\\ud800"',
        '"\\udc00 x"',
        '"\\u0000"',
    ),
    *('"\\', '"\n"', "'a'", "undefined", "{,}", "[1,]", '{"a":1,"a":2}', '"' + "x" * 2000 + '"', "[" * 70 + "]" * 70),
]
DEEP = [
    opening * depth + closing * depth for opening, closing in (("[", "]"), ('{"a":', "}")) for depth in (60, 900, 5000)
]
LARGE = [
    *(
        '"' + "a b " * 30_000 + '"',
        "[" + "1," * 50_000 + "1]",
        '["a"' + ',"a"' * 20_000 + "]",
        "[" + "{}," * 9_000 + "{}]",
    ),
    "{" + ",".join(f'"{number}":1' for number in range(9_000)) + "}",
]
FIELDS = [
    *(
        "model",
        "prompt",
        "messages",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "stream",
        "stream_options",
        "stop",
        "seed",
    ),
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
    ),
    *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "best_of", "suffix", "user", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "truncate_prompt_tokens", "truncation_side", "cache_salt", "priority", "request_id", "timeout"),
    *(
        "tools",
        "tool_choice",
        "response_format",
        "structured_outputs",
        "allowed_token_ids",
        "bad_words",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
    ),
    *("return_token_ids", "return_timeline", "add_special_tokens", "add_generation_prompt", "continue_final_message"),
    *("kv_transfer_params", "tokens", "transfer_id", "store", "metadata", "max_token", "temprature", "what_is_this"),
]
TICKET_FIELDS = [
    *("do_remote_prefill", "do_remote_decode", "transfer_id", "remote_engine_id", "remote_request_id", "remote_host"),
    *("remote_port", "remote_block_ids", "remote_num_tokens", "tp_size", "prefill_result", "remote_ranks"),
    *("remote_prefixes", "remote_transfer_id", "keep_for_next_turn", "signature", "unknown"),
]
HOSTS = ["127.0.0.1", "a..b", "", "localhost", "169.254.169.254", "::1", "x" * 300, "\u0000", "1" * 70 + ".example"]


@dataclass
class Shot:
    """One request. `raw` is what is written instead of it; `leaves`: the client goes before the answer is whole."""

    kind: str
    method: str = "POST"
    path: str = "/v1/completions"
    headers: list[tuple[str, str]] = field(default_factory=lambda: [JSON])
    body: bytes = b""
    raw: bytes | None = None
    leaves: bool = False

    def encoded(self) -> bytes:
        """As it goes over the wire."""
        if self.raw is not None:
            return self.raw
        head = [f"{self.method} {self.path} HTTP/1.1", "host: fuzz", f"content-length: {len(self.body)}"]
        head += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*head, "", ""]).encode("latin-1", "replace") + self.body


def make_shot(seed: int, number: int) -> Shot:
    """Request `number` of a run."""
    random = Random(f"{seed}/{number}")
    kinds, weights = zip(*_KINDS, strict=True)
    shot: Shot = random.choices(kinds, weights)[0](random)
    return shot


def valid(random: Random) -> Shot:
    """One that should be answered."""
    path, fields = _body(random)
    return Shot("valid", path=path, body=_written(random, fields))


def nearly_valid(random: Random) -> Shot:
    """A valid one with some fields exchanged, doubled, left out or added."""
    path, fields = _body(random)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        _mutate(random, fields)
    return Shot("nearly valid", path=path, body=_written(random, fields))


def malformed(random: Random) -> Shot:
    """Bytes of a valid one flipped, cut, doubled, or in another encoding."""
    path, fields = _body(random)
    body = bytearray(_written(random, fields))
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(body) + 1)
        random.choice([_flip, _cut, _insert, _double])(random, body, place)
    if random.random() < 0.15:
        encoding = random.choice(["utf-16", "utf-16-be", "utf-32", "utf-8-sig"])
        return Shot("malformed", path=path, body=_written(random, fields).decode().encode(encoding))
    return Shot("malformed", path=path, body=bytes(body))


def forged(random: Random) -> Shot:
    """With a ticket that nobody gave out."""
    path, fields = _body(random)
    fields.append(("kv_transfer_params", _ticket(random)))
    return Shot("forged ticket", path=path, body=_written(random, fields))


def odd_headers(random: Random) -> Shot:
    """A valid body under headers that are not."""
    shot = valid(random)
    shot.kind = "odd headers"
    shot.headers = random.choice(
        [
            [],
            [
                (
                    "content-type",
                    random.choice(["text/plain", "application/json; charset=utf-16", "", "a" * 3000, "*/*"]),
                )
            ],
            [JSON, ("content-encoding", random.choice(["gzip", "identity", "br, gzip"]))],
            [JSON, ("x-request-id", random.choice(["a b", "é", "x" * 5000, "<script>", "", "fine-1"]))],
            [JSON, ("x-kvferry-timeline", random.choice(["{", '{"arrived":1e999}', "[" * 3000, '{"arrived":-1}']))],
            [JSON, ("authorization", random.choice(["Bearer x", "Basic", "\x7f" * 100]))],
            [JSON, ("accept", "x" * 5000), ("accept-encoding", "gzip, br")],
            [JSON, ("connection", "close, x-request-id"), ("x-request-id", "gone")],
            [JSON, ("x-kvferry-phase", "decode"), ("x-data-parallel-rank", "99"), ("x-session-id", "\t")],
            [JSON, *((f"x-{number}", "y") for number in range(random.choice([50, 300])))],
            [JSON, ("x-large", "y" * random.choice([8_000, 200_000]))],
        ]
    )
    return shot


def other_route(random: Random) -> Shot:
    """Routes that generate nothing, methods and paths that are not there."""
    token_ids = json.dumps([random.choice([0, 1, 5, 255, -1, 10**6, 2**63]) for _ in range(random.randint(0, 9))])
    messages = json.dumps([{"role": "user", "content": _text(random)}])
    posts: list[tuple[str, Fields]] = [
        ("/tokenize", [("prompt", json.dumps(_text(random))), ("return_token_strs", "true")]),
        ("/tokenize", [("messages", messages)]),
        ("/detokenize", [("tokens", token_ids)]),
    ]
    if random.random() < 0.5:
        path, fields = random.choice(posts)
        if random.random() < 0.5:
            _mutate(random, fields)
        return Shot("other route", path=path, body=_written(random, fields))
    paths = ["/v1/models", "/v1/models/m", "/v1/models/%ff%00", "/v1/models/../x", "/health", "/version", "/metrics"]
    paths += ["/openapi.json", "/v1/completions", "/v1/nothing", "//", "/%", "/v1/models/" + "x" * 3000, "/?a=b#c"]
    method = random.choice(["GET", "GET", "GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW"])
    return Shot("other route", method=method, path=random.choice(paths))


def no_http(random: Random) -> Shot:
    """What is no request, or one that two servers would read in two ways."""
    body = b'{"prompt":"a","max_tokens":1}'
    start = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    raw = random.choice(
        [
            random.randbytes(random.randint(1, 300)) + b"\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions\r\n\r\n",
            start + b"content-length: -5\r\n\r\n" + body,
            start + b"content-length: 99999999999999999999\r\n\r\n" + body,
            start + b"content-length: 5\r\ncontent-length: 29\r\n\r\n" + body,
            start + b"content-length: 29\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            start + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            start + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + body,
            start + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + body,
            start + b"bad header\r\n\r\n",
            start + b"a: \0\r\n\r\n",
            start + b"content-length: 29\r\nexpect: 200-nothing\r\n\r\n" + body,
            b"\x16\x03\x01\x02\x00\x01\x00" + random.randbytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ]
    )
    return Shot("no HTTP", raw=raw)


def leaving(random: Random) -> Shot:
    """A client that goes, in the middle of its request or of its answer."""
    shot = valid(random)
    encoded = shot.encoded()
    cut = random.randrange(1, len(encoded)) if random.random() < 0.5 else len(encoded)
    return Shot("leaving", path=shot.path, raw=encoded[:cut], leaves=True)


_KINDS: list[tuple[Callable[[Random], Shot], int]] = [
    *((valid, 30), (nearly_valid, 30), (malformed, 12), (forged, 10)),
    *((odd_headers, 6), (other_route, 6), (no_http, 3), (leaving, 3)),
]


def _body(random: Random) -> tuple[str, Fields]:
    """A body that is accepted, and short to answer."""
    wanted: dict[str, Any] = {"max_tokens": random.randint(1, 4)}
    chat = random.random() < 0.4
    if chat:
        wanted["messages"] = [_message(random) for _ in range(random.randint(1, 3))]
    else:
        wanted["prompt"] = _prompt(random)
    choices: dict[str, Any] = {
        "stream": True,
        "temperature": random.choice([0, 0.7, 1e-39, 2]),
        "seed": random.randrange(2**40),
        "top_p": random.choice([1, 0.5, 1e-6]),
        "top_k": random.choice([-1, 0, 1, 50]),
        "n": random.randint(1, 3),
        "stop": random.choice(["a", ["x", "\n"], [], None]),
        "logit_bias": {"5": random.choice([-100, 3.5, 100])},
        "logprobs": (True if chat else random.randint(0, 5)),
        "ignore_eos": True,
        "return_token_ids": True,
        "return_timeline": True,
        "user": _text(random)[:100],
        "cache_salt": random.choice(["a", "tenant 2"]),
        "what_is_this": {"a": [1]},
        "store": False,
    }
    if chat:
        choices["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    else:
        choices["echo"] = True
    for name in random.sample(sorted(choices), random.randint(0, 5)):
        wanted[name] = choices[name]
    if "tools" in wanted:
        named = {"type": "function", "function": {"name": "f"}}
        some = {"mode": random.choice(["auto", "required"]), "tools": [named]}
        wanted["tool_choice"] = random.choice(
            ["auto", "none", "required", None, named, {"type": "allowed_tools", "allowed_tools": some}]
        )
        wanted["parallel_tool_calls"] = random.choice([True, False, None])
        wanted["include_reasoning"] = random.choice([True, False])
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return path, [(name, json.dumps(value, ensure_ascii=random.random() < 0.5)) for name, value in wanted.items()]


def _prompt(random: Random) -> Any:
    kind = random.randrange(4)
    if kind == 0:
        return [random.randrange(100) for _ in range(random.randint(1, 40))]
    if kind == 1:
        return [_text(random) for _ in range(random.randint(1, 3))]
    return _text(random)


def _message(random: Random) -> dict[str, Any]:
    text = _text(random)
    content = random.choice([text, [{"type": "text", "text": text}]])
    return {"role": random.choice(["system", "user", "assistant"]), "content": content}


def _text(random: Random) -> str:
    return "a" + "".join(random.choices(WORDS, k=random.randint(0, 20)))


def _ticket(random: Random) -> str:
    """`kv_transfer_params` with keys of a real one and values of any kind."""
    direction = random.choice(["do_remote_prefill", "do_remote_prefill", "do_remote_decode"])
    ticket: Fields = [(direction, "true")]
    for name in random.sample(TICKET_FIELDS, random.randint(0, len(TICKET_FIELDS))):
        ticket.append((name, _ticket_value(random, name)))
    return "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in ticket) + "}"


def _ticket_value(random: Random, name: str) -> str:
    if random.random() < 0.3:
        return _value(random)
    plain: dict[str, list[Any]] = {
        "remote_host": HOSTS,
        "remote_port": [0, 1, 9, 65535, 65536, -1],
        "tp_size": [0, 1, 2, 1000, 20_000, 2**62],
        "remote_num_tokens": [0, 1, -1, 2**40],
        "remote_block_ids": [[[0, 1]], [[-1]], [[2**40]], []],
        "transfer_id": ["", "a", "x" * 10_000, "\u0000", "../.."],
        "remote_ranks": [[["127.0.0.1", 1]], [["a..b", 99999]], [["", 0]] * 500],
        "remote_prefixes": [[[1, "aa"]], [[-5, ""]], [[2**50, "zz"]] * 100],
        "prefill_result": [
            *({"first_token": token} for token in (0, 5, -1, 10**6, 2**31, 2**40)),
            {"first_token": 5, "logprobs": [-1, -0.5, 1, {"-1": -1}], "num_cached_tokens": 2**40},
            {"first_token": 5, "logprobs": [10**9, -0.5, 2**62, {"999999999": -1}], "seed": 2**63 - 1},
            {"first_token": 5, "seed": -1, "num_cached_tokens": -5, "timeline": {"arrived": 1e300, "done": -1e300}},
        ],
    }
    return json.dumps(random.choice(plain.get(name, [True, False, None, "x", 5])))


def _mutate(random: Random, fields: Fields) -> None:
    place = random.randrange(len(fields))
    name, value = fields[place]
    action = random.randrange(6)
    if action == 0:
        del fields[place : place + 1 if len(fields) > 1 else place]
    elif action == 1:
        fields[place] = (name, _value(random))
    elif action == 2:
        fields.append((random.choice(FIELDS), _value(random)))
    elif action == 3:
        fields.append((name, value))
    elif action == 4:
        fields[place] = (name[:-1] or "x", value)
    else:
        fields.append((_text(random), _value(random)))


def _value(random: Random) -> str:
    kind = random.random()
    if kind < 0.4:
        return random.choice(NUMBERS)
    if kind < 0.85:
        return random.choice(ODD)
    if kind < 0.97:
        return json.dumps(_text(random))
    return random.choice(DEEP if kind < 0.985 else LARGE)


def _written(random: Random, fields: Fields) -> bytes:
    space = random.choice(["", "", " ", "\n\t"])
    text = ",".join(f"{space}{json.dumps(name)}:{space}{value}" for name, value in fields)
    return ("{" + text + space + "}").encode("utf-8", "surrogatepass")


def _flip(random: Random, body: bytearray, place: int) -> None:
    if place < len(body):
        body[place] ^= 1 << random.randrange(8)


def _cut(random: Random, body: bytearray, place: int) -> None:
    del body[place : place + random.choice([1, 3, len(body)])]


def _insert(random: Random, body: bytearray, place: int) -> None:
    body[place:place] = random.choice(
        [b"\0", b"\xff", b"\xed\xa0\x80", b'"', b"}", b"{", b",", b"\\u", b"1e9", b"\xef\xbb\xbf"]
    )


def _double(random: Random, body: bytearray, place: int) -> None:
    body[place:place] = body[place : place + 20]
