"""Denoises a photograph with a convolutional network, dense, int8 and int4 side by side.

    python examples/image.py [--out denoised.png] [--noise 25]

The photograph (NASA's portrait of the astronaut Eileen Collins, which comes with scikit-image) is cut in two. On crops
of its left part a network of 3 x 3 convolutions (Flax nnx) learns in seconds to remove noise; the right part, which it
has not seen, is what it is tried on. The picture that is written has from left to right: noisy, dense, int8, int4, and
the original. PSNR is in decibels, the higher the better.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import skimage
from flax import nnx
from PIL import Image

import jax_wonly as jw
from jax_wonly.progress import progress

FEATURES, LAYERS = 64, 3
CROP, BATCH = 32, 8
SEEN = 320  # columns of the photograph that are trained on


class Denoiser(nnx.Module):
    """Estimates the noise of images [batch, height, width, 3] and takes it away."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(3, FEATURES, (3, 3), rngs=rngs)
        self.body = nnx.List([nnx.Conv(FEATURES, FEATURES, (3, 3), rngs=rngs) for _ in range(LAYERS)])
        self.last = nnx.Conv(FEATURES, 3, (3, 3), kernel_init=nnx.initializers.zeros_init(), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.first(x))
        for layer in self.body:
            y = nnx.relu(layer(y))
        return x - self.last(y)


@nnx.jit
def denoise(model: Denoiser, image: jax.Array) -> jax.Array:
    return model(image[None])[0]


def crops(image: jax.Array, key: jax.Array) -> jax.Array:
    """Squares of the image at random places."""
    highest = jnp.array([image.shape[0] - CROP + 1, image.shape[1] - CROP + 1])
    places = jax.random.randint(key, (BATCH, 2), 0, highest)
    return jax.vmap(lambda at: jax.lax.dynamic_slice(image, (*at, 0), (CROP, CROP, 3)))(places)


def train(image: jax.Array, noise: float, steps: int, seed: int, show: bool) -> Denoiser:
    model = Denoiser(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(optax.cosine_decay_schedule(2e-3, steps)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, key):
        of_crops, of_noise = jax.random.split(key)
        clean = crops(image, of_crops)
        noisy = clean + noise * jax.random.normal(of_noise, clean.shape)
        gradient = nnx.grad(lambda model: jnp.mean((model(noisy) - clean) ** 2))(model)
        optimizer.update(model, gradient)

    for i in progress(range(steps), label="train") if show else range(steps):
        step(model, optimizer, jax.random.fold_in(jax.random.key(seed), i))
        if i % 20 == 0:
            jax.block_until_ready(model.last.bias[...])  # so that the bar does not run ahead
    return model


def psnr(image: jax.Array, original: jax.Array) -> float:
    return float(-10 * jnp.log10(jnp.mean((jnp.clip(image, 0, 1) - original) ** 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("denoised.png"), help="the picture (default: %(default)s)")
    parser.add_argument("--noise", type=float, default=25, help="standard deviation, of 255 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what is printed here")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    args = parser.parse_args()

    photograph = jnp.asarray(skimage.data.astronaut(), jnp.float32) / 255
    seen, original = photograph[:, :SEEN], photograph[:, SEEN:]
    noise = args.noise / 255
    model = train(seen, noise, args.steps, args.seed, not args.quiet)
    noisy = original + noise * jax.random.normal(jax.random.key(args.seed + 1), original.shape)

    pictures: dict[str, jax.Array] = {"noisy": noisy}
    rows: list[dict] = []
    for name, bits in (("dense", None), ("int8", 8), ("int4", 4)):
        quantized = copy.deepcopy(model)
        kernels = sum(conv.kernel.size * 4 for conv in (model.first, *model.body, model.last))
        if bits:
            report = jw.nnx.quantize(quantized, bits=bits, group_size=FEATURES)
            kernels -= report.bytes_before - report.bytes_after
        denoise(quantized, noisy).block_until_ready()
        begin = time.perf_counter()
        pictures[name] = denoise(quantized, noisy).block_until_ready()
        rows.append({"name": name, "kernel_bytes": kernels, "seconds": round(time.perf_counter() - begin, 3)})
        rows[-1] |= {
            "psnr": round(psnr(pictures[name], original), 2),
            "psnr_to_dense": None
            if bits is None
            else round(psnr(pictures[name], jnp.clip(pictures["dense"], 0, 1)), 2),
        }
    pictures["original"] = original

    side_by_side = np.concatenate([np.asarray(jnp.clip(p, 0, 1)) for p in pictures.values()], axis=1)
    Image.fromarray((side_by_side * 255 + 0.5).astype(np.uint8)).save(args.out)
    print(f"noisy: {psnr(noisy, original):.2f} dB")
    for row in rows:
        beside = "" if row["psnr_to_dense"] is None else f", {row['psnr_to_dense']:.1f} dB from the dense picture"
        print(
            f"{row['name']}: {row['psnr']:.2f} dB{beside}, kernels {row['kernel_bytes'] / 1000:.0f} kB, "
            f"{row['seconds']:.2f} s"
        )
    print(f"{', '.join(pictures)}: {args.out}")
    if args.json:
        facts = {"device": jax.devices()[0].platform, "noise": args.noise, "steps": args.steps}
        args.json.write_text(
            json.dumps(facts | {"noisy_psnr": round(psnr(noisy, original), 2), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
