"""The KV of the simulator: what is right can be told from the prompt, and what is wrong changes the tokens."""

from random import Random

import pytest

from kvferry.sim.kv import KVContents, chain, expected_tokens, sample

VOCAB, LAYERS = 1000, 3


def _generate(contents: KVContents, blocks: list[int], prompt: list[int], number: int, chunk: int) -> list[int]:
    """As an instance does it: the prompt in chunks, then token by token."""
    tokens, start, seed = list(prompt), 0, 5
    while len(tokens) < len(prompt) + number:
        end = min(len(tokens), start + chunk)
        contents.compute(blocks, start, tokens[start:end])
        start = end
        if end == len(tokens):
            tokens.append(sample(contents.attended(blocks, end), seed, end, VOCAB))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("chunk", [1, 7, 8, 100])
def test_chunks_and_blocks_do_not_matter(chunk: int) -> None:
    random = Random(1)
    prompt = [random.randrange(VOCAB) for _ in range(61)]
    blocks = random.sample(range(40), 12)
    assert _generate(KVContents(LAYERS, 40, 8), blocks, prompt, 20, chunk) == expected_tokens(
        prompt, 5, 20, VOCAB, LAYERS
    )


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 9000])
def test_a_chain_is_the_same_in_any_chunks(length: int) -> None:
    tokens = list(range(length))
    whole = chain(7, tokens)
    first = chain(7, tokens[: length // 2 + 1])
    rest = chain(int(first[-1]), tokens[length // 2 + 1 :]) if length > 1 else first[:0]
    assert [*first, *rest] == list(whole)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("block", range(4))
def test_any_wrong_block_in_any_layer_is_noticed(layer: int, block: int) -> None:
    prompt = list(range(30))
    contents = KVContents(LAYERS, 8, 8)
    contents.compute([0, 1, 2, 3], 0, prompt)
    before = contents.attended([0, 1, 2, 3], 30)
    contents.compute([4, 5, 6, 7], 0, [*prompt[:-1], 31] if block == 3 else prompt[::-1])
    contents.copy(layer, contents, [4 + block], [block])
    assert contents.attended([0, 1, 2, 3], 30) != before
