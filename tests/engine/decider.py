"""A process that runs branches and nothing else: `python -m tests.engine.decider`.

Reads {"branches": {name: folder}, "inputs": [text]} from its input, decides one text after the
other with every branch, and writes {name: [[probability as hexadecimal text]]}.
"""

from __future__ import annotations

import json
import sys

from lockstep import LLM


def main() -> None:
    asked = json.load(sys.stdin)
    found: dict[str, list[list[str]]] = {name: [] for name in asked["branches"]}
    settings = asked["settings"]
    with LLM(
        "smollm2", branches=asked["branches"], branch_depth="exit", progress=False, **settings
    ) as llm:
        for text in asked["inputs"]:
            for name, rows in found.items():
                decision = llm.decide(text, branch=name)
                rows.append([value.hex() for value in decision.probabilities])
        assert llm.stats().generated_tokens == 0
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
