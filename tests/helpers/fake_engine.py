"""An engine without a core process: its tokens are told beforehand, all the rest is real."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
from tests.helpers.engines import EOS, NUM_BYTE_IDS, byte_tokenizer
from tests.helpers.mounting import plugins

from rackmount import SamplingParams, SchedulerConfig
from rackmount.config import EngineConfig
from rackmount.engine.core import Event
from rackmount.engine.group import Group
from rackmount.engine.intake import Intake
from rackmount.engine.sequence import Sequence as Answered
from rackmount.execution.expert_load import ExpertLoad
from rackmount.sampling.request import TokenLogprobs
from rackmount.scheduling.step_output import SchedulerStats
from rackmount.serving.answer import Answer, Outlet
from rackmount.serving.errors import EngineDead
from rackmount_server.app import build_app
from rackmount_server.settings import ServerSettings


def successors(prompt: Sequence[int], index: int) -> list[int]:
    """Each byte is answered by the next: "A" by "BCDE..."."""
    return [(prompt[-1] + 1 + step) % 256 for step in range(512)]


class FakeEngine:
    """Answers with the tokens of `script(prompt, index)`, a step a turn of the event loop.

    `go` holds everything back while it is not set; `die` is the core's death.
    """

    def __init__(
        self,
        script: Callable[[Sequence[int], int], list[int]] = successors,
        tokenizer: Any = None,
        max_model_len: int = 256,
        **generation_config: Any,
    ) -> None:
        self.config = EngineConfig.create(model="fake")
        limits = SchedulerConfig(
            num_blocks=256,
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=max_model_len,
            vocab_size=NUM_BYTE_IDS,
        )
        source: Any = SimpleNamespace(
            generation_config=generation_config, config={"eos_token_id": EOS}
        )
        self.tokenizer = byte_tokenizer() if tokenizer is None else tokenizer or None
        self._intake = Intake(self.tokenizer, source, limits, self.config, plugins())
        self._script = script
        self.go = asyncio.Event()
        self.go.set()
        self.failure: str | None = None
        self.stats = SchedulerStats()
        self.description: dict[str, Any] = {
            "parts": [],
            "report": ["a fake"],
            "expert_layers": [],
        }
        self.loads: list[ExpertLoad] = []
        self.model_info = limits
        self.submitted: list[tuple[list[int], SamplingParams, int, str | None]] = []
        self.open: dict[str, tuple[Answered, Outlet]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def default_sampling_params(self) -> SamplingParams:
        return self._intake.default_sampling_params

    @property
    def is_alive(self) -> bool:
        return self.failure is None

    @property
    def num_unfinished(self) -> int:
        return len(self.open)

    @property
    def num_waiting(self) -> int:
        return sum(not each.token_ids for each, _ in self.open.values())

    @property
    def num_waiting_tokens(self) -> int:
        waiting = (each for each, _ in self.open.values() if not each.token_ids)
        return sum(len(each.prompt_token_ids) for each in waiting)

    def encode(self, prompt: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> Any:
        return self._intake.encode(prompt, chat_template_kwargs)

    def submit(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Answer:
        if self.failure is not None:
            raise EngineDead(self.failure)
        group = self._intake.prepare(prompt, params, priority, cache_salt, None)
        self.submitted.append((list(prompt), params, priority, cache_salt))
        outlet = Outlet()
        for sequence in group.sequences:
            sequence.sink = outlet.put
            self.open[sequence.request_id] = sequence, outlet
        task = asyncio.get_running_loop().create_task(self._answer(group))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Answer(group, outlet, self._drop)

    async def expert_load(self) -> list[ExpertLoad]:
        if self.failure is not None:
            raise EngineDead(self.failure)
        await self.go.wait()
        return self.loads

    def die(self, failure: str = "the core died") -> None:
        self.failure = failure
        for _, outlet in self.open.values():
            outlet.fail(failure)
        self.open.clear()

    async def _answer(self, group: Group) -> None:
        prompt = group.sequences[0].prompt_token_ids
        scripts = [self._script(prompt, index) for index in range(len(group.members))]
        for step in range(max(map(len, scripts))):
            await asyncio.sleep(0)
            await self.go.wait()
            for (request, sequence), script in zip(group.members, scripts, strict=True):
                if sequence.request_id not in self.open:
                    continue
                token_id, length = script[step], len(prompt) + step + 1
                last = step + 1 == request.max_tokens or length == self.model_info.max_model_len
                stops = token_id in request.stop_ids
                sequence.take(
                    Event(
                        request_id=sequence.request_id,
                        token_id=token_id,
                        logprobs=self._logprobs(sequence.params.logprobs, token_id),
                        prompt_logprobs=self._prompt_logprobs(sequence, step),
                        finish_reason="stop" if stops else "length" if last else None,
                        stop_reason=token_id if stops else None,
                        queue_s=0.25,
                        prefill_s=0.5,
                    )
                )
                if sequence.finish_reason is not None:
                    self.open.pop(sequence.request_id, None)

    def _drop(self, sequences: list[Answered]) -> None:
        for sequence in sequences:
            if self.open.pop(sequence.request_id, None):
                sequence.end("abort")

    def _logprobs(self, wanted: int | None, token_id: int) -> TokenLogprobs | None:
        if wanted is None:
            return None
        top = {(token_id + place) % 256: -0.5 - place for place in range(wanted)}
        return TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=top)

    def _prompt_logprobs(
        self, sequence: Answered, step: int
    ) -> tuple[int, list[TokenLogprobs]] | None:
        wanted = sequence.params.prompt_logprobs
        if wanted is None or step:
            return None
        entries = [self._logprobs(wanted, each) for each in sequence.prompt_token_ids[1:]]
        return 1, [entry for entry in entries if entry is not None]


def fake_app(engine: Any, **settings: Any) -> Any:
    """The application over a fake engine, by the name "m"."""
    return build_app(engine, ServerSettings(**({"model_names": ("m",)} | settings)))


def ask(app: Any, path: str, body: Any = None, method: str | None = None, **more: Any) -> Any:
    """One request, and its whole reply. A body of bytes goes as it is."""
    return asyncio.run(asked(app, path, body, method, **more))


async def asked(
    app: Any, path: str, body: Any = None, method: str | None = None, **more: Any
) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    sent = {} if body is None else {"content": body} if isinstance(body, bytes) else {"json": body}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        method = method or ("GET" if body is None else "POST")
        return await client.request(method, path, **sent, **more)
