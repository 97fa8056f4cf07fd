"""The least time in which the measured device could do what a model cannot do without.

A step takes as long as its weights take to be read, or its products to be computed where that is
more, and then its keys and values to be read. Products with weights of eight bits count at the rate
of that arithmetic, which rounds the tokens too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rackmount_tools.ceilings import Ceilings
from rackmount_tools.costs import ModelCosts
from rackmount_tools.loads import Workload


@dataclass(frozen=True)
class Floors:
    """All in seconds."""

    costs: ModelCosts
    ceilings: Ceilings

    def decode(
        self,
        contexts: Sequence[int] | np.ndarray,
        distinct: Sequence[float] = (),
        chunk: float = 0,
        prompt_len: int = 1,
    ) -> float:
        """A step of one token for each context; its tokens are counted with the new one. `distinct`
        as for `ModelCosts.weight_bytes`. Beside them so many tokens of a prompt of `prompt_len`,
        at the mean of its attention."""
        num_tokens = len(contexts) + round(chunk)
        read = self.costs.weight_bytes(num_tokens, distinct) / self.ceilings.bandwidth
        products = self._products(num_tokens, len(contexts))
        share = chunk / prompt_len
        products += share * self.costs.attention_flops(prompt_len) / self.ceilings.matmul
        return max(read, products) + self.costs.kv_bytes(contexts) / self.ceilings.bandwidth

    def prefill(self, lengths: Sequence[int]) -> float:
        """Whole prompts of these lengths, to their first tokens."""
        costs, rates = self.costs, self.ceilings
        attention = {length: costs.attention_flops(length) for length in set(lengths)}
        products = self._products(sum(lengths), len(lengths))
        products += sum(attention[n] for n in lengths) / rates.matmul
        return max(costs.weight_bytes(sum(lengths)) / rates.bandwidth, products)

    def workload(self, load: Workload, max_num_seqs: int) -> float:
        """Prefill of all prompts, then decode steps that are as full as `max_num_seqs` allows; who
        ends gives its place to the next one."""
        left = np.array(load.output_lens) - 1  # the first token comes with the prefill
        context = np.array([len(prompt) for prompt in load.prompts])
        total = self.prefill(context.tolist())
        while (running := np.flatnonzero(left > 0)[:max_num_seqs]).size:
            context[running] += 1
            left[running] -= 1
            total += self.decode(context[running])
        return total

    def _products(self, num_tokens: int, num_sampled: int) -> float:
        flops = self.costs.flops(num_tokens, num_sampled)
        return sum(count / self.ceilings.rate(form) for form, count in flops.items())
