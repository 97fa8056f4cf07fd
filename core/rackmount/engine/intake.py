"""Prompts and options, as people give them, to requests and the sequences that collect answers."""

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any

import numpy as np

from rackmount.config import EngineConfig
from rackmount.engine.group import Group
from rackmount.engine.sequence import Sequence
from rackmount.sampling.grammars import Grammars
from rackmount.sampling.params import SamplingParams
from rackmount.sampling.request import SamplingRequest
from rackmount.scheduling.admission import check_request
from rackmount.scheduling.config import SchedulerConfig
from rackmount.scheduling.request import Request
from rackmount.text.prompts import Prompt, encode, encode_bad_words, eos_ids, normalize_prompts
from rackmount_registry.checkpoint import Checkpoint
from rackmount_registry.errors import CheckpointError, ConfigError, RequestError
from rackmount_registry.plugins import PluginManager
from rackmount_registry.sampling.random import child_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Intake:
    """Makes the requests of one engine, whose ids are never used again.

    Args:
        tokenizer: None where the model has none; prompts are token ids then.
        checkpoint: for what it says of sampling and of the tokens that end a sequence.
        limits: of the engine core; a request that breaks one is refused here.
        config: its `seed` is where the seeds of requests without one come from.
        manager: for the grammar backend.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        checkpoint: Checkpoint,
        limits: SchedulerConfig,
        config: EngineConfig,
        manager: PluginManager,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.default_sampling_params = _recommended(checkpoint.generation_config)
        """What the model's generation_config.json recommends, else `SamplingParams()`."""
        named = eos_ids(tokenizer, checkpoint.generation_config, checkpoint.config)
        # Files name -1 for none, or ids of a larger vocabulary, which are never sampled.
        self.eos_token_ids = named.intersection(range(limits.vocab_size))
        self._ids = itertools.count()
        self._seeds = np.random.default_rng(config.seed)
        self.grammars = Grammars(config, manager, lambda: self.tokenizer, limits.vocab_size)

    def encode(
        self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of one prompt; RequestError as `text.prompts.encode` has it."""
        return encode(
            prompt,
            self.tokenizer,
            vocab_size=self.limits.vocab_size,
            max_model_len=self.limits.max_model_len,
            chat_template_kwargs=chat_template_kwargs,
        )

    def prepare_all(
        self,
        prompts: Prompt | Several[Prompt],
        params: SamplingParams | Several[SamplingParams] | None,
        priority: int,
        cache_salt: str | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> list[Group]:
        """A group for each prompt. In a batch a refused one has its error.

        Raises:
            ValueError: the only prompt is refused, or what is said for all.
        """
        rows, single = normalize_prompts(prompts)
        each = self._each(params, len(rows))
        _check_types(priority, cache_salt)
        groups = []
        for index, (prompt, wanted) in enumerate(zip(rows, each, strict=True)):
            try:
                ids = self.encode(prompt, chat_template_kwargs)
                groups.append(self._group(ids, wanted, index, priority, cache_salt))
            except ValueError as error:
                if single:
                    raise
                groups.append(Group(prompt_index=index, error=error))
        return groups

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        cache_salt: str | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> Group:
        """The group of one prompt. ValueError where it is refused."""
        _check_types(priority, cache_salt)
        (wanted,) = self._each(params, 1)
        ids = self.encode(prompt, chat_template_kwargs)
        return self._group(ids, wanted, 0, priority, cache_salt)

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

    def _group(
        self,
        ids: list[int],
        params: SamplingParams,
        index: int,
        priority: int,
        cache_salt: str | None,
    ) -> Group:
        """The `n` sequences of a prompt, and their requests."""
        params.validate_for(self.limits.vocab_size, eos_token_ids=self.eos_token_ids)
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        stop_ids = params.stop_ids(self.eos_token_ids)
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            raise ConfigError("stop strings and bad words need a tokenizer, and the model has none")
        bad_words = encode_bad_words(params.bad_words or (), self.tokenizer)
        end_ids = self._end_ids(params) if params.grammar else frozenset[int]()
        # Where a grammar has nothing to add, its answer ends below `min_tokens`: its mask knows.
        min_tokens = 0 if params.grammar else params.min_tokens
        group = Group(prompt_index=index)
        for number in range(params.n):
            name = f"{next(self._ids)}"
            request = Request(
                request_id=name,
                prompt_token_ids=np.array(ids, np.int32),
                max_tokens=params.max_tokens or self.limits.max_model_len,
                stop_ids=stop_ids,
                min_tokens=min_tokens,
                priority=priority,
                cache_salt=cache_salt,
                use_cached_prefix=params.prompt_logprobs is None,
                sampling=SamplingRequest(
                    params=params,
                    seed=child_seed(seed, number),
                    bad_words_ids=bad_words,
                    stop_ids=stop_ids,
                    end_ids=end_ids,
                ),
            )
            check_request(request, self.limits)
            sequence = Sequence(name, index, number, ids, params, self.tokenizer)
            group.members.append((request, sequence))
        return group

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        """The stop ids that end an answer under a grammar. RequestError for a grammar that no
        answer can be held to, or that nothing ends."""
        assert params.grammar is not None
        self.grammars.check(params.grammar)
        assert self.tokenizer is not None, "checked with the grammar"
        added = self.tokenizer.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special}
        own = special.intersection(params.stop_token_ids or ())
        end_ids = own.union(() if params.ignore_eos else self.eos_token_ids)
        if not end_ids:
            raise RequestError(
                "grammar: no token ends the answer; it needs the model's end of sequence "
                "(ignore_eos=False), or a special token in stop_token_ids"
            )
        return frozenset(end_ids)


def _check_types(priority: object, cache_salt: object) -> None:
    """TypeError, or ValueError for a salt that is no Unicode, here and not in a later step."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority={priority!r} must be an integer; lower goes first")
    if not isinstance(cache_salt, str | None):
        raise TypeError(f"cache_salt={cache_salt!r} must be a str or None")
    (cache_salt or "").encode()


def _recommended(generation_config: Mapping[str, Any]) -> SamplingParams:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {n: v for n in names if (v := generation_config.get(n)) is not None}
    if generation_config.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return SamplingParams(**given)
    except (TypeError, ConfigError) as error:
        raise CheckpointError(f"generation_config.json: {error}") from error
