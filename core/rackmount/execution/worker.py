"""The worker of one device: carries out step plans."""

import gc
from collections import deque

import numpy as np
import torch
from torch import Tensor

from rackmount.device import upload
from rackmount.execution.batch import FlatBatch, PersistentBatch
from rackmount.execution.expert_load import ExpertLoad
from rackmount.execution.graphs import DecodeGraphs, MixedGraphs
from rackmount.execution.memory import free_bytes, num_kv_blocks, require_weights
from rackmount.execution.messages import MAX_IN_FLIGHT
from rackmount.execution.pending import Owner, PendingStep, Sampled, fetch, fetch_logprobs
from rackmount.execution.profile import Profile, profile
from rackmount.execution.runner import Runner
from rackmount.execution.saturation import Saturation, measure
from rackmount.execution.step import PagedStep
from rackmount.rack import Rack
from rackmount.sampling.grammars import Grammars
from rackmount.sampling.logprobs import LogprobTensors, gather_logprobs
from rackmount.sampling.sampler import Sampler
from rackmount.sampling.table import SamplingTable
from rackmount.scheduling.plan import StepPlan
from rackmount_registry.attention import FP8
from rackmount_registry.checkpoint import Checkpoint, Report
from rackmount_registry.errors import ConfigError
from rackmount_registry.mount import assemble, fill, fill_randomly

MAX_PROMPT_LOGITS = 2**24
"""Logits of prompt tokens that are held at once."""


