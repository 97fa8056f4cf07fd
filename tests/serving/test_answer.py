"""Answers that wait to be read: whole, however slow the reader, and never more than the answer."""

import asyncio
from typing import Any

import pytest

from rackmount import EngineDead, TextChunk
from rackmount.sampling.request import TokenLogprobs
from rackmount.serving.answer import MOST_PIECES, Outlet


def chunk(index: int, number: int, **others: Any) -> TextChunk:
    entry = TokenLogprobs(token_id=number, logprob=-1.0, rank=1, top={})
    given = {"logprobs": [entry], "token_ids": [number], "text": f"{number} "} | others
    return TextChunk(prompt_index=0, index=index, num_prompt_tokens=1, num_cached_tokens=0, **given)


def test_what_nobody_reads_becomes_few_chunks_and_loses_nothing() -> None:
    async def check() -> None:
        outlet = Outlet()
        for number in range(1000):
            outlet.put(chunk(number % 2, number))
        outlet.put(chunk(0, 0, text="", token_ids=[], logprobs=None, finish_reason="abort"))
        assert all(len(pieces) <= MOST_PIECES for pieces in outlet._pieces.values())
        for index in (0, 1):
            one = await outlet.take()
            assert one.index == index
            assert one.token_ids == list(range(index, 1000, 2))
            assert one.text == "".join(f"{number} " for number in one.token_ids)
            assert [entry.token_id for entry in one.logprobs or ()] == one.token_ids
            assert one.finish_reason == ("abort" if index == 0 else None)

    asyncio.run(check())


def test_a_failure_comes_after_what_came_before_it_and_stays() -> None:
    async def check() -> None:
        outlet = Outlet()
        reader = asyncio.create_task(outlet.take())
        await asyncio.sleep(0)
        outlet.put(chunk(0, 7))
        outlet.fail("gone")
        assert (await reader).token_ids == [7]
        for _ in range(2):
            with pytest.raises(EngineDead, match=r"^gone$"):
                await outlet.take()

    asyncio.run(check())
