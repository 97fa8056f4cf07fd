"""From the host to a device."""

import numpy as np
import pytest
import torch

from rackmount.device import upload


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3), np.zeros(0, np.float32)])
def test_on_a_cpu_the_tensor_is_the_array(array: np.ndarray) -> None:
    tensor = upload(array, torch.device("cpu"))
    assert tensor.numpy().dtype == array.dtype
    assert tensor.tolist() == array.tolist()
    assert tensor.data_ptr() == torch.from_numpy(array).data_ptr()
