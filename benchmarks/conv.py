"""Times quantized convolutions on a GPU beside dense ones of the same process, into one result file.

    python benchmarks/conv.py [--suite resnet unet resnext depthwise transposed] [--batch N ...] [--output FILE]
        [--append]
    python benchmarks/conv.py --random N [--seed N]     of shapes that nobody chose, into a file of their own

Square images in bfloat16, channels last, "SAME" padding, weights int4 in groups of 64 inputs; where features are in
groups, one scale for an output of a tap. ``dilation`` is that of the image, of transposed convolutions, whose result is
as many times as large. Kernel time is CUPTI's: all kernels of a call together, the median over calls
that rotate through weights of more than four times the L2 (or 24 of them, where they are small); all functions take
turns. Microseconds:

- ``us``: ``jax_wonly.conv_general_dilated`` as it chooses;
- ``kernel_us``, ``dequantize_us``: with ``implementation="cuda"`` and ``"dequantize"``;
- ``dense_us``: ``jax.lax.conv_general_dilated`` of bfloat16 weights that lie as cuDNN wants them (outputs first), which
  saves it a transposition.
"""

import argparse
import random
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
from _common import add_results, add_suites, add_timing, kept_rows, require_gpu, save

import jax_wonly as jw
from jax_wonly._timing import Calls, copies_of
from jax_wonly.progress import progress

RESULTS = Path(__file__).parent / "results" / "h100-conv.json"
RANDOM_RESULTS = RESULTS.with_name("h100-random-convs.json")
# (size of the image, inputs, outputs, window, stride, groups of features, dilation of the image)
SUITES = {
    "resnet": [
        (56, 64, 64, 3, 1, 1, 1),
        (28, 128, 128, 3, 1, 1, 1),
        (28, 256, 256, 3, 2, 1, 1),
        (14, 256, 256, 3, 1, 1, 1),
        (7, 512, 512, 3, 1, 1, 1),
    ],
    "unet": [
        (64, 320, 320, 3, 1, 1, 1),
        (32, 640, 640, 3, 1, 1, 1),
        (16, 1280, 1280, 3, 1, 1, 1),
        (16, 2560, 1280, 3, 1, 1, 1),
        (8, 1280, 1280, 3, 1, 1, 1),
    ],
    "resnext": [
        (56, 128, 128, 3, 1, 32, 1),
        (28, 256, 256, 3, 1, 32, 1),
        (28, 512, 512, 3, 2, 32, 1),
        (14, 512, 512, 3, 1, 32, 1),
        (14, 512, 512, 3, 1, 8, 1),
        (7, 1024, 1024, 3, 1, 32, 1),
    ],
    "transposed": [  # of decoders
        (16, 1280, 1280, 3, 1, 1, 2),
        (32, 512, 512, 3, 1, 1, 2),
        (16, 512, 256, 4, 1, 1, 2),
        (64, 256, 128, 4, 1, 1, 2),
    ],
    "depthwise": [  # of MobileNetV2, EfficientNet and ConvNeXt
        (112, 32, 32, 3, 1, 32, 1),
        (56, 144, 144, 3, 2, 144, 1),
        (14, 672, 672, 5, 1, 672, 1),
        (56, 96, 96, 7, 1, 96, 1),
        (14, 384, 384, 7, 1, 384, 1),
    ],
}
BATCHES = (1, 8, 32)
FEATURES = (8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280)
SIZES = (4, 7, 8, 14, 16, 28, 32, 56, 64, 112)
MOST_OPERATIONS, MOST_NUMBERS = 1e11, 1e8  # of a random convolution: multiplications, and of its images
GROUP_SIZE = 64
FEW = 24  # weights that take turns at most: smaller ones stay in the cache in a model too
IDENTITY = ("suite", "size", "inputs", "outputs", "window", "stride", "groups", "dilation", "batch")


def _group_size(inputs: int, groups: int) -> int | None:
    return GROUP_SIZE if groups == 1 and inputs % GROUP_SIZE == 0 else None


def random_shape(draw: random.Random) -> tuple[int, ...]:
    """Images, and a shape as those of SUITES: mostly what networks have, now and then what none has."""
    kind = draw.choice(("full", "full", "full", "groups", "depthwise", "transposed"))
    inputs, size, batch = draw.choice(FEATURES), draw.choice(SIZES), draw.choice((1, 1, 2, 4, 8, 16, 32))
    outputs = inputs if draw.random() < 0.5 else draw.choice(FEATURES)
    window, stride, groups, dilation = draw.choice((3, 3, 3, 3, 2, 4, 5, 7)), draw.choice((1, 1, 1, 2)), 1, 1
    if kind == "groups":
        groups = draw.choice([groups for groups in (2, 4, 8, 16, 32) if inputs % groups == outputs % groups == 0])
    elif kind == "depthwise":
        groups, outputs = inputs, inputs * draw.choice((1, 1, 1, 2))
    elif kind == "transposed":
        stride, dilation = 1, 2
    while batch > 1 and batch * size**2 * (inputs + outputs) > MOST_NUMBERS:
        batch //= 2
    while size > 4 and batch * size**2 * window**2 * inputs // groups * outputs > MOST_OPERATIONS:
        size //= 2
    return batch, size, inputs, outputs, window, stride, groups, dilation


