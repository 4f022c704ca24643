"""Checks of convolutions that run on every platform, against patches gathered in NumPy and float64 sums."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from reference import Weight, assert_product, random_weight, random_x

import jax_wonly as jw

# On an H100 these reach every shape of conv_warpgroup.cuh, (pixels, warpgroups of outputs) of a CTA.
WARPGROUPS = {
    (32, 1): {"sizes": (2, 3), "window": (1, 2), "k": 64, "n": 16, "images": 1},
    (64, 1): {"sizes": (20, 35), "window": (3, 3), "k": 640, "n": 16, "images": 1},
    (96, 1): {"sizes": (50, 50), "window": (2, 2), "k": 320, "n": 16, "images": 1},
    (96, 2): {"sizes": (50, 50), "window": (3, 3), "k": 384, "n": 80, "images": 1},
    (112, 2): {"sizes": (50, 50), "window": (3, 3), "k": 64, "n": 640, "images": 1},
    (128, 2): {"sizes": (50, 50), "window": (2, 3), "k": 64, "n": 640, "images": 1},
    (160, 2): {"sizes": (14, 14), "window": (3, 3), "k": 320, "n": 1280, "images": 2},
}

# On an H100 these take band_conv.cuh, which has many pixels of few inputs.
BANDS = {
    "3x3": {"sizes": (56, 56), "window": (3, 3), "k": 64, "n": 64, "images": 16},
    "narrow": {"sizes": (39, 40), "window": (3, 3), "k": 16, "n": 24, "images": 30},
    "dilated": {"sizes": (50, 31), "window": (3, 3), "k": 32, "n": 60, "images": 30, "rhs_dilation": (2, 5)},
    "valid": {"sizes": (60, 33), "window": (3, 3), "k": 64, "n": 50, "images": 20, "padding": "VALID"},
    "one side": {"sizes": (40, 41), "window": (4, 3), "k": 64, "n": 64, "images": 24, "padding": ((0, 3), (2, 0))},
    "1d": {"sizes": (240,), "window": (9,), "k": 64, "n": 64, "images": 400},
}


def patches(x, window, strides, pads, lhs_dilation, rhs_dilation) -> np.ndarray:
    """``[B, *results, taps, C]`` of channels-last images, by index arithmetic; outside of an image is zero."""
    x = np.asarray(x)
    sizes = x.shape[1:-1]
    results = []
    for size, w, s, (low, high), ld, rd in zip(sizes, window, strides, pads, lhs_dilation, rhs_dilation, strict=True):
        dilated = (size - 1) * ld + 1 if size else 0
        results.append(max(0, (dilated + low + high - ((w - 1) * rd + 1)) // s + 1))
    out = np.zeros((x.shape[0], *results, int(np.prod(window)), x.shape[-1]), x.dtype)
    for pixel in itertools.product(*map(range, results)):
        for i, tap in enumerate(itertools.product(*map(range, window))):
            at = [
                p * s - low + t * rd
                for p, s, (low, _), t, rd in zip(pixel, strides, pads, tap, rhs_dilation, strict=True)
            ]
            if all(a % d == 0 and 0 <= a // d < size for a, d, size in zip(at, lhs_dilation, sizes, strict=True)):
                index = tuple(a // d for a, d in zip(at, lhs_dilation, strict=True))
                out[(slice(None), *pixel, i)] = x[(slice(None), *index)]
    return out


def check_conv(
    rng,
    *,
    sizes,
    window,
    k=64,
    n=70,
    strides=None,
    padding="SAME",
    lhs_dilation=None,
    rhs_dilation=None,
    groups=1,
    images=2,
    bits=4,
    group_size=None,
    mode="symmetric",
    x_dtype="float32",
    scale_dtype=None,
    out_dtype=None,
    with_bias=True,
    activation=None,
    implementation=None,
    rounded_weights=False,
    shared_scales=False,
    channels_first=False,
):
    """One convolution of fresh random images and weights, within the bound of ``assert_product``."""
    spatial = len(sizes)
    ones = (1,) * spatial
    strides, ld, rd = strides or ones, lhs_dilation or ones, rhs_dilation or ones
    weight = random_weight(
        rng, k, n, bits=bits, group_size=group_size, mode=mode, scale_dtype=scale_dtype or x_dtype, lead=window
    )
    qt, dense, magnitude = weight.qt, weight.dense, weight.magnitude
    if shared_scales:
        first = (slice(0, 1),) * spatial
        qt = jw.QuantizedTensor(qt.qvalue, qt.scales[first], bits=bits, k=k, n=n)
        ratio = np.repeat(
            np.asarray(qt.scales, np.float64) / np.asarray(weight.qt.scales, np.float64), k // qt.scales.shape[-2], -2
        )
        dense, magnitude = dense * ratio, magnitude * ratio
    x = random_x(rng, (images, *sizes, groups * k), x_dtype)
    bias = random_x(rng, (n,)) if with_bias else None
    letters = "DHW"[-spatial:] if spatial else ""
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    image = jnp.moveaxis(x, -1, 1) if channels_first else x
    if channels_first:
        numbers = (f"NC{letters}", f"{letters}IO", f"NC{letters}")

    @jax.jit
    def f(image, qt, bias):
        return jw.conv_general_dilated(
            image,
            qt,
            strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            numbers,
            groups,
            preferred_element_type=out_dtype,
            bias=bias,
            activation=activation,
            implementation=implementation,
        )

    y = f(image, qt, bias)
    y = jnp.moveaxis(y, 1, -1) if channels_first else y
    pads = padding
    if isinstance(padding, str):
        dilated = [(w - 1) * d + 1 for w, d in zip(window, rd, strict=True)]
        pads = jax.lax.padtype_to_pads(sizes, dilated, strides, padding)
    gathered = patches(x, window, strides, pads, ld, rd)
    results = gathered.shape[:-2]
    assert y.shape == (*results, n)
    outputs = n // groups
    for g in range(groups):
        of = slice(g * outputs, (g + 1) * outputs)
        flat = Weight(qt, *(a[..., of].reshape(-1, outputs) for a in (dense, magnitude)))
        inputs = jnp.asarray(gathered[..., g * k : (g + 1) * k]).reshape(-1, flat.dense.shape[0])
        assert_product(
            y[..., of].reshape(-1, outputs),
            inputs,
            flat,
            bias=None if bias is None else bias[of],
            activation=activation,
            out_dtype=out_dtype,
            rounded_weights=rounded_weights,
        )


def check_scheme(rng, bits, mode, k, group_size, *, sizes=(3, 5), **options):
    """A way to quantize, on small images."""
    scheme = {"bits": bits, "mode": mode, "k": k, "group_size": group_size}
    check_conv(rng, sizes=sizes, window=(3, 3), rounded_weights=True, **scheme, **options)
