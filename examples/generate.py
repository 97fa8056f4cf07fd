"""Answer several prompts at once. Usage: python examples/generate.py [MODEL]"""

import sys

from rackmount import Engine, SamplingParams

with Engine(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m") as engine:
    prompts = [
        "The capital of France is",
        [{"role": "user", "content": "Name three primary colours."}],
    ]
    for output in engine.generate(prompts, SamplingParams(temperature=0, max_tokens=32)):
        print(repr(output.text))
