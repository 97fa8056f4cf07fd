"""Copies to a GPU and back, on streams of their own beside that of the kernels."""

import numpy as np
import pytest
import torch

from rackmount.device import arrival, await_fetched, fetch, upload, upload_into

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
LONG = 10**7
"""Cycles: some milliseconds, far longer than a copy."""
SIZE, NUM_STEPS = 1000, 100


def test_an_upload_is_of_the_array_as_it_was() -> None:
    array = np.arange(SIZE)
    tensor = upload(array, GPU)
    array[:] = 0
    assert tensor.tolist() == list(range(SIZE))


def test_kernels_see_what_was_uploaded_before_them_and_the_host_what_they_left() -> None:
    """As steps do it: into one place, through one place, and the host far ahead."""
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 1000, SIZE, dtype=np.int32) for _ in range(NUM_STEPS)]
    given = torch.empty(SIZE, dtype=torch.int32, device=GPU)
    left = torch.empty_like(given)
    total = torch.zeros_like(given)
    results = []
    torch.cuda._sleep(LONG)
    for step, array in enumerate(arrays):
        upload_into(given, array)
        more = upload(array + 1, GPU)
        torch.cuda._sleep(LONG if step % 10 == 3 else 100)
        total += given
        del more  # its memory is the next one's, once the stream is through
        await_fetched(GPU)
        torch.mul(total, 2, out=left)
        results.append((fetch(left), arrival(GPU)))
    sums = np.cumsum(arrays, axis=0)
    for (found, event), wanted in zip(results, sums, strict=True):
        event.synchronize()
        assert np.array_equal(found.numpy(), 2 * wanted)


def test_uploads_keep_their_memory_until_the_kernels_have_read_it() -> None:
    sums = []
    for step in range(NUM_STEPS):
        torch.cuda._sleep(LONG if step % 20 == 0 else 100)
        sums.append(upload(np.full(SIZE, step, np.int64), GPU).sum())
    assert [int(each) for each in sums] == [SIZE * step for step in range(NUM_STEPS)]


def test_nothing_fetched_may_still_have_something_to_wait_for() -> None:
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * LONG)
    event = arrival(GPU)
    assert event is not None and not event.query()
    event.synchronize()
    assert torch.cuda.current_stream().query()
