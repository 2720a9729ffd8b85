import pytest
import torch

from trainer.algorithms.aggregation import AGGREGATIONS, seq_mean_token_mean, seq_mean_token_sum_norm, token_mean


def test_token_mean_counts_tokens_and_sequence_means_count_rows() -> None:
    tokens = torch.tensor([3, 1, 0])

    by_token, token_count = token_mean(tokens)
    by_row, row_count = seq_mean_token_mean(tokens)
    by_constant, _ = seq_mean_token_sum_norm(tokens, length=10)

    assert (by_token * tokens).tolist() == [3, 1, 0]
    assert (by_row * tokens).tolist() == pytest.approx([1, 1, 0])
    assert (by_constant * tokens).tolist() == pytest.approx([0.3, 0.1, 0])
    assert (token_count, row_count) == (4, 2)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_splitting_the_rows_never_changes_weights_or_shares(name: str) -> None:
    tokens = torch.tensor([3, 1, 0, 7, 2])

    whole, share = AGGREGATIONS[name](tokens)
    parts = [AGGREGATIONS[name](tokens[row : row + 1]) for row in range(5)]

    assert torch.equal(whole, torch.cat([weights for weights, _ in parts]))
    assert share == sum(part for _, part in parts)
