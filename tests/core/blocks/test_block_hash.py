from kvferry.core.blocks.block_hash import extend_hashes, next_hash, root_hash


def hashes_of(tokens: list[int], *, block_size: int = 4, model: str = "m", salt: str = "") -> list[bytes]:
    found: list[bytes] = []
    extend_hashes(found, root_hash(model, salt), tokens, block_size)
    return found


def test_only_full_blocks_have_names() -> None:
    assert len(hashes_of(list(range(3)))) == 0
    assert len(hashes_of(list(range(4)))) == 1
    assert len(hashes_of(list(range(11)))) == 2


def test_names_chain_so_equal_tokens_after_different_ones_differ() -> None:
    first, second = hashes_of([1, 2, 3, 4, 9, 9, 9, 9]), hashes_of([5, 6, 7, 8, 9, 9, 9, 9])
    assert first[1] != second[1]


def test_shared_prefix_shares_names() -> None:
    assert hashes_of(list(range(12)))[:2] == hashes_of([*range(8), 99, 99, 99, 99])[:2]


def test_model_and_salt_separate() -> None:
    tokens = list(range(8))
    assert len({hashes_of(tokens)[0], hashes_of(tokens, model="n")[0], hashes_of(tokens, salt="s")[0]}) == 3


def test_model_and_salt_cannot_be_shifted_into_each_other() -> None:
    assert root_hash("ab", "c") != root_hash("a", "bc")


def test_extending_in_steps_equals_extending_at_once() -> None:
    grown: list[bytes] = []
    for length in range(20):
        extend_hashes(grown, root_hash("m"), list(range(length)), 4)
    assert grown == hashes_of(list(range(19)))


def test_token_boundaries_matter() -> None:
    assert next_hash(b"p" * 32, [1, 256]) != next_hash(b"p" * 32, [1 + 256 * 2**32, 1])
