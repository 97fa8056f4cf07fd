"""Engines on tiny checkpoints, and what must hold of every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tests.helpers.checkpoints import edit_tensors, tiny_checkpoint
from tests.helpers.mounting import plugins
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from rackmount import Engine, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, END_OF_TURN, NUM_BYTE_IDS = 256, 257, 258, 260

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ cue or 'A' }}{% endif %}"
)


def tiny_engine(folder: Path, **arguments: Any) -> Engine:
    """An engine of small numbers, in blocks of 4 tokens."""
    small = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 8, "manager": plugins()}
    return Engine(folder, **(small | arguments))


def greedy(max_tokens: int | None = 8, **others: Any) -> SamplingParams:
    """The most likely tokens, through any end of sequence."""
    given = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return SamplingParams(**(given | others))


def rows(*lengths: int, vocab: int = 97, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def tokens_of(engine: Engine, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
    """The first answer of each prompt, answered together."""
    return [output.token_ids for output in engine.generate(list(prompts), params)]


def distributions(entries: Sequence[Any]) -> Tensor:
    """Log-probabilities [len(entries), vocabulary] of entries that list the whole vocabulary."""
    return torch.tensor([[entry.top[i] for i in range(len(entry.top))] for entry in entries])


def assert_idle(engine: Engine) -> None:
    """Nothing runs, waits or is remembered, and every block is free or cached."""
    scheduler = engine.core.scheduler
    assert not scheduler.has_requests
    engine.core.step()  # ends what is in flight for nobody
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)
    assert scheduler.pool.num_free == engine.core.num_kv_blocks
    assert not engine._sequences


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Id = byte, then "<bos>", "<eos>" and "<turn>"."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name) for name in ("<bos>", "<eos>", "<turn>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    )


def chain_checkpoint(folder: Path, chain: Mapping[int, int] | None = None) -> Path:
    """A model that answers each token with its successor, and a tokenizer with an id for each byte.

    The successor of a byte is the next one, so that "A" is answered by "BCDE...", unless `chain`
    names another. Nothing but the last token matters.
    """
    tiny_checkpoint(
        folder,
        "llama",
        vocab_size=NUM_BYTE_IDS,
        hidden_size=NUM_BYTE_IDS,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    head = torch.zeros(NUM_BYTE_IDS, NUM_BYTE_IDS)
    for token_id in range(NUM_BYTE_IDS):
        head[(chain or {}).get(token_id, (token_id + 1) % 256), token_id] = 1

    def wire(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = torch.eye(NUM_BYTE_IDS)
        tensors["model.norm.weight"].fill_(1)
        tensors["lm_head.weight"] = head
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.0.{name}.weight"].zero_()

    edit_tensors(folder, wire)
    byte_tokenizer().save_pretrained(folder)
    return folder


def spell(text: str, *, start: str, end: int) -> dict[int, int]:
    """A chain that answers `start` with the bytes of `text`, each once in it, then with `end`."""
    ids = [ord(start), *text.encode(), end]
    assert len(set(ids[:-1])) == len(ids) - 1, "a chain goes through each byte once"
    return dict(pairwise(ids))
