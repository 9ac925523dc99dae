"""Text from tokens: characters in several tokens, spaces at the beginning, bytes that are no text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvferry.core.request import EngineOutput
from kvferry.engine.server.assembly import ChoiceAssembler, Detokenizer, TextOptions
from kvferry.engine.server.text_codec import TokenTexts
from support.examples import examples


@pytest.fixture(scope="session")
def byte_ids(backend: Any) -> dict[int, int]:
    """The token of each byte."""
    texts = TokenTexts(backend)
    singles = [one for one in range(backend.get_vocab_size()) if len(backend.id_to_token(one)) == 1]
    return {texts.raw(one)[0]: one for one in singles}


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """As SentencePiece models decode: ▁ is a space, <0xNN> a byte, and the first space is taken off."""
    vocab = {"<unk>": 0, "▁hello": 1, "▁world": 2, "a": 3, "▁": 4} | {
        f"<0x{byte:02X}>": 5 + byte for byte in range(256)
    }
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def decode(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.step(token_id) for token_id in token_ids), detokenizer.flush()]


def test_a_character_in_four_tokens_comes_whole(backend: Any, byte_ids: dict[int, int]) -> None:
    token_ids = [byte_ids[byte] for byte in "a🎉b".encode()]
    assert decode(Detokenizer(backend), token_ids) == ["a", "", "", "", "🎉", "b", ""]


def test_a_character_cut_off_by_the_end_is_replaced(backend: Any, byte_ids: dict[int, int]) -> None:
    token_ids = [byte_ids[byte] for byte in "a🎉".encode()[:-1]]
    assert "".join(decode(Detokenizer(backend), token_ids)) == "a�"


def test_the_answer_may_end_a_character_the_prompt_began(backend: Any, byte_ids: dict[int, int]) -> None:
    token_ids = [byte_ids[byte] for byte in "prompt 🎉!".encode()]
    assert "".join(decode(Detokenizer(backend, token_ids[:-3]), token_ids[-3:])) == "🎉!"


def test_a_prompt_of_broken_bytes_stays_out_of_the_answer(backend: Any, byte_ids: dict[int, int]) -> None:
    assert "".join(decode(Detokenizer(backend, [byte_ids[0x80]] * 20), [byte_ids[ord("a")]])) == "a"


def test_special_tokens_are_skipped_unless_wanted(backend: Any, byte_ids: dict[int, int]) -> None:
    token_ids = [byte_ids[ord("a")], backend.token_to_id("<|end|>"), byte_ids[ord("b")]]
    assert "".join(decode(Detokenizer(backend), token_ids)) == "ab"
    assert "".join(decode(Detokenizer(backend, skip_special_tokens=False), token_ids)) == "a<|end|>b"


def test_a_long_run_of_broken_bytes_is_given_out_meanwhile(backend: Any, byte_ids: dict[int, int]) -> None:
    token_ids = [byte_ids[0x80]] * 1000 + [byte_ids[byte] for byte in "🎉".encode()]
    pieces = decode(Detokenizer(backend), token_ids)
    assert "".join(pieces) == "�" * 1000 + "🎉"
    assert pieces.index("") < 200 < max(place for place, piece in enumerate(pieces) if piece)
    assert max(map(len, pieces)) < 100


def test_an_id_that_no_token_has_is_no_text(backend: Any, byte_ids: dict[int, int]) -> None:
    assert "".join(decode(Detokenizer(backend), [byte_ids[ord("a")], 10**6, byte_ids[ord("b")]])) == "ab"


def test_the_space_after_the_prompt_is_kept(metaspace: Tokenizer) -> None:
    assert decode(Detokenizer(metaspace), [1, 2]) == ["hello", " world", ""]
    assert decode(Detokenizer(metaspace, [1]), [2, 3]) == [" world", "a", ""]


def test_byte_tokens_add_up(metaspace: Tokenizer) -> None:
    token_ids = [3, *(5 + byte for byte in "ü".encode()), 2]
    assert "".join(decode(Detokenizer(metaspace), token_ids)) == "aü world"


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(max_size=40), cut=st.integers(0, 40))
def test_pieces_add_up_to_the_text(backend: Any, text: str, cut: int) -> None:
    token_ids = backend.encode(text, add_special_tokens=False).ids
    prompt, answer = token_ids[:cut], token_ids[cut:]
    whole = backend.decode(token_ids, skip_special_tokens=True)
    before = Detokenizer(backend)
    beginning = "".join(before.step(token_id) for token_id in prompt)
    rest = "".join(decode(Detokenizer(backend, prompt), answer))
    assert beginning + rest == whole == text or "�" in whole


@settings(max_examples=examples(200), deadline=None)
@given(token_ids=st.lists(st.integers(0, 399), max_size=30))
def test_any_tokens_add_up_to_their_decoding(backend: Any, token_ids: list[int]) -> None:
    assert "".join(decode(Detokenizer(backend), token_ids)) == backend.decode(token_ids, skip_special_tokens=True)


def test_token_texts_keep_spaces_and_bytes(backend: Any, metaspace: Tokenizer, byte_ids: dict[int, int]) -> None:
    texts = TokenTexts(backend)
    assert (texts.name(byte_ids[0xF0]), texts.raw(byte_ids[0xF0])) == ("bytes:\\xf0", b"\xf0")
    assert (texts.name(byte_ids[ord("a")]), texts.raw(byte_ids[ord("a")])) == ("a", b"a")
    assert texts.name(backend.token_to_id("<|end|>")) == "<|end|>"
    texts = TokenTexts(metaspace)
    assert (texts.name(2), texts.raw(2)) == (" world", b" world")
    assert (texts.name(5 + 0xC3), texts.raw(5 + 0xC3)) == ("bytes:\\xc3", b"\xc3")


def test_hidden_tokens_leave_the_text_as_it_is_without_a_parser(metaspace: Tokenizer) -> None:
    backend = Tokenizer.from_str(metaspace.to_str())
    backend.add_special_tokens([AddedToken("<|assistant|>", special=True)])
    special = backend.token_to_id("<|assistant|>")
    answer = [1, special, 2, 3, special]
    texts = []
    for options in (TextOptions(), TextOptions(skip_special_tokens=False, hidden_tokens=frozenset([special]))):
        assembler = ChoiceAssembler(0, backend, [special], options)
        delta = assembler.feed(EngineOutput(request_id="", token_ids=answer, finish_reason="length"))
        texts.append(delta.text)
    assert texts == ["hello worlda"] * 2