class Worker:
    """Weights, KV cache, persistent batch and sampler of one rank. `room`, then `carve`, come
    before steps."""

    def __init__(
        self, rack: Rack, checkpoint: Checkpoint, report: Report, grammars: Grammars
    ) -> None:
        if rack.device.type == "cuda":
            if not torch.cuda.is_available():
                raise ConfigError(f"device={rack.device}: no GPU is there; choose device='cpu'")
            torch.cuda.set_device(rack.device.index or 0)
            if torch.cuda.memory_allocated():
                gc.collect()  # an engine may have been dropped without being closed
            torch.cuda.empty_cache()  # what an engine before left there is free
        config = rack.config
        self.rack = rack
        parts = rack.parts.load(rack.options)
        require_weights(rack, self._free())
        if rack.device.type == "cpu":  # on a GPU what fits is known when steps have been measured
            num_kv_blocks(rack, self._free() - rack.draft.weight_bytes)
        step = PagedStep(rack.device)
        self.mounted = assemble(
            rack.draft, parts, step, device=rack.device, max_positions=rack.max_model_len
        )
        try:
            self.batch = PersistentBatch(
                max_num_seqs=config.max_num_seqs,
                max_model_len=rack.max_model_len,
                block_size=rack.block_size,
            )
        except MemoryError as error:
            raise ConfigError(
                f"max_num_seqs={config.max_num_seqs} requests of up to {rack.max_model_len} tokens "
                "each are more than the host's memory holds ids of; lower it, or max_model_len"
            ) from error
        self._requests: dict[int, Owner] = {}
        self._prompt_rows: set[int] = set()
        """Rows whose request wants prompt logprobs."""
        self._prompt_chunk = max(1, MAX_PROMPT_LOGITS // rack.draft.vocab_size)
        table = SamplingTable(config.max_num_seqs, rack.draft.vocab_size, rack.device)
        self._sampler = Sampler(table, parts.ops)
        self._grammars = grammars
        self._runner = Runner(rack, self.mounted, step, parts.ops, self.batch)
        self._runner.prepare(table)
        self.weight_bytes_read = 0
        if config.load_format == "dummy":
            fill_randomly(self.mounted, config.seed)
        else:
            self.weight_bytes_read = fill(self.mounted, checkpoint, report)
        self._decode_graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self._unsettled: deque[PendingStep] = deque(maxlen=MAX_IN_FLIGHT)
        """Steps whose tokens the host may not have yet, oldest first."""
        self.profile = Profile(activations=0, graphs=0)

    @torch.inference_mode()
    def room(self) -> int:
        """KV blocks that there is room for; a GPU runs the largest step to find out."""
        if self.rack.device.type == "cuda":
            padding_row, chunk = self.batch.padding_row, self._prompt_chunk
            self.profile = profile(self._runner, self._sampler, padding_row, chunk)
        taken = self.profile.activations + self.profile.graphs
        return num_kv_blocks(self.rack, self._free() - taken)

    def _free(self) -> int:
        free = free_bytes(self.rack.device, self.rack.config.gpu_memory_utilization)
        assert free is not None, f"no {self.rack.device}"
        return free

    @torch.inference_mode()
    def carve(self, num_kv_blocks: int) -> int:
        """Takes a pool of so many blocks, captures what is to be captured, and gives the pool's
        bytes."""
        num_bytes = self._runner.carve(num_kv_blocks)
        if self.rack.captures_graphs:
            self._decode_graphs = DecodeGraphs(self._runner, self._sampler, self.batch.padding_row)
            self._decode_graphs.capture(self.rack.decode_sizes)
            self._mixed_graphs = MixedGraphs(self._runner, self.batch.padding_row)
            self._mixed_graphs.capture(self.rack.mixed_sizes)
            torch.cuda.empty_cache()  # what was run before each capture is not in the profile
        return num_bytes

    @torch.inference_mode()
    def saturation(self) -> tuple[int, Saturation]:
        """Of an FP8 cache, before it is used; see `saturation.measure`."""
        if self.rack.kv_dtype != FP8:
            return 0, []
        return measure(self._runner, self.batch.padding_row)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingStep:
        """Begins one step. Plans come in the order in which they were scheduled."""
        if self.rack.device.type == "cuda":  # the thread, or another engine, may have had another
            torch.cuda.set_device(self.rack.device.index or 0)
        self._apply(plan)
        flat = self.batch.build(plan)
        if self._decode_graphs is not None and flat.is_decode and flat.all_sample:
            pending = self._decode(flat, self._decode_graphs)
        else:
            pending = self._run(plan, flat)
        self._unsettled.append(pending)
        return pending

    def expert_load(self) -> list[ExpertLoad]:
        """Of each layer with experts, in the order of the model. Waits for the device."""
        layers = self.rack.draft.experts
        counts = [layer.state.load.to("cpu", copy=True).numpy() for layer in layers]
        return [ExpertLoad(each.path, load) for each, load in zip(layers, counts, strict=True)]

    def _decode(self, flat: FlatBatch, graphs: DecodeGraphs) -> PendingStep:
        """A captured step. Logprobs are not: few ask for them, and for how many is another."""
        sampler, rows = self._sampler, flat.sample_rows
        graph = graphs.replay(flat)
        self._prepare(flat)
        sampling = graph.plain if sampler.is_plain(rows) else graph.processed
        sampling.graph.replay()
        logprobs = sampler.logprobs(graph.logits, rows, sampling.token_ids)
        return self._pend(flat, sampling.token_ids, logprobs, {})

    def _run(self, plan: StepPlan, flat: FlatBatch) -> PendingStep:
        """A step whose sampling is eager, and the model too where it was not captured."""
        if self._mixed_graphs is not None and self._mixed_graphs.fits(flat):
            of_all = True
            tensors, hidden = self._mixed_graphs.replay(flat)
        else:
            of_all = not self._prompt_rows.isdisjoint(plan.rows.tolist())
            tensors, hidden = self._runner.hidden(flat, of_all=of_all)
        prompts = self._prompt_logprobs(plan, flat, hidden)
        if not flat.sample_rows.size:
            return PendingStep(self.batch, None, prompts, self._mark())
        if of_all:
            hidden = hidden.index_select(0, tensors.logits_indices)
        sampler, rows = self._sampler, flat.sample_rows
        logits = self._runner.logits(hidden)
        self._prepare(flat)
        draw = sampler.draw if sampler.is_plain(rows) else sampler.draw_processed
        token_ids = self._runner.sample(tensors, logits, draw)
        logprobs = sampler.logprobs(logits, rows, token_ids)
        return self._pend(flat, token_ids, logprobs, prompts)

    def _prepare(self, flat: FlatBatch) -> None:
        """Gives the device what the step's sampling needs, while it goes on with the model.

        Where a row needs its history, the host waits for the steps before this one.
        """
        if self._sampler.needs_history(flat.sample_rows):
            for each in self._unsettled:
                each.settle()
        self._sampler.prepare(flat.sample_rows, flat.sample_positions, self.batch.token_ids)

    def _pend(
        self,
        flat: FlatBatch,
        token_ids: Tensor,
        logprobs: LogprobTensors | None,
        prompts: dict[str, tuple[int, int, list[LogprobTensors]]],
    ) -> PendingStep:
        """Sends the step's results to the host."""
        sampled = Sampled(
            rows=flat.sample_rows,
            positions=flat.sample_positions,
            tenancy=self.batch.expect(flat.sample_rows),
            token_ids=fetch(token_ids),
            owners=[self._requests[row] for row in flat.sample_rows.tolist()],
            logprobs=fetch_logprobs(logprobs) if logprobs else None,
        )
        return PendingStep(self.batch, sampled, prompts, self._mark())

    def _mark(self) -> torch.cuda.Event | None:
        """What tells that everything until now has run; None where it has."""
        if self.rack.device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        event.record()
        return event

    def _apply(self, plan: StepPlan) -> None:
        self.batch.apply(plan)
        self._runner.buffers.grow(plan)
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
                grammar=self._grammars.follow(sampling, num_prompt),
            )

    def _prompt_logprobs(
        self, plan: StepPlan, flat: FlatBatch, hidden: Tensor
    ) -> dict[str, tuple[int, int, list[LogprobTensors]]]:
        """For the rows that ask: of every prompt token whose predecessor this step computed, by
        request: its position, how many likely ones are wanted, and the values in pieces."""
        pieces: dict[str, tuple[int, int, list[LogprobTensors]]] = {}
        runner = self._runner
        if not self._prompt_rows:
            return pieces
        for index, row in enumerate(flat.rows.tolist()):
            if row not in self._prompt_rows:
                continue
            request_id, sampling = self._requests[row]
            num = sampling.params.prompt_logprobs or 0
            begin, end = flat.query_start_loc[index : index + 2].tolist()
            first = int(flat.positions[begin]) + 1
            last = min(first + end - begin, int(self.batch.num_prompt_tokens[row]))
            if first >= last:
                continue
            targets = self.batch.token_ids[row, first:last].astype(np.int64)
            chunks = zip(
                torch.split(hidden[begin : begin + last - first], self._prompt_chunk),
                torch.split(upload(targets, self.rack.device), self._prompt_chunk),
                strict=True,
            )
            found = (
                gather_logprobs(runner.ops, np.arange(len(ids)), runner.logits(some), ids, num)
                for some, ids in chunks
            )
            pieces[request_id] = first, num, [fetch_logprobs(each) for each in found]
        return pieces