def measure(
    size: int,
    inputs: int,
    outputs: int,
    window: int,
    stride: int,
    groups: int,
    dilation: int,
    batch: int,
    rounds: int,
    calls: int,
):
    each = inputs // groups
    shape, strides = (window, window, each, outputs), (stride, stride)
    low, odd = divmod(window + dilation - 2, 2)
    padding = "SAME" if dilation == 1 else ((low, low + odd),) * 2  # the result is dilation times as large
    count = min(FEW, copies_of(window**2 * each * outputs // 2))
    key = jax.random.key(size)

    @jax.jit
    def draw(i):
        w = jax.random.normal(jax.random.fold_in(key, i), shape, jnp.bfloat16) * (window**2 * each) ** -0.5
        return jw.quantize(w, group_size=_group_size(each, groups)), w.transpose(3, 0, 1, 2)

    weights = [draw(i) for i in range(count)]
    x = jax.random.normal(key, (batch, size, size, inputs), jnp.bfloat16)

    def ours(implementation):
        return lambda x, qt: jw.conv_general_dilated(
            *(x, qt, strides, padding, (dilation, dilation)), feature_group_count=groups, implementation=implementation
        )

    def dense(x, w):
        return jax.lax.conv_general_dilated(
            *(x, w, strides, padding, (dilation, dilation)),
            dimension_numbers=("NHWC", "OHWI", "NHWC"),
            feature_group_count=groups,
        )

    operands = [(x, qt) for qt, _ in weights]
    running = {
        "kernel_us": Calls(ours("cuda"), operands),
        "dequantize_us": Calls(ours("dequantize"), operands),
        "dense_us": Calls(dense, [(x, w) for _, w in weights]),
    }
    # What is chosen is one of these programs.
    chosen, text = "dequantize_us", jax.jit(ours(None)).lower(*operands[0]).as_text()
    if "wonly_conv" in text or "wonly_direct_conv" in text:
        chosen = "kernel_us"
    for _ in range(rounds):
        for timer in running.values():
            timer.measure(calls)
    times = {name: round(timer.us, 2) for name, timer in running.items()}
    operations = 2 * running[chosen].run().size * window**2 * each / dilation**2
    return {
        "us": times[chosen],
        **times,
        "ratio": round(times["dense_us"] / times[chosen], 3),
        "tflops": round(operations / times[chosen] * 1e-6, 1),
        "kernel": running[chosen].kernel,
        "dense_kernel": running["dense_us"].kernel,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_suites(parser, SUITES)
    parser.add_argument("--batch", nargs="+", type=int, default=BATCHES, help="images (default: 1 8 32)")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="draws instead of suites")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    add_timing(parser, rounds=3, calls=15)
    add_results(parser, None, where=f"{RESULTS}, of draws {RANDOM_RESULTS.name} beside it")
    args = parser.parse_args()
    require_gpu("conv.py")
    args.output = args.output or (RANDOM_RESULTS if args.random else RESULTS)

    rows = kept_rows(args.output, args.append, IDENTITY)
    if args.random:
        draw = random.Random(args.seed)
        cases: list[tuple] = [("random", *random_shape(draw)) for _ in range(args.random)]
    else:
        cases = [(suite, batch, *shape) for suite in args.suite for batch in args.batch for shape in SUITES[suite]]
    for suite, batch, *shape in progress(cases, label="convolutions"):
        row = dict(zip(IDENTITY, (suite, *shape, batch), strict=True))
        row |= {"bits": 4, "group_size": _group_size(row["inputs"] // row["groups"], row["groups"])}
        try:
            row |= measure(*shape, batch=batch, rounds=args.rounds, calls=args.calls)
        except ValueError as error:  # no kernel for it
            if not args.random:
                raise
            print(row, error)
            continue
        rows[tuple(row[i] for i in IDENTITY)] = row
        save(args.output, list(rows.values()), args.commit)
    for row in rows.values():
        print(
            f"{row['suite']:6} {row['batch']:3} x {row['size']:2}^2 {row['inputs']:4} -> {row['outputs']:4} "
            f"{row['window']}x{row['window']} /{row['stride']} {row['groups']:4} groups, x{row['dilation']}: "
            f"{row['us']:8.2f} us, kernel {row['kernel_us']}, "
            f"dequantize {row['dequantize_us']:8.2f}, dense {row['dense_us']:8.2f}  {row['ratio']:6.3f}x  "
            f"{row['kernel']}"
        )
    worse = [row["us"] / min(row["kernel_us"], row["dequantize_us"]) for row in rows.values()]
    print(
        f"{len(worse)} convolutions: what is chosen takes {statistics.geometric_mean(worse):.4f} of the time of the "
        f"faster way, {sum(ratio > 1.05 for ratio in worse)} above 1.05, {max(worse):.2f} at worst"
    )
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
