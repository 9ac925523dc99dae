import pytest
import torch

from kvferry.engine.ops.batch import AttentionBatch


def test_tokens_find_their_position_and_slot() -> None:
    batch = AttentionBatch.build([1, 3], [10, 5], [[7, 2, 9], [4, 6]], block_size=4)
    assert batch.query_starts.tolist() == [0, 1, 4]
    assert batch.context_lens.tolist() == [10, 5]
    assert batch.positions.tolist() == [9, 2, 3, 4]
    assert batch.slots.tolist() == [9 * 4 + 1, 4 * 4 + 2, 4 * 4 + 3, 6 * 4 + 0]
    assert (batch.num_sequences, batch.num_tokens) == (2, 4)
    assert (batch.max_query_len, batch.max_context_len) == (3, 10)
    assert batch.query_starts.dtype == batch.context_lens.dtype == batch.block_tables.dtype == torch.int32
    assert batch.slots.dtype == batch.positions.dtype == torch.int64


def test_tables_are_cut_to_what_is_used_and_padded() -> None:
    batch = AttentionBatch.build([1, 1], [3, 9], [[5, 8, 8, 8], [1, 2, 3]], block_size=4)
    assert batch.block_tables.tolist() == [[5, 0, 0], [1, 2, 3]]


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        AttentionBatch.build([1], [9], [[1, 2]], block_size=4)


def test_groups_gather_sequences_of_equal_query_length() -> None:
    batch = AttentionBatch.build([2, 1, 2], [4, 8, 6], [[1], [2, 3], [4, 5]], block_size=4)
    single, double = batch.groups
    assert (single.query_len, single.rows.tolist(), single.tokens.tolist()) == (1, [1], [[2]])
    assert (double.query_len, double.rows.tolist(), double.tokens.tolist()) == (2, [0, 2], [[0, 1], [3, 4]])
    assert double.max_context_len == 6
