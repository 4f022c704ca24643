"""A GPU whose memory is full: quantizing raises, and the model is as it was."""

import argparse
import os
import re
from typing import Any

# All of it at the start, and little, so that it is filled in no time.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.06")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from reliability.record import measured, save  # noqa: E402

import jax_wonly as jw  # noqa: E402

MIB = 1 << 20


def make_model() -> nnx.Module:
    """Four layers of 128 MiB, the smaller of them in front of the larger ones, and a table."""
    rngs, options = nnx.Rngs(0), {"param_dtype": jnp.bfloat16, "use_bias": False}
    return nnx.Sequential(
        nnx.Embed(512, 1024, param_dtype=jnp.bfloat16, rngs=rngs),
        nnx.Linear(1024, 8192, rngs=rngs, **options),
        *(nnx.Linear(8192, 8192, rngs=rngs, **options) for _ in range(3)),
    )


def check(left: int, bits: int) -> dict[str, Any]:
    """Quantizes with ``left`` bytes free."""
    device, model = jax.devices()[0], make_model()
    ids = jnp.arange(7)
    forward = nnx.jit(lambda model, ids: model(ids))
    expected = np.asarray(forward(model, ids))
    before = jax.tree.map(np.asarray, nnx.state(model))
    # What quantizing compiles is on the device before it is full.
    jw.nnx.quantize(make_model(), bits=bits)

    def free() -> int:
        stats = device.memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"]

    filler = []
    while free() > left + MIB:
        size = min(free() - left, device.memory_stats()["largest_free_block_bytes"] or MIB)
        filler.append(jax.block_until_ready(jnp.zeros(size // MIB * MIB or MIB, jnp.uint8)))
    raised = ""
    try:
        jw.nnx.quantize(model, bits=bits)
    except Exception as error:
        raised = (re.search(r"[A-Z]{3,}_[A-Z]+", str(error)) or ["other"])[0]
        notes = getattr(error, "__notes__", [])
    unchanged = not any(isinstance(module, jw.nnx.QuantizedLayer) for _, module in nnx.iter_modules(model))
    filler.clear()
    failures = 0
    if raised:
        same = jax.tree.map(np.array_equal, before, jax.tree.map(np.asarray, nnx.state(model))) if unchanged else False
        failures += raised != "RESOURCE_EXHAUSTED" or not unchanged or not jax.tree.all(same) or bool(notes)
        failures += not np.array_equal(np.asarray(forward(model, ids)), expected)
        jw.nnx.quantize(model, bits=bits)  # with the memory back
    failures += not np.isfinite(np.asarray(forward(model, ids)).astype(np.float32)).all()
    return {
        "what": f"int{bits}, {left // MIB} MiB left: "
        + (f"{raised}, the model as it was, and quantized once there was memory" if raised else "quantized"),
        "cases": 1,
        "failures": int(failures),
        "raised": raised,
    }


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="reliability memory", description=__doc__)
    parser.add_argument("--left", type=int, nargs="*", default=[1, 24, 160], help="MiB (default: %(default)s)")
    parser.add_argument("--output", default="reliability-gpu-memory.json")
    options = parser.parse_args(words)
    if jax.default_backend() != "gpu":
        raise SystemExit("this check needs a GPU; tests/test_nnx.py injects failures without one")
    rows = [measured("memory", check, left * MIB, bits=4) for left in options.left]
    if not any(row["raised"] for row in rows):
        raise SystemExit("there was memory enough every time")
    return save(options.output, rows)
