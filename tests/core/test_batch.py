"""The flat batch: the worked examples, chunks, decoding, rows used again."""

from dataclasses import fields

import numpy as np

from rackmount.execution.batch import FlatBatch, PersistentBatch, padding_step
from rackmount.scheduling.plan import Growth, RowAdmission, StepPlan


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def admission(row: int, num_tokens: int, num_computed: int, table: list[int]) -> RowAdmission:
    """A request whose token at position p of row r is 1000 r + p."""
    return RowAdmission(
        row=row,
        request_id=f"r{row}",
        token_ids=(1000 * row + np.arange(num_tokens)).astype(np.int32),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_computed,
        block_ids=[int32(*table)],
        sampling=None,
    )


def plan_of(
    rows: list[int],
    num_tokens: list[int],
    samples: list[bool],
    admitted: list[RowAdmission] | None = None,
    grown: tuple[tuple[int, int, int], ...] = (),
    released: list[int] | None = None,
) -> StepPlan:
    """`grown` are (row, column, block id)."""
    growth = [int32(*column) for column in zip(*grown, strict=True)] or [int32()] * 3
    return StepPlan(
        released=released or [],
        admitted=admitted or [],
        grown=[Growth(*growth)],
        rows=int32(*rows),
        num_tokens=int32(*num_tokens),
        samples=np.array(samples, np.bool_),
        total_num_tokens=sum(num_tokens),
    )


def step(batch: PersistentBatch, plan: StepPlan) -> FlatBatch:
    batch.apply(plan)
    return batch.build(plan)


def sample(batch: PersistentBatch, flat: FlatBatch, *token_ids: int) -> None:
    """The step's tokens, known at once."""
    tenancy = batch.expect(flat.sample_rows)
    batch.fill(flat.sample_rows, flat.sample_positions, int32(*token_ids), tenancy)


def test_the_worked_example_of_a_mixed_step() -> None:
    batch = PersistentBatch(max_num_seqs=3, max_model_len=64, block_size=16)
    admitted = [
        admission(0, 5, 0, [7]),
        admission(1, 38, 37, [2, 9, 4]),
        admission(2, 35, 32, [11, 12, 3]),
    ]
    flat = step(batch, plan_of([0, 1, 2], [5, 1, 3], [True] * 3, admitted))
    assert flat.positions.tolist() == [0, 1, 2, 3, 4, 37, 32, 33, 34]
    assert flat.query_start_loc.tolist() == [0, 5, 6, 9]
    assert flat.seq_lens.tolist() == [5, 38, 35]
    assert flat.slots.tolist() == [112, 113, 114, 115, 116, 69, 48, 49, 50]
    assert flat.logits_indices.tolist() == [4, 5, 8]
    assert flat.token_ids.tolist() == [0, 1, 2, 3, 4, 1037, 2032, 2033, 2034]
    assert flat.rows.tolist() == flat.sample_rows.tolist() == [0, 1, 2]


def test_the_worked_example_of_a_prefix_hit() -> None:
    batch = PersistentBatch(max_num_seqs=1, max_model_len=16, block_size=4)
    flat = step(batch, plan_of([0], [6], [True], [admission(0, 10, 4, [7, 2, 5])]))
    assert flat.slots.tolist() == [8, 9, 10, 11, 20, 21]
    assert flat.positions.tolist() == [4, 5, 6, 7, 8, 9]
    assert flat.seq_lens.tolist() == [10]


def test_types_are_those_that_kernels_read() -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=16, block_size=4)
    admitted = [admission(0, 3, 0, [0]), admission(1, 1, 0, [1])]
    mixed = step(batch, plan_of([0, 1], [3, 1], [True, True], admitted))
    sample(batch, mixed, 5, 6)
    decode = step(batch, plan_of([0, 1], [1, 1], [True, True]))
    for flat in (mixed, decode, decode.padded(4, 2)):
        arrays = [getattr(flat, field.name) for field in fields(FlatBatch)]
        assert {array.dtype for array in (*arrays, batch.block_table)} == {np.dtype(np.int32)}


def test_decoding_takes_the_sampled_token_and_goes_on_in_a_new_block() -> None:
    batch = PersistentBatch(max_num_seqs=4, max_model_len=16, block_size=4)
    admitted = [admission(2, 4, 0, [3]), admission(0, 2, 0, [1])]
    first = step(batch, plan_of([2, 0], [4, 2], [True, True], admitted))
    sample(batch, first, 77, 88)
    flat = step(batch, plan_of([2, 0], [1, 1], [True, True], grown=((2, 1, 0),)))
    assert flat.token_ids.tolist() == [77, 88]
    assert flat.positions.tolist() == [4, 2]
    assert flat.slots.tolist() == [0, 6]
    assert flat.query_start_loc.tolist() == [0, 1, 2]
    assert flat.seq_lens.tolist() == [5, 3]
    assert flat.logits_indices.tolist() == [0, 1]


def test_only_rows_that_reach_their_last_token_sample() -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=32, block_size=4)
    admitted = [admission(0, 9, 0, [4, 5]), admission(1, 2, 0, [6])]
    flat = step(batch, plan_of([0, 1], [8, 2], [False, True], admitted))
    assert flat.logits_indices.tolist() == [9] and flat.sample_rows.tolist() == [1]
    sample(batch, flat, 50)
    flat = step(batch, plan_of([0, 1], [1, 1], [True, True], grown=((0, 2, 7),)))
    assert flat.token_ids.tolist() == [8, 50]
    assert flat.slots.tolist() == [28, 26]


