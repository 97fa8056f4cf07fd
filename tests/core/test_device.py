"""From the host to a device and back."""

import numpy as np
import pytest
import torch

from rackmount.device import arrival, await_fetched, fetch, upload, upload_into


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3), np.zeros(0, np.float32)])
def test_on_a_cpu_the_tensor_is_the_array(array: np.ndarray) -> None:
    tensor = upload(array, torch.device("cpu"))
    assert tensor.numpy().dtype == array.dtype
    assert tensor.tolist() == array.tolist()
    assert tensor.data_ptr() == torch.from_numpy(array).data_ptr()


def test_on_a_cpu_all_is_there_at_once() -> None:
    device = torch.device("cpu")
    target = torch.zeros(3, dtype=torch.int32)
    upload_into(target, np.array([1, 2, 3], np.int32))
    assert target.tolist() == [1, 2, 3]
    assert fetch(target) is target
    await_fetched(device)
    assert arrival(device) is None
