"""The worker of one device: carries out step plans."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rackmount.execution.batch import FlatBatch, PersistentBatch
from rackmount.execution.messages import StepResult
from rackmount.execution.step import PagedStep
from rackmount.rack import Rack
from rackmount.sampling.logprobs import LogprobTensors, prompt_logprobs
from rackmount.sampling.request import SamplingRequest, TokenLogprobs
from rackmount.sampling.sampler import Sampler
from rackmount.sampling.table import SamplingTable
from rackmount.scheduling.plan import StepPlan
from rackmount_registry.attention import AttentionBackend, AttentionContext
from rackmount_registry.checkpoint import Checkpoint, Report
from rackmount_registry.errors import ConfigError
from rackmount_registry.mount import assemble, fill
from rackmount_registry.options import instantiate

MAX_PROMPT_LOGITS = 2**24
"""Logits of prompt tokens that are held at once."""


class Worker:
    """Weights, KV cache, persistent batch and sampler of one rank. `carve` comes before steps."""

    def __init__(self, rack: Rack, checkpoint: Checkpoint, report: Report) -> None:
        if rack.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device={rack.device}: no GPU is there; choose device='cpu'")
        config = rack.config
        self.rack = rack
        self._step = PagedStep(rack.device)
        self.mounted = assemble(
            rack.draft,
            rack.parts.load(rack.options),
            self._step,
            device=rack.device,
            max_positions=rack.max_model_len,
        )
        self.weight_bytes_read = fill(self.mounted, checkpoint, report)
        self.batch = PersistentBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=rack.max_model_len,
            block_size=rack.block_size,
        )
        self._requests: dict[int, tuple[str, SamplingRequest]] = {}
        self._prompt_rows: set[int] = set()
        """Rows whose request wants prompt logprobs."""
        self._prompt_chunk = max(1, MAX_PROMPT_LOGITS // rack.draft.vocab_size)
        table = SamplingTable(config.max_num_seqs, rack.draft.vocab_size, rack.device)
        self._sampler = Sampler(table)

    def carve(self, num_kv_blocks: int) -> int:
        """Mounts attention over a pool of so many blocks, and gives its bytes."""
        rack = self.rack
        context = AttentionContext(
            block_size=rack.block_size,
            max_num_seqs=rack.config.max_num_seqs,
            max_num_batched_tokens=rack.config.max_num_batched_tokens,
            max_model_len=rack.max_model_len,
            device=rack.device,
            dtype=rack.dtype,
        )
        choice = rack.attention
        prefill = cast(AttentionBackend, instantiate(choice.prefill, rack.options, context))
        decode = prefill
        if choice.decode is not choice.prefill:
            decode = instantiate(choice.decode, rack.options, context)
        caches = [
            torch.empty(
                prefill.cache_shape(spec, num_kv_blocks), dtype=spec.dtype, device=rack.device
            )
            for spec in rack.draft.cache_specs(rack.dtype)
        ]
        self._step.mount(prefill, decode, caches)
        return sum(cache.nbytes for cache in caches)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step. Plans come in the order in which they were scheduled."""
        self._apply(plan)
        flat = self.batch.build(plan)
        self._step.begin(flat, self.batch.block_tables[0])
        hidden = self.mounted.forward(torch.from_numpy(flat.token_ids).to(self.rack.device))
        prompt_pieces = self._prompt_logprobs(plan, flat, hidden)
        rows = flat.sample_rows
        if not len(rows):
            return StepResult(token_ids=np.empty(0, np.int32), prompt_logprobs=prompt_pieces)
        logits = self.mounted.logits(hidden[torch.from_numpy(flat.logits_indices)])
        out = self._sampler.sample(logits, rows, self.batch.num_tokens[rows], self.batch.token_ids)
        token_ids = out.token_ids.cpu().numpy().astype(np.int32)
        self.batch.append(rows, token_ids)
        valid = out.valid.cpu().numpy()
        return StepResult(
            token_ids=token_ids,
            failed=[self._requests[row][0] for row in rows[~valid].tolist()],
            logprobs=self._token_logprobs(rows, out.logprobs) if out.logprobs else {},
            prompt_logprobs=prompt_pieces,
        )

    def _apply(self, plan: StepPlan) -> None:
        self.batch.apply(plan)
        table = self._sampler.table
        for row in plan.released:
            self._requests.pop(row, None)
            self._prompt_rows.discard(row)
            table.release(row)
        for entry in plan.admitted:
            sampling = entry.sampling
            assert sampling is not None, "every request of an engine samples"
            self._requests[entry.row] = entry.request_id, sampling
            self._prompt_rows.discard(entry.row)  # a step that broke has not told what it released
            if sampling.params.prompt_logprobs is not None:
                self._prompt_rows.add(entry.row)
            ids, num_prompt = entry.token_ids.tolist(), entry.num_prompt_tokens
            table.admit(
                entry.row,
                sampling.params,
                seed=sampling.seed,
                prompt_token_ids=ids[:num_prompt],
                output_token_ids=ids[num_prompt:],
                bad_words_ids=sampling.bad_words_ids,
                stop_ids=sampling.stop_ids,
            )

    def _token_logprobs(
        self, rows: np.ndarray, tensors: LogprobTensors
    ) -> dict[str, TokenLogprobs]:
        owners = [self._requests[row] for row in rows[tensors.rows].tolist()]
        counts = [sampling.params.logprobs or 0 for _, sampling in owners]
        listed = _listed(tensors, counts)
        return {request_id: entry for (request_id, _), entry in zip(owners, listed, strict=True)}

    def _prompt_logprobs(
        self, plan: StepPlan, flat: FlatBatch, hidden: Tensor
    ) -> dict[str, tuple[int, list[TokenLogprobs]]]:
        """For the rows that ask: of every prompt token whose predecessor this step computed."""
        pieces: dict[str, tuple[int, list[TokenLogprobs]]] = {}
        if not self._prompt_rows:
            return pieces
        for index, row in enumerate(plan.rows.tolist()):
            if row not in self._prompt_rows:
                continue
            request_id, sampling = self._requests[row]
            num = sampling.params.prompt_logprobs or 0
            begin, end = flat.query_start_loc[index : index + 2].tolist()
            first = int(flat.positions[begin]) + 1
            last = min(first + end - begin, int(self.batch.num_prompt_tokens[row]))
            if first >= last:
                continue
            targets = torch.from_numpy(self.batch.token_ids[row, first:last].astype(np.int64))
            pieces[request_id] = first, []
            for some, ids in zip(
                torch.split(hidden[begin : begin + last - first], self._prompt_chunk),
                torch.split(targets.to(self.rack.device), self._prompt_chunk),
                strict=True,
            ):
                tensors = prompt_logprobs(self.mounted.logits(some), ids, num)
                pieces[request_id][1].extend(_listed(tensors, [num] * len(ids)))
        return pieces


def _listed(tensors: LogprobTensors, counts: list[int]) -> list[TokenLogprobs]:
    """As plain values: the token itself, and the first `counts[i]` of the most likely ones."""
    columns: tuple[Any, ...] = (
        tensors.token_ids.tolist(),
        tensors.logprobs.tolist(),
        tensors.ranks.tolist(),
    )
    return [
        TokenLogprobs(
            token_id=ids[0],
            logprob=values[0],
            rank=rank,
            top=dict(zip(ids[1 : 1 + count], values[1 : 1 + count], strict=True)),
        )
        for ids, values, rank, count in zip(*columns, counts, strict=True)
    ]
