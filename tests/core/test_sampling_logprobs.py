"""Log-probabilities of the model's own distribution."""

import numpy as np
import torch
from tests.helpers import sampling

from rackmount.sampling.logprobs import LogprobTensors, gather_logprobs
from rackmount.sampling.params import SamplingParams
from rackmount.sampling.table import SamplingTable
from rackmount_registry.ops import reference_ops


def sample(logits: torch.Tensor, *params: SamplingParams) -> tuple[list[int], LogprobTensors]:
    table = SamplingTable(len(params), logits.shape[1], torch.device("cpu"))
    for row, asked in enumerate(params):
        table.admit(row, asked, seed=row, prompt_token_ids=[0])
    rows = np.arange(len(params))
    out = sampling.sample(table, logits.clone(), rows, np.ones_like(rows), np.zeros((8, 8), int))
    assert out.logprobs is not None
    return out.token_ids.tolist(), out.logprobs


def test_they_are_of_the_logits_before_any_processing() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    params = SamplingParams(
        temperature=0.3, logit_bias={3: 50.0}, presence_penalty=1, top_k=2, logprobs=2
    )
    tokens, got = sample(logits, params)
    assert tokens == [3]
    expected = logits.double().log_softmax(-1)[0]
    assert got.token_ids.tolist() == [[3, 1, 2]]
    torch.testing.assert_close(got.logprobs[0].double(), expected[[3, 1, 2]])
    assert got.ranks.tolist() == [4]


def test_zero_gives_the_sampled_token_alone() -> None:
    tokens, got = sample(torch.tensor([[1.0, 3.0]]), SamplingParams(temperature=0, logprobs=0))
    assert got.token_ids.tolist() == [tokens] == [[1]]
    assert got.ranks.tolist() == [1]


def test_rows_that_did_not_ask_are_left_out_and_the_others_share_the_widest() -> None:
    greedy = [SamplingParams(temperature=0, logprobs=num) for num in (1, None, 3)]
    _, got = sample(torch.tensor([[0.0, 1, 2, 3]] * 3), *greedy)
    assert got.rows.tolist() == [0, 2]
    assert got.token_ids.tolist() == [[3, 3, 2, 1]] * 2


def test_equals_share_a_rank_and_are_listed_by_id() -> None:
    logits = torch.tensor([[2.0, 5.0, 2.0, 5.0]])
    params = SamplingParams(temperature=0, allowed_token_ids=[2], logprobs=4)
    _, got = sample(logits, params)
    assert got.token_ids.tolist() == [[2, 1, 3, 0, 2]]
    assert got.ranks.tolist() == [3]


def test_prompt_logprobs_are_those_of_the_given_ids() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([3, 0, 10, 3, 3])
    got = gather_logprobs(reference_ops(), np.arange(5), logits, targets, 2)
    expected = logits.double().log_softmax(-1)
    assert got.token_ids[:, 0].tolist() == targets.tolist()
    assert torch.equal(got.token_ids[:, 1:], expected.topk(2).indices)
    torch.testing.assert_close(got.logprobs.double(), expected.gather(1, got.token_ids))
    ranks = (expected > expected.gather(1, targets[:, None])).sum(-1) + 1
    assert torch.equal(got.ranks, ranks)


def test_no_prompt_token_gives_no_row() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    got = gather_logprobs(reference_ops(), np.arange(0), torch.zeros(0, 11), none, 3)
    assert got.token_ids.shape == got.logprobs.shape == (0, 4)
