"""Chooses the tokens of each step and gives them KV blocks.

There are no phases: a request is `num_computed` chasing `num_tokens`, and a step moves it closer
by as many tokens as the budget leaves. Prompt, chunk of a prompt, decoding, prefix hit and
recomputing after a preemption are that one path.

`schedule` counts a step as computed at once and `update` brings its tokens, so that the next step
may be scheduled in between. Rows and blocks that a request leaves meanwhile are given away only
when no step in flight can touch them.
"""

import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from rackmount.scheduling.admission import check_request, max_length
from rackmount.scheduling.block_pool import Block, BlockPool
from rackmount.scheduling.config import SchedulerConfig
from rackmount.scheduling.plan import Growth, RowAdmission, StepPlan
from rackmount.scheduling.prefix_cache import PrefixCache
from rackmount.scheduling.ranges import spread
from rackmount.scheduling.request import FinishReason, Request, RequestState
from rackmount.scheduling.request_table import NEVER, RequestTable
from rackmount.scheduling.step_output import SchedulerStats, StepOutput
from rackmount.scheduling.stop_tokens import StopTokens
from rackmount_registry.errors import RequestError

NO_GROWTH = Growth(
    rows=np.empty(0, np.int32), columns=np.empty(0, np.int32), block_ids=np.empty(0, np.int32)
)
"""Of most steps."""


@dataclass(slots=True)
class _InFlight:
    """A step between `schedule` and `update`, in terms of the table."""

    plan: StepPlan
    rows: np.ndarray
    ends: np.ndarray
    """Computed tokens of each row after the step."""
    sample_rows: np.ndarray
    sample_positions: np.ndarray
    leaving: list[Request] = field(default_factory=list)
    """Requests whose row and blocks become free with this step's end."""


class _Short(NamedTuple):
    """Running rows that lack blocks for what they would compute."""

    places: np.ndarray
    """Among the rows."""
    columns: np.ndarray
    """Blocks that each has."""
    needs: np.ndarray
    """Blocks that each lacks."""


