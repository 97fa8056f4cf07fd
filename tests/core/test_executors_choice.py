"""Which executor is chosen for how many ranks."""

import pytest
from tests.helpers.mounting import plugins

from rackmount.executors.choice import choose_executor
from rackmount_registry.errors import SelectionError


def test_auto_takes_the_process_itself_for_one_rank_and_a_process_each_for_more() -> None:
    names = [choose_executor(plugins(), "auto", n, frozenset()).name for n in (1, 2, 8)]
    assert names == ["in-process", "multiprocess", "multiprocess"]
    assert choose_executor(plugins(), "external", 4, frozenset()).name == "external"
    with pytest.raises(SelectionError, match="fewer than 4 ranks; choose external, multiprocess"):
        choose_executor(plugins(), "in-process", 4, frozenset())
