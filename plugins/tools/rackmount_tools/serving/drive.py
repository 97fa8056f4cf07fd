"""Many requests at a server, each at its time."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx

from rackmount_registry.errors import RackmountError
from rackmount_tools.serving.asks import Ask
from rackmount_tools.serving.exchange import Exchange, exchange


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server, and what every request to it has in common."""

    base_url: str
    fields: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout_s: float = 600.0
    """For a whole answer."""

    def client(self) -> httpx.AsyncClient:
        """As many connections as there are requests; no proxy of the environment in between."""
        return httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=None,  # `exchange` has one for the whole
            trust_env=False,
        )


async def drive(
    target: Target, asks: Sequence[Ask], times: Sequence[float], concurrency: int | None = None
) -> list[Exchange]:
    """Sends each of `asks` so many seconds after the start; at most `concurrency` at once, in
    order, the others late."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(target.client())
        slots = asyncio.Semaphore(concurrency or len(asks))
        start = time.perf_counter()

        async def one(ask: Ask, due: float) -> Exchange:
            await asyncio.sleep(due - time.perf_counter())
            async with slots:
                return await exchange(client, ask, target.fields, due, target.timeout_s)

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(ask, start + at)) for ask, at in zip(asks, times, strict=True)
            ]
        return [task.result() for task in tasks]


async def first_model(target: Target) -> str:
    """The name of the first model that the server lists.

    Raises:
        RackmountError: it lists none, or does not answer as such servers do.
    """
    listed = await _get(target, "/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise RackmountError(f"{target.base_url}/v1/models lists no model: {listed}") from error


async def server_info(target: Target) -> Any:
    """What the server says of itself; None where it says nothing."""
    try:
        return await _get(target, "/server_info")
    except RackmountError:
        return None


async def _get(target: Target, path: str) -> Any:
    place = f"{target.base_url}{path}"
    try:
        async with target.client() as client, asyncio.timeout(target.timeout_s):
            response = await client.get(path)
            response.raise_for_status()
            return response.json()
    except TimeoutError as error:
        raise RackmountError(f"{place}: no answer within {target.timeout_s:g} s") from error
    except (httpx.HTTPError, ValueError) as error:
        raise RackmountError(f"{place}: {error or type(error).__name__}") from error
