"""The engine that people call."""

import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from rackmount.config import EngineConfig
from rackmount.engine.core import EngineCore
from rackmount.engine.outputs import RequestOutput, TextChunk
from rackmount.engine.sequence import Sequence
from rackmount.execution.program import Live
from rackmount.loading.locate import locate, open_checkpoint
from rackmount.rack import Rack, draft_rack
from rackmount.sampling.params import SamplingParams
from rackmount.sampling.random import child_seed
from rackmount.sampling.request import SamplingRequest
from rackmount.scheduling.request import Request
from rackmount.scheduling.step_output import SchedulerStats
from rackmount.text.prompts import (
    Prompt,
    encode,
    encode_bad_words,
    eos_ids,
    normalize_prompts,
)
from rackmount_registry.checkpoint import Report, silent
from rackmount_registry.errors import ConfigError
from rackmount_registry.plugins import PluginManager


class Engine:
    """Loads a model and answers prompts, in this process or on the ranks that it starts.

    Args:
        model: an alias ("qwen3-0.6b"), a hub id ("Qwen/Qwen3-0.6B"), or a path to a folder or file.
        manager: plugins; None discovers what is installed.
        report: told of the progress of downloading and loading.
        arguments: those of `EngineConfig`.

    Raises:
        TypeError: an unknown argument; the nearest legal one is named.
        ConfigError, CheckpointError, SelectionError, PluginError: see their texts.
        RankError: a rank failed, at start or later; the engine is down then.
        SystemExit: on the other ranks of an external launch, once rank 0 has closed its engine.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        manager: PluginManager | None = None,
        report: Report = silent,
        **arguments: Any,
    ) -> None:
        self.config = EngineConfig.create(model=str(model), **arguments)
        self.manager = manager or PluginManager.discover()
        self._sequences: dict[str, Sequence] = {}
        self._ids = itertools.count()
        self._seeds = np.random.default_rng(self.config.seed)
        path = locate(model, self.manager, report)
        checkpoint = open_checkpoint(path, self.manager)
        try:
            self.rack: Rack = draft_rack(self.config, checkpoint.config, self.manager)
            self.core = EngineCore(
                path,
                Live(manager=self.manager, rack=self.rack, checkpoint=checkpoint, report=report),
            )
            self.tokenizer = checkpoint.tokenizer(trust_remote_code=self.config.trust_remote_code)
            self._generation_config = dict(checkpoint.generation_config)
            named = eos_ids(self.tokenizer, checkpoint.generation_config, checkpoint.config)
            # Files name -1 for none, or ids of a larger vocabulary, which are never sampled.
            self.eos_token_ids = named.intersection(range(self.rack.draft.vocab_size))
        except BaseException:
            self.close()
            raise
        finally:
            checkpoint.close()

    def generate(
        self,
        prompts: Prompt | Several[Prompt],
        params: SamplingParams | Several[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts, all together, and returns when all are done.

        Args:
            prompts: text, token ids, or chat messages (`{"role", "content"}`); or a list of these.
            params: for all, or one for each prompt; None takes `default_sampling_params`.
            priority: lower goes first under the "priority" policy.
            cache_salt: prefix hits happen only between requests of equal salt.
            chat_template_kwargs: handed to the chat template.

        Returns:
            One output per prompt, in order. In a batch a refused prompt has its error in `error`.

        Raises:
            ValueError: a single prompt that is refused.
        """
        groups = self._admit_all(prompts, params, priority, cache_salt, chat_template_kwargs)
        sequences = _all_of(groups)
        try:
            while any(each.finish_reason is None for each in sequences):
                self._step()
        finally:
            self._drop(sequences)
        return [_output(group) for group in groups]

    def stream(
        self,
        prompts: Prompt | Several[Prompt],
        params: SamplingParams | Several[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[TextChunk]:
        """Answers prompts as `generate` does, chunk by chunk. Closing the iterator aborts what
        still runs.

        Several streams may be read in turn. A refused prompt raises before the first chunk, in a
        batch too.
        """
        groups = self._admit_all(prompts, params, priority, cache_salt, chat_template_kwargs)
        sequences = _all_of(groups)
        for group in groups:
            if isinstance(group, ValueError):
                self._drop(sequences)
                raise group
        chunks = self._chunks(sequences)
        next(chunks)  # so that it has begun: closing it unread aborts too
        return cast(Iterator[TextChunk], chunks)

    def _chunks(self, sequences: list[Sequence]) -> Iterator[TextChunk | None]:
        """None, then the chunks."""
        try:
            yield None
            while True:
                for each in sequences:
                    while each.chunks:
                        yield each.chunks.popleft()
                if all(each.finish_reason is not None for each in sequences):
                    return
                self._step()
        finally:
            self._drop(sequences)

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, else `SamplingParams()`."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        known = {n: self._generation_config.get(n) for n in names}
        given = {name: value for name, value in known.items() if value is not None}
        if self._generation_config.get("do_sample") is False:
            given["temperature"] = 0.0
        return SamplingParams(**given)

    @property
    def stats(self) -> SchedulerStats:
        """Counters of the scheduler."""
        return self.core.stats

    def reset_prefix_cache(self) -> int:
        """Forgets all cached prefixes and returns how many blocks that were."""
        return self.core.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Aborts what runs, ends the ranks and gives the memory back; the engine cannot be used
        afterwards."""
        self._drop(list(self._sequences.values()))
        if hasattr(self, "core"):
            self.core.close()
            del self.core

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _step(self) -> None:
        """One step of the core, for every sequence that runs."""
        for event in self.core.step():
            sequence = self._sequences.get(event.request_id)
            if sequence is None:
                continue
            sequence.take(event)
            if event.finish_reason is None and sequence.finish_reason is not None:
                self.core.finish(event.request_id, "stop", cast(str, sequence.stop_reason))
            if sequence.finish_reason is not None:
                del self._sequences[event.request_id]

    def _admit_all(
        self,
        prompts: Prompt | Several[Prompt],
        params: SamplingParams | Several[SamplingParams] | None,
        priority: int,
        cache_salt: str | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> list[list[Sequence] | ValueError]:
        """For each prompt its sequences, now queued, or the error that refused it."""
        _check_types(priority, cache_salt)
        rows, single = normalize_prompts(prompts)
        each = self._each(params, len(rows))
        # What may raise comes before the first is queued.
        prepared: list[list[tuple[Request, Sequence]] | ValueError] = []
        for index, (prompt, wanted) in enumerate(zip(rows, each, strict=True)):
            try:
                ids = encode(
                    prompt,
                    self.tokenizer,
                    vocab_size=self.rack.draft.vocab_size,
                    max_model_len=self.rack.max_model_len,
                    chat_template_kwargs=chat_template_kwargs,
                )
                prepared.append(self._prepare(ids, wanted, index, priority, cache_salt))
            except ValueError as error:
                prepared.append(error)
        admitted = [
            group if isinstance(group, ValueError) else self._queue(group) for group in prepared
        ]
        if single and isinstance(admitted[0], ValueError):
            raise admitted[0]
        return admitted

    def _each(
        self, params: SamplingParams | Several[SamplingParams] | None, count: int
    ) -> Several[SamplingParams]:
        if params is None:
            params = self.default_sampling_params
        each: Several[Any] = params if isinstance(params, list | tuple) else [params] * count
        for one in each:
            if not isinstance(one, SamplingParams):
                raise TypeError(
                    f"params of type {type(one).__name__}; give SamplingParams, or a list of them"
                )
        if len(each) != count:
            raise ConfigError(
                f"{len(each)} sampling params for {count} prompts; give one, or one for each"
            )
        return each

    def _prepare(
        self,
        ids: list[int],
        params: SamplingParams,
        index: int,
        priority: int,
        cache_salt: str | None,
    ) -> list[tuple[Request, Sequence]]:
        """The `n` sequences of a prompt, and their requests."""
        params.validate_for(self.rack.draft.vocab_size, eos_token_ids=self.eos_token_ids)
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        stop_ids = params.stop_ids(self.eos_token_ids)
        bad_words = (
            encode_bad_words(params.bad_words, self._tokenizer()) if params.bad_words else []
        )
        if params.stop_strings:
            self._tokenizer()
        group = []
        for number in range(params.n):
            name = f"{next(self._ids)}"
            request = Request(
                request_id=name,
                prompt_token_ids=np.array(ids, np.int32),
                max_tokens=params.max_tokens or self.rack.max_model_len,
                stop_ids=stop_ids,
                min_tokens=params.min_tokens,
                priority=priority,
                cache_salt=cache_salt,
                use_cached_prefix=params.prompt_logprobs is None,
                sampling=SamplingRequest(
                    params=params,
                    seed=child_seed(seed, number),
                    bad_words_ids=bad_words,
                    stop_ids=stop_ids,
                ),
            )
            group.append((request, Sequence(name, index, number, ids, params, self.tokenizer)))
        return group

    def _queue(self, group: list[tuple[Request, Sequence]]) -> list[Sequence] | ValueError:
        """Gives a prompt's requests to the core: they are alike, so all are taken, or the first is
        refused."""
        for request, sequence in group:
            try:
                self.core.add(request)
            except ValueError as error:
                return error
            self._sequences[request.request_id] = sequence
        return [sequence for _, sequence in group]

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ConfigError("stop strings and bad words need a tokenizer, and the model has none")
        return self.tokenizer

    def _drop(self, sequences: list[Sequence]) -> None:
        """Aborts those of `sequences` that still run."""
        for sequence in sequences:
            if self._sequences.pop(sequence.request_id, None) is not None:
                self.core.finish(sequence.request_id, "abort")
                sequence.abort()


def _check_types(priority: object, cache_salt: object) -> None:
    """TypeError, or ValueError for a salt that is no Unicode, here and not in a later step."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority={priority!r} must be an integer; lower goes first")
    if not isinstance(cache_salt, str | None):
        raise TypeError(f"cache_salt={cache_salt!r} must be a str or None")
    (cache_salt or "").encode()


def _all_of(groups: list[list[Sequence] | ValueError]) -> list[Sequence]:
    return [each for group in groups if isinstance(group, list) for each in group]


def _output(group: list[Sequence] | ValueError) -> RequestOutput:
    if isinstance(group, ValueError):
        return RequestOutput(prompt_token_ids=[], error=group)
    first = group[0]
    return RequestOutput(
        prompt_token_ids=first.prompt_token_ids,
        completions=[each.completion() for each in group],
        prompt_logprobs=first.prompt_logprobs if first.params.prompt_logprobs is not None else None,
        num_cached_tokens=first.num_cached_tokens,
    )
