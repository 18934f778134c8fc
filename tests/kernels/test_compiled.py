"""What the compiler makes of a kernel for Hopper, on a machine that need not have one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# In a process of its own: Triton's interpreter, which other tests run under, compiles nothing.
PROGRAM = """
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from lockstep.kernels.cuda import stream

shape = stream.choose(16, 4096, 4096, 132)


def descriptor(high):
    block = [high, shape.k]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return f"tensordesc<bf16{block},{layout!r}>"


types = {
    "x": descriptor(shape.rows), "w": descriptor(shape.width), "bias": "*bf16",
    "residual": "*bf16", "out": "*bf16", "M": "i32", "early": "i32",
}
constants = {
    "N": 4096, "K": 4096, "ACTIVATION": 0, "HAS_BIAS": False, "HAS_RESIDUAL": True,
    "WIDTH": shape.width, "STRIPS": shape.strips, "BK": shape.k, "STAGES": shape.stages,
    "ROWS": shape.rows, "WARPS": shape.warps, "CHAINED": 1,
}
kernel = stream._stream_kernel
signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
compiled = compile(
    GluonASTSource(kernel, signature, constants, {}),
    target=GPUTarget("cuda", 90, 32),
    options={"num_warps": shape.warps, "enable_fp_fusion": False},
)
print(compiled.asm["ptx"])
"""


def test_a_stage_is_given_back_behind_a_fence(tmp_path: Path) -> None:
    """Bulk copies into a stage follow no order with loads from it but a proxy fence's."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [
        kind
        for line in done.stdout.splitlines()
        for kind in ("ldmatrix", "fence.proxy.async", "bar.sync", "mbarrier.arrive.shared")
        if kind in line
    ]
    arrival = steps.index("mbarrier.arrive.shared", steps.index("ldmatrix"))
    assert steps[arrival - 3 : arrival] == ["ldmatrix", "fence.proxy.async", "bar.sync"]
