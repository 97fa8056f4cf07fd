"""Token dispatcher "local": no tokens move. Every rank holds all tokens and its own experts."""

from torch import Tensor

from rackmount_registry.experts import DispatchContext, ExpertInput


class LocalDispatcher:
    """See `rackmount_registry.experts.TokenDispatcher`. Between several ranks the outputs are
    shares of a sum, which the mount adds."""

    def __init__(self, context: DispatchContext) -> None:
        self._experts = context.local_experts
        self._has_all = self._experts.size == context.num_experts
        self.reduces = context.group.size == 1

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> ExpertInput:
        """The tokens as they are; ids counted from this rank's first expert, -1 for others'."""
        if not self._has_all:
            local = expert_ids - self._experts.start
            mine = (local >= 0) & (local < self._experts.size)
            expert_ids = local.where(mine, -1)
        return ExpertInput(x=x, expert_ids=expert_ids, weights=weights)

    def combine(self, out: Tensor, given: ExpertInput) -> Tensor:
        """The output [T, H] as it is."""
        return out
