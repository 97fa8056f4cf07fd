"""`rackmount bench kernels --tune`: what is fastest on this GPU, written down by the kernel itself.

Kernels that can be tuned say so by the method `tune`; see
`rackmount_registry.experts.TunableExperts`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rackmount import Rack
from rackmount_registry.descriptors import ExpertKernel
from rackmount_registry.errors import ConfigError
from rackmount_registry.experts import TunableExperts
from rackmount_registry.options import instantiate
from rackmount_registry.plugins import PluginManager
from rackmount_tools.expert_timing import bundle_of, copies_of, inputs_of, kernels_for, layers_of

OPTION = "tuned"
"""Of a kernel that can be tuned: the file."""


def require_gpu(rack: Rack) -> None:
    """Raises ConfigError where there is none to be measured."""
    if rack.device.type != "cuda":
        raise ConfigError(
            f"--tune measures kernels on a GPU, and device={rack.device.type!r}; choose "
            "device='cuda'"
        )
    if not torch.cuda.is_available():
        raise ConfigError("--tune measures kernels on a GPU, and none is there")


def tune_experts(
    rack: Rack,
    manager: PluginManager,
    file: Path,
    tokens: Sequence[int],
    names: list[str],
    seconds: float,
    say: Callable[[str], None],
) -> tuple[Rack, str]:
    """Adds to `file` what one kernel finds for each shape of the model's layers of experts; gives
    the rack with that file, and the kernel's name.

    Raises:
        ConfigError: not exactly one kernel is to be tuned; see also `TunableExperts.tune`.
    """
    layers = [alike[0] for alike in layers_of(rack)]
    name = _only(rack, manager, names)
    kernel = instantiate(manager.find(ExpertKernel, name), rack.options)
    for layer in layers:
        bundle = bundle_of(layer, rack)
        if name not in kernels_for(bundle, rack, manager, []):
            continue
        kernel.tune(
            copies_of(bundle, rack.device),
            {num: inputs_of(layer, bundle, num, rack) for num in tokens},
            file,
            seconds=seconds / len(layers),
            say=say,
        )
    part = (ExpertKernel.kind, name)
    given = {**rack.options.get(part, {}), OPTION: str(file)}
    return replace(rack, options={**rack.options, part: given}), name


def _only(rack: Rack, manager: PluginManager, names: list[str]) -> str:
    """The kernel to be tuned."""
    pairs = (pair for choice in rack.parts.experts.values() for pair in choice.candidates)
    fitting = {pair.first.name for pair in pairs if pair.accepted}
    tunable = sorted(
        name
        for name in fitting
        if isinstance(instantiate(manager.find(ExpertKernel, name), rack.options), TunableExperts)
    )
    asked = [name for name in tunable if not names or name in names]
    if len(asked) != 1:
        raise ConfigError(
            f"--tune is for one expert kernel, and --kernel names {', '.join(names) or 'none'}; "
            f"here, for this model, can be tuned: {', '.join(tunable) or 'none'}"
        )
    return asked[0]