def test_one_token_chunks_of_a_prompt_do_not_sample() -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=8, block_size=4)
    admitted = [admission(0, 3, 0, [0]), admission(1, 1, 0, [1])]
    flat = step(batch, plan_of([0, 1], [1, 1], [False, True], admitted))
    assert flat.logits_indices.tolist() == [1] and flat.sample_rows.tolist() == [1]


def test_a_row_may_be_released_and_admitted_in_one_plan() -> None:
    batch = PersistentBatch(max_num_seqs=1, max_model_len=16, block_size=4)
    step(batch, plan_of([0], [10], [True], [admission(0, 10, 0, [0, 1, 2])]))
    again = admission(0, 3, 0, [5])
    flat = step(batch, plan_of([0], [3], [True], [again], released=[0]))
    assert flat.slots.tolist() == [20, 21, 22]
    assert flat.seq_lens.tolist() == [3]
    sample(batch, flat, 9)
    assert batch.token_ids[0, :4].tolist() == [0, 1, 2, 9]
    assert batch.num_tokens[0] == 4 and batch.num_prompt_tokens[0] == 3


def test_a_token_that_a_step_in_flight_samples_is_named_by_its_row() -> None:
    batch = PersistentBatch(max_num_seqs=3, max_model_len=16, block_size=4)
    admitted = [admission(2, 3, 0, [0]), admission(1, 5, 0, [1, 2])]
    first = step(batch, plan_of([2, 1], [3, 4], [True, False], admitted))
    tenancy = batch.expect(first.sample_rows)
    mixed = step(batch, plan_of([2, 1], [1, 1], [True, True]))
    assert mixed.token_ids.tolist() == [-3, 1004]
    assert mixed.sample_positions.tolist() == [4, 5]
    later = batch.expect(mixed.sample_rows)
    batch.fill(first.sample_rows, first.sample_positions, int32(70), tenancy)
    decode = step(batch, plan_of([2, 1], [1, 1], [True, True], grown=((2, 1, 3),)))
    assert decode.token_ids.tolist() == [-3, -2]
    batch.fill(mixed.sample_rows, mixed.sample_positions, int32(71, 72), later)
    assert batch.token_ids[2, 3:5].tolist() == [70, 71] and batch.token_ids[1, 5] == 72


def test_tokens_for_a_request_that_has_left_its_row_are_dropped() -> None:
    batch = PersistentBatch(max_num_seqs=1, max_model_len=16, block_size=4)
    first = step(batch, plan_of([0], [3], [True], [admission(0, 3, 0, [0])]))
    tenancy = batch.expect(first.sample_rows)
    batch.apply(plan_of([0], [6], [True], [admission(0, 6, 0, [1, 2])], released=[0]))
    batch.fill(first.sample_rows, first.sample_positions, int32(99), tenancy)
    assert batch.token_ids[0, :6].tolist() == [0, 1, 2, 3, 4, 5] and batch.num_known[0] == 6


def test_a_decode_step_is_filled_up_with_the_padding_row() -> None:
    batch = PersistentBatch(max_num_seqs=5, max_model_len=16, block_size=4)
    admitted = [admission(3, 2, 1, [6]), admission(0, 3, 2, [2]), admission(1, 2, 1, [4])]
    flat = step(batch, plan_of([3, 0, 1], [1, 1, 1], [True, True, True], admitted))
    padded = flat.padded(5, batch.padding_row)
    assert padded.is_decode and padded.all_sample
    assert padded.token_ids.tolist() == [3001, 2, 1001, 0, 0]
    assert padded.positions.tolist() == [1, 2, 1, 0, 0]
    assert padded.slots.tolist() == [25, 10, 17, -1, -1]
    assert padded.seq_lens.tolist() == [2, 3, 2, 1, 1]
    assert padded.rows.tolist() == padded.sample_rows.tolist() == [3, 0, 1, 5, 5]
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5]
    assert padded.sample_positions.tolist() == [2, 3, 2, 0, 0]


def test_padding_behind_the_tokens_leaves_the_requests_as_they_are() -> None:
    batch = PersistentBatch(max_num_seqs=5, max_model_len=16, block_size=4)
    admitted = [admission(3, 4, 1, [6]), admission(0, 3, 2, [2])]
    flat = step(batch, plan_of([3, 0], [3, 1], [True, True], admitted))
    padded = flat.with_tokens(6)
    assert padded.token_ids.tolist() == [3001, 3002, 3003, 2, 0, 0]
    assert padded.positions.tolist() == [1, 2, 3, 2, 0, 0]
    assert padded.slots.tolist() == [25, 26, 27, 10, -1, -1]
    for name in ("query_start_loc", "seq_lens", "rows", "logits_indices", "sample_rows"):
        assert getattr(padded, name) is getattr(flat, name)


def test_a_step_of_padding_has_the_tokens_that_were_asked_for() -> None:
    flat = padding_step(np.array([1, 3, 2]), 7)
    assert flat.positions.tolist() == [0, 0, 1, 0, 1, 2]
    assert flat.query_start_loc.tolist() == [0, 1, 3, 6]
    assert flat.seq_lens.tolist() == [1, 2, 3]
    assert flat.logits_indices.tolist() == [0, 2, 5]
    assert set(flat.slots) == {-1} and set(flat.rows) == set(flat.sample_rows) == {7}
