"""A tokenizer with a vocabulary as large as real ones: Mistral's Tekken, whose file comes with vLLM.

`mistral_common` has the tokens with their ranks, and no merges; these follow from the ranks, as a token's last merge is
of the two parts into which all merges of lower rank join its bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")


def find_tekken(python: Path) -> Path:
    """The newest file of Tekken in the environment of this Python. Raises `FileNotFoundError`."""
    files = sorted(python.parent.parent.glob("lib/python*/site-packages/mistral_common/data/tekken_*.json"))
    if not files:
        raise FileNotFoundError(f"the environment of {python} has no mistral_common with a tekken_*.json")
    return files[-1]


def write_tokenizer(tekken: Path, folder: Path) -> int:
    """Write `tokenizer.json` and its configuration into `folder`; returns the size of the vocabulary."""
    content: dict[str, Any] = json.loads(tekken.read_text())
    config = content["config"]
    num_tokens = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in content["vocab"][:num_tokens]}
    text = _texts()
    num_special = len(SPECIAL_TOKENS)
    vocabulary = {name: index for index, name in enumerate(SPECIAL_TOKENS)}
    vocabulary |= {"".join(map(text.__getitem__, token)): rank + num_special for token, rank in ranks.items()}
    parts = (_parts(token, ranks) for token in ranks if len(token) > 1)
    merges = [("".join(map(text.__getitem__, left)), "".join(map(text.__getitem__, right))) for left, right in parts]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(config["pattern"]), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return tokenizer.get_vocab_size()


def _texts() -> dict[int, str]:
    """The character for each byte in a byte-level vocabulary, as GPT-2's tokenizer began it."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that the token's own merge joins."""
    limit, parts = ranks[token], [bytes([byte]) for byte in token]
    while len(parts) > 2:
        rank, index = min(
            (ranks.get(left + right, limit), index) for index, (left, right) in enumerate(pairwise(parts))
        )
        if rank >= limit:
            raise ValueError(f"{token!r} cannot be merged from tokens of lower rank")
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts[0], parts[1]
