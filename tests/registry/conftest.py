import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """More threads would only wait for each other over such small tensors."""
    torch.set_num_threads(1)
