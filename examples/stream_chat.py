"""Stream two turns of a chat; the second finds the first in the prefix cache.

Usage: python examples/stream_chat.py [MODEL]
"""

import sys

from rackmount import Engine, SamplingParams

with Engine(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m") as engine:
    messages = []
    for question in ("What is the capital of France?", "And of Italy?"):
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        answer = ""
        for chunk in engine.stream(messages, SamplingParams(temperature=0, max_tokens=64)):
            print(chunk.text, end="", flush=True)
            answer += chunk.text
        print()
        messages.append({"role": "assistant", "content": answer})
    print(f"prefix cache: {engine.stats.total_prefix_hits} tokens of prompts were already there")