class Scheduler:
    """Owns the queue, the running requests and the blocks. Not thread-safe.

    Args:
        totals: the counters go on from these, of a scheduler that this one takes over from.
    """

    def __init__(self, config: SchedulerConfig, totals: SchedulerStats | None = None) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._prefix_cache = PrefixCache(self.pool, config.block_size)
        self._table = RequestTable(config.max_num_seqs, config.max_model_len, config.block_size)
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        """By `Request.order`."""
        self._running = np.empty(0, np.intp)
        """Rows, by their requests' order too."""
        self._in_flight: deque[_InFlight] = deque()
        self._released: list[int] = []
        """Rows that the worker does not yet know to be free."""
        self._stop_tokens = StopTokens(config.vocab_size)
        self._turned_away: tuple[Request | None, int] = (None, 0)
        """The head of the queue when blocks last lacked for it, and how many it takes."""
        self._num_arrivals = 0
        self.totals = totals or SchedulerStats()
        """Its counters alone are kept."""

    @property
    def has_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def has(self, request_id: str) -> bool:
        """Whether that request waits or runs."""
        return request_id in self._requests

    @property
    def request_ids(self) -> list[str]:
        """Of the requests that wait or run."""
        return list(self._requests)

    @property
    def stats(self) -> SchedulerStats:
        return replace(
            self.totals,
            num_running=self._running.size,
            num_waiting=len(self._waiting),
            kv_usage=self.pool.usage,
        )

    def add(self, request: Request) -> None:
        """Queues a request. ValueError for one that can never run, or whose id is in use."""
        check_request(request, self.config)
        if request.request_id in self._requests:
            raise RequestError(
                f"request id {request.request_id!r} is in use; unfinished requests must differ"
            )
        rank = request.priority if self.config.policy == "priority" else 0
        request.order = (rank, self._num_arrivals)
        request.queued_at = time.monotonic()
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._stop_tokens.hold(request.stop_ids)
        insort(self._waiting, request, key=_order)

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """Ends a request at any time, in flight or not; None if it is not (or no longer) here."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.state is RequestState.RUNNING:
            self._leave(request)
        else:
            del self._waiting[bisect_left(self._waiting, request.order, key=_order)]
        self._stop_tokens.drop(request.stop_ids)
        request.state = RequestState.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        return request

    def reset_prefix_cache(self) -> int:
        """Forgets every cached block, as after a change of weights; gives how many there were.

        Safe at any time. What running requests compute after it builds on KV from before it, so
        it stays unshared.
        """
        self._table.publish_at[self._running] = NEVER
        return self.pool.forget_all()

    def schedule(self) -> StepPlan | None:
        """The next step; None when there is nothing to compute before an update or an arrival."""
        alone = not self.config.enable_mixed_steps and self._prompts_fill_a_step()
        if alone and (plan := self._schedule(prompts_only=True)):
            return plan
        return self._schedule(prompts_only=False)

    def _prompts_fill_a_step(self) -> bool:
        """Whether prompts that are here, and may begin, take the whole budget of a step. Those that
        do not are better computed beside what decodes."""
        table, rows, budget = self._table, self._running, self.config.max_num_batched_tokens
        prefilling = rows[table.prefills(rows)]
        if not prefilling.size and not self._waiting:
            return False
        most = self.config.long_prefill_token_threshold or budget
        left = table.num_tokens[prefilling] - table.num_computed[prefilling]
        found = int(np.minimum(left, most).sum())
        turned_away, num_taken = self._turned_away
        for request in islice(self._waiting, len(table.free_rows)):
            if request is turned_away and not self.pool.can_allocate(num_taken):
                break
            if found >= budget:
                break
            num_cached = len(self._hits(request, request.token_ids)) * self.config.block_size
            found += min(request.num_tokens - num_cached, most)
        return found >= budget

    def _hits(self, request: Request, token_ids: np.ndarray) -> list[Block]:
        """Cached blocks that the request, which waits with these tokens, may begin with."""
        if not self.config.enable_prefix_caching or not request.use_cached_prefix:
            return []
        return self._prefix_cache.match(request, token_ids)

    def _schedule(self, *, prompts_only: bool) -> StepPlan | None:
        table, budget = self._table, self.config.max_num_batched_tokens
        rows = self._running
        starts = table.num_computed[rows]
        counts = np.minimum(table.num_tokens[rows], table.max_computed[rows]) - starts
        if self.config.long_prefill_token_threshold:
            np.minimum(counts, self.config.long_prefill_token_threshold, out=counts)
        if prompts_only:
            counts[~table.prefills(rows)] = 0
        if int(counts.sum()) > budget:
            counts = np.clip(budget - (np.cumsum(counts) - counts), 0, counts)
        short = self._short(rows, starts, counts)
        if prompts_only and not self.pool.can_allocate(int(short.needs.sum()) + rows.size):
            return None  # decoding may need what is left: the usual rules say who goes on
        if self._in_flight and not self.pool.can_allocate(int(short.needs.sum())):
            # A preemption would free nothing yet, and who lacks blocks must not be overtaken by who
            # needs none: what is in flight ends first.
            return None
        growth, counts = self._grow(rows, counts, short)
        admitted: list[RowAdmission] = []
        if counts.size < rows.size:  # after a preemption nobody enters: it would be the next victim
            rows, starts = rows[: counts.size], starts[: counts.size]
        elif self._waiting:
            spared = self._reserve(rows) if prompts_only else None
            admitted, new_counts = self._admit(budget - int(counts.sum()), spared)
            if admitted:
                rows = np.append(rows, [entry.row for entry in admitted])
                starts = np.append(starts, [entry.num_computed_tokens for entry in admitted])
                counts = np.append(counts, new_counts)
        if np.count_nonzero(counts) < rows.size:
            active = counts > 0
            rows, starts, counts = rows[active], starts[active], counts[active]
        if not rows.size:
            return None
        total = int(counts.sum())
        if total > rows.size > 1:
            order = np.argsort(counts > 1, kind="stable")
            rows, starts, counts = rows[order], starts[order], counts[order]
        plan = StepPlan(
            released=self._released,
            admitted=admitted,
            grown=[growth],
            rows=rows.astype(np.int32),
            num_tokens=counts.astype(np.int32),
            samples=starts + counts == table.num_tokens[rows],
            total_num_tokens=total,
        )
        self._released = []
        self._launch(plan, rows, starts + counts)
        return plan

    def update(self, plan: StepPlan, token_ids: np.ndarray) -> StepOutput:
        """Ends the oldest step in flight, with the token of each row that samples, in order."""
        step = self._in_flight.popleft()
        assert step.plan is plan, "steps end in the order in which they were scheduled"
        table = self._table
        rows, positions = step.sample_rows, step.sample_positions
        sampled = np.asarray(token_ids, np.int64)
        assert sampled.size == rows.size, f"{sampled.size} tokens for {rows.size} rows"
        computed_rows, ends = step.rows, step.ends
        if step.leaving or self._in_flight:  # what was sampled for a request that left is dropped
            live = table.live[rows]
            rows, positions, sampled = rows[live], positions[live], sampled[live]
            live = table.live[computed_rows]
            computed_rows, ends = computed_rows[live], ends[live]
        table.token_ids[rows, positions] = sampled
        self._publish(computed_rows, ends)
        self.totals.total_sampled_tokens += rows.size
        output = StepOutput(requests=table.requests[rows].tolist(), token_ids=sampled, finished=[])
        self._stop(output, positions + 1, positions == table.max_computed[rows])
        for request in step.leaving:
            self._give_back(request)
        return output

    def fail(self, plan: StepPlan) -> list[Request]:
        """Ends the oldest step in flight, which broke: its requests, given back, end as "error"."""
        step, table = self._in_flight[0], self._table
        requests: list[Request] = table.requests[step.rows[table.live[step.rows]]].tolist()
        for request in requests:
            self.finish(request.request_id, "error")
        self.update(plan, np.zeros(step.sample_rows.size, np.int64))
        return requests

    def _short(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> _Short:
        """Which of `rows` lack blocks for their next `counts` tokens."""
        block_size, capacity = self.config.block_size, self._table.capacity
        places = (starts + counts > capacity[rows]).nonzero()[0]
        columns = capacity[rows[places]] // block_size
        needs = -(-(starts[places] + counts[places]) // block_size) - columns
        return _Short(places, columns, needs)

    def _reserve(self, rows: np.ndarray) -> int:
        """Blocks that running requests will need: those of their known tokens, and one each."""
        table, block_size = self._table, self.config.block_size
        missing = -(-table.num_tokens[rows] // block_size) - table.capacity[rows] // block_size
        return int(np.maximum(missing, 0).sum()) + rows.size

    def _grow(
        self, rows: np.ndarray, counts: np.ndarray, lacking: _Short
    ) -> tuple[Growth, np.ndarray]:
        """Gives running rows the blocks for their next `counts` tokens; gives the counts that stay.

        Where blocks lack, rows are preempted from the end of the order: they leave `_running`, and
        the counts are fewer. Then no step may be in flight.
        """
        table, block_size = self._table, self.config.block_size
        short, columns, needs = lacking
        if not short.size:
            return NO_GROWTH, counts
        while not self.pool.can_allocate(total := int(needs.sum())):
            self._preempt(table.requests[int(self._running[-1])])
            kept = int(np.count_nonzero(short < self._running.size))
            short, columns, needs = short[:kept], columns[:kept], needs[:kept]
        blocks = self.pool.allocate(total)
        short_rows = rows[short]
        table.capacity[short_rows] += needs * block_size
        grown, columns = spread(short_rows, columns, needs)
        for request, block in zip(table.requests[grown].tolist(), blocks, strict=True):
            request.blocks.append(block)
        growth = Growth(
            rows=grown.astype(np.int32),
            columns=columns.astype(np.int32),
            block_ids=np.array([block.block_id for block in blocks], np.int32),
        )
        return growth, counts[: self._running.size]

    def _admit(self, budget: int, spared: int | None) -> tuple[list[RowAdmission], list[int]]:
        """Moves waiting requests into free rows, in order, until one lacks blocks: those for the
        tokens that it computes in this step; or, where `spared` blocks are left to others, for its
        whole prompt and one more.

        Also gives how many tokens each of them computes in this step.
        """
        config, pool = self.config, self.pool
        admitted: list[RowAdmission] = []
        counts: list[int] = []
        while self._waiting and budget and self._table.free_rows:
            request = self._waiting[0]
            turned_away, num_taken = self._turned_away
            if request is turned_away and not pool.can_allocate(num_taken):
                break  # no look at its prefix: every step would pay for the length of it
            token_ids = request.token_ids
            hits = self._hits(request, token_ids)
            num_computed = len(hits) * config.block_size
            count = min(token_ids.size - num_computed, budget)
            if config.long_prefill_token_threshold:
                count = min(count, config.long_prefill_token_threshold)
            num_new = -(-(num_computed + count) // config.block_size) - len(hits)
            num_taken = num_new + sum(not block.ref_count for block in hits)
            later = 0
            if spared is not None:
                later = -(-token_ids.size // config.block_size) - len(hits) - num_new + 1
                if not pool.can_allocate(num_taken + later + spared):
                    break
                spared += later
            elif not pool.can_allocate(num_taken):
                self._turned_away = request, num_taken
                break
            del self._waiting[0]
            pool.touch(hits)
            request.blocks = hits + pool.allocate(num_new)
            admitted.append(self._enter(request, token_ids, num_computed))
            counts.append(count)
            budget -= count
            if config.enable_prefix_caching and request.use_cached_prefix:
                self.totals.total_prefix_queries += token_ids.size
                self.totals.total_prefix_hits += num_computed
        return admitted, counts

    def _enter(self, request: Request, token_ids: np.ndarray, num_computed: int) -> RowAdmission:
        """Puts a request, with its blocks, into a row."""
        config, table = self.config, self._table
        row = table.occupy(request, token_ids)
        table.num_computed[row] = num_computed
        table.max_computed[row] = max_length(request, config) - 1
        table.capacity[row] = len(request.blocks) * config.block_size
        caching = config.enable_prefix_caching
        table.publish_at[row] = num_computed + config.block_size if caching else NEVER
        place = bisect_right(
            self._running, request.order, key=lambda other: table.requests[int(other)].order
        )
        self._running = np.insert(self._running, place, row)
        request.row, request.state = row, RequestState.RUNNING
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_computed
            request.started_at = time.monotonic()
        return RowAdmission(
            row=row,
            request_id=request.request_id,
            token_ids=token_ids,
            num_prompt_tokens=request.prompt_token_ids.size,
            num_computed_tokens=num_computed,
            block_ids=[np.array([block.block_id for block in request.blocks], np.int32)],
            sampling=request.sampling,
        )

    def _launch(self, plan: StepPlan, rows: np.ndarray, ends: np.ndarray) -> None:
        """Counts a step as computed, each token that it will sample included."""
        table = self._table
        sample_rows = rows[plan.samples]
        positions = table.num_tokens[sample_rows]
        table.num_tokens[sample_rows] = positions + 1
        table.num_computed[rows] = ends
        self._in_flight.append(_InFlight(plan, rows, ends, sample_rows, positions))
        self.totals.total_computed_tokens += plan.total_num_tokens

    def _publish(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Lets the blocks that a finished step filled be found by others."""
        table, block_size = self._table, self.config.block_size
        due = (ends >= table.publish_at[rows]).nonzero()[0]
        if not due.size:
            return
        rows, num_full = rows[due], ends[due] // block_size
        firsts = table.publish_at[rows] // block_size - 1
        table.publish_at[rows] = (num_full + 1) * block_size
        rows, indices = spread(rows, firsts, num_full - firsts)
        contents = table.token_blocks[rows, indices].tobytes()
        self._prefix_cache.publish(table.requests[rows].tolist(), indices.tolist(), contents)

    def _stop(self, output: StepOutput, lengths: np.ndarray, at_limit: np.ndarray) -> None:
        """Ends the requests whose new token is a stop token, or the last one that they may have."""
        ends = self._stop_tokens.marks[output.token_ids] | at_limit
        for place in ends.nonzero()[0].tolist():
            request, token_id = output.requests[place], int(output.token_ids[place])
            num_output = int(lengths[place]) - request.prompt_token_ids.size
            if token_id in request.stop_ids and num_output >= request.min_tokens:
                self.finish(request.request_id, "stop", token_id)
            elif at_limit[place]:
                self.finish(request.request_id, "length")
            else:
                continue
            output.finished.append(request)

    def _preempt(self, request: Request) -> None:
        """Takes everything from a request and queues it again, to be recomputed."""
        assert not self._in_flight, "its last token is not known yet"
        self._leave(request)
        request.state = RequestState.WAITING
        insort(self._waiting, request, key=_order)
        self.totals.total_preemptions += 1

    def _leave(self, request: Request) -> None:
        """Takes a request out of its row; row and blocks follow when no step in flight has them."""
        row, table = request.row, self._table
        # num_tokens counts what the steps in flight would have sampled for it.
        num_pending = sum(np.count_nonzero(step.sample_rows == row) for step in self._in_flight)
        num_known = int(table.num_tokens[row]) - num_pending
        request.output_token_ids = table.token_ids[
            row, request.prompt_token_ids.size : num_known
        ].copy()
        table.live[row] = False
        self._running = self._running[self._running != row]
        if self._in_flight:
            self._in_flight[-1].leaving.append(request)
        else:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self.pool.free(request.blocks)
        request.blocks = []
        self._released.append(request.row)
        self._table.vacate(request.row)
        request.row = -1


def _order(request: Request) -> tuple[int, int]:
    return request.order
