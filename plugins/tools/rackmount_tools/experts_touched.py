"""How many experts a decode step really touches: what its floor has to count with, since routing is
rarely as even as chance."""

from itertools import pairwise

import torch

from rackmount import Engine
from rackmount_registry.nn import Experts
from rackmount_tools.loads import Prompts
from rackmount_tools.runs import greedy

NUM_STEPS = 16


def distinct_experts(engine: Engine, prompts: Prompts, max_tokens: int) -> list[float]:
    """For each layer of experts the number of them that a step with all requests in it touches,
    the mean over some steps of answers of `max_tokens` tokens. Empty without such steps, for a
    model without experts, and with ranks in processes of their own.
    """
    layers = [each for each in engine.rack.draft.sockets if isinstance(each, Experts)]
    if not layers or engine.rack.executor.name != "in-process":
        return []
    begun: set[int] = set()
    loads: list[torch.Tensor] = []
    for chunk in engine.stream(prompts, greedy(max_tokens)):
        begun.add(chunk.prompt_index)
        if chunk.finish_reason is not None or len(loads) > NUM_STEPS:
            break
        if len(begun) == len(prompts) and chunk.prompt_index == 0:
            # A step ahead of the chunk, if one is in flight: then all of these are.
            loads.append(torch.stack([layer.state.load for layer in layers]).cpu())
    touched = [(later > earlier).sum(-1) for earlier, later in pairwise(loads)]
    return torch.stack(touched).double().mean(0).tolist() if touched else []
