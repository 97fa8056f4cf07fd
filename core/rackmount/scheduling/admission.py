"""What is refused at the door: a request that could never run, with the numbers that say why."""

from rackmount.scheduling.config import SchedulerConfig
from rackmount.scheduling.request import Request
from rackmount_registry.errors import RequestError


def check_request(request: Request, config: SchedulerConfig) -> None:
    """RequestError for a request that no load and no waiting would let run.

    One whose prompt fits but whose output may not is let in: `max_length` ends it as "length".
    """
    name, num_prompt = f"request {request.request_id!r}", request.prompt_token_ids.size
    if not 1 <= num_prompt < config.max_model_len:
        raise RequestError(
            f"{name}: a prompt of {num_prompt} tokens must have 1 to {config.max_model_len - 1}, "
            f"max_model_len={config.max_model_len} less one to generate"
        )
    if num_prompt > config.num_kv_tokens:
        raise RequestError(
            f"{name}: a prompt of {num_prompt} tokens can never fit the KV cache; at most "
            f"{config.num_kv_tokens} do, {config.num_blocks} blocks of {config.block_size}"
        )
    if request.max_tokens < 1:
        raise RequestError(f"{name}: max_tokens={request.max_tokens} must be at least 1")
    for token_id in request.stop_ids:
        if not 0 <= token_id < config.vocab_size:
            raise RequestError(
                f"{name}: stop token {token_id} must be in 0 to {config.vocab_size - 1}"
            )


def max_length(request: Request, config: SchedulerConfig) -> int:
    """Tokens, prompt included, at which a request ends at the latest.

    Never more than it can reach with the pool to itself; the last token needs no slot there.
    """
    return min(
        request.prompt_token_ids.size + request.max_tokens,
        config.max_model_len,
        config.num_kv_tokens + 1,
    )
