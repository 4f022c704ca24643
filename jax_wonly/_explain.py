"""Which way a product takes, and the byte and operation counts that say how fast it can be."""

import dataclasses
import importlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jax_wonly import _abi, _cuda_dispatch, _cuda_experts, _ffi
from jax_wonly._abi import ShiftMode
from jax_wonly._experts import gather_matmul, ragged_dot
from jax_wonly._matmul import matmul
from jax_wonly._model import bytes_text, scheme
from jax_wonly._quantize import shift_mode_of
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import broadcast_leads, check_array, check_choice
from jax_wonly._wrapped import WrappedTensor
from jax_wonly.primitives import activations as activations_primitive
from jax_wonly.primitives import experts as experts_primitive
from jax_wonly.primitives import matmul as matmul_primitive
from jax_wonly.primitives._common import may_round

PLATFORMS = ("cpu", "cuda", "tpu", "rocm")
EXPERTS = (False, True, "ids", "sizes")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The way of one product: what :func:`jax_wonly.explain` returns. ``str`` and ``repr`` give a paragraph.

    Every byte is counted once, as a kernel that reads everything once would move it.

    Attributes:
      operation: ``"matmul"``, ``"matmul_transposed"``, ``"ragged_matmul"`` or ``"ragged_matmul_transposed"``.
      platform: such as ``"cuda"``.
      device: the device, or what is assumed about one that is not here.
      path: ``"kernel"`` (the fused kernels), ``"dequantize"`` (dense weights for XLA's product) or ``"xla"`` (XLA's own
        operations alone).
      kernel: the kernel on the path: on CUDA its name, or ``"matmul_tiled + matmul_warpgroup"`` where two have some
        outputs each, on CPUs the instruction set; None without one.
      rounds_weights: whether weights are rounded to 16 bits, the type of x, before they are multiplied; None where that
        is not known: gradients and quantized activations.
      rounds_x: whether float32 x is rounded to bfloat16 first, as a ``precision`` of ``"default"`` allows.
      targets: the custom calls of the program.
      reason: why this path.
      dtype: of the activations.
      scheme: of the weights, such as ``"int4, group 128, zeros"``.
      batch: products with weights of their own: layers, or experts.
      m: rows of activations to each of the batch; all rows of an expert product together.
      k, n: inputs and outputs of the weights.
      weight_bytes: of the packed codes that are read.
      scale_bytes: of scales, zeros and offsets that are read.
      x_bytes, result_bytes: of the activations and of the result.
      dense_weight_bytes: of the same weights, dense, in the type of the activations.
      flops: multiplications and additions of the product itself.
      kernel_us: what the dispatch expects of the fused kernels, in microseconds on an H100; None where it has no model.
      dequantize_us: the same of dequantizing for a dense product.

    Example:
      >>> found = jw.explain(jnp.ones((4, 128)), jw.quantize(jnp.ones((128, 64))), platform="cpu")
      >>> found.operation, found.m, found.k, found.n, found.flops
      ('matmul', 4, 128, 64, 65536)
    """

    operation: str
    platform: str
    device: str
    path: str
    kernel: str | None
    rounds_weights: bool | None
    rounds_x: bool
    targets: tuple[str, ...]
    reason: str
    dtype: str
    scheme: str
    batch: int
    m: int
    k: int
    n: int
    weight_bytes: int
    scale_bytes: int
    x_bytes: int
    result_bytes: int
    dense_weight_bytes: int
    flops: int
    kernel_us: float | None
    dequantize_us: float | None

    @property
    def bytes(self) -> int:
        """Bytes that the path moves at least; without the kernel, the dense weights are also written and read again."""
        once = self.weight_bytes + self.scale_bytes + self.x_bytes + self.result_bytes
        return once if self.path == "kernel" else once + 2 * self.dense_weight_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes that a dense product of the same operands moves at least."""
        return self.dense_weight_bytes + self.x_bytes + self.result_bytes

    @property
    def intensity(self) -> float:
        """Operations for each byte that is moved."""
        return self.flops / max(self.bytes, 1)

    def to_dict(self) -> dict[str, Any]:
        """Every field and derived number, as JSON has them."""
        derived = {name: getattr(self, name) for name in ("bytes", "dense_bytes", "intensity")}
        return dataclasses.asdict(self) | {"targets": list(self.targets)} | derived

    def __repr__(self) -> str:
        lead = f"{self.batch} x " if self.batch > 1 else ""
        to = "bfloat16" if self.rounds_x else self.dtype
        operands = [name for name, rounds in (("x", self.rounds_x), ("weights", self.rounds_weights)) if rounds]
        rounded = f", {' and '.join(operands)} rounded to {to}" if operands else ""
        path = {
            "kernel": f"fused kernel{f' ({self.kernel}{rounded})' if self.kernel else ''}",
            "dequantize": f"dequantize, then XLA's dense product{', x rounded to bfloat16' if self.rounds_x else ''}",
            "xla": "XLA's operations",
        }[self.path]
        calls = f"; calls {', '.join(self.targets)}" if self.targets else ""
        parts = [
            f"{name} {bytes_text(count)}"
            for name, count in (
                ("codes", self.weight_bytes),
                ("scales", self.scale_bytes),
                ("x", self.x_bytes),
                ("result", self.result_bytes),
                ("dense weights, twice", 0 if self.path == "kernel" else 2 * self.dense_weight_bytes),
            )
            if count
        ]
        ratio = self.dense_bytes / max(self.bytes, 1)
        compared = f"1/{ratio:.2f}" if ratio >= 1 else f"{1 / ratio:.2f} times"
        inputs = self.n if self.operation.endswith("transposed") else self.k
        rows = [
            (
                "product",
                f"{self.operation}: {self.dtype} [{self.m}, {inputs}] with {lead}[{self.k}, {self.n}], {self.scheme}",
            ),
            ("platform", f"{self.platform}, {self.device}"),
            ("path", path + calls),
            ("why", self.reason),
            ("bytes", f"{' + '.join(parts)} = {bytes_text(self.bytes)}, {compared} those of a dense product"),
            ("work", f"{self.flops / 1e9:.3g} GFLOP, {self.intensity:.3g} FLOP a byte"),
        ]
        if self.kernel_us is not None and self.dequantize_us is not None:
            rows.append(
                ("model", f"fused {self.kernel_us:.3g} us, dequantized {self.dequantize_us:.3g} us (of an H100)")
            )
        return "\n".join(f"{name:<9} {text}" for name, text in rows)


def explain(
    x,
    qt,
    *,
    platform: str | None = None,
    implementation: str | None = None,
    transpose: bool = False,
    experts: bool | str = False,
    activation_quantization=None,
    precision=None,
) -> Explanation:
    """Says which kernel or other path ``matmul(x, qt)`` takes, and why, with the bytes and operations behind it.

    Nothing is computed: operands may be :class:`jax.ShapeDtypeStruct`, such as ``jax.eval_shape`` returns. The path is
    read off the program that the product is traced to.

    Args:
      x: floating ``[..., K]``, an array or its shape and dtype.
      qt: a :class:`QuantizedTensor` ``[..., K, N]``, or one that is permuted or scaled, of arrays or of shapes.
      platform: ``"cpu"``, ``"cuda"``, ``"tpu"`` or ``"rocm"``; None: that of x, or the default one. For ``"cuda"``
        without a GPU here, an H100 is assumed.
      implementation: as in :func:`jax_wonly.matmul`.
      transpose: explain the product with the transposed weights instead, ``x [..., N]``: the gradient.
      experts: explain the product of x with the experts ``[E, K, N]`` instead: ``"ids"`` or True for ``gather_matmul``
        of x ``[..., K]`` with an id for each row, ``"sizes"`` for ``ragged_dot`` of x ``[M, K]``. The rows are taken to
        belong to as many experts as they can.
      activation_quantization: as in :func:`jax_wonly.matmul`: explain the product of x quantized first.
      precision: as in :func:`jax_wonly.matmul`.

    Raises:
      TypeError: an argument has a wrong type or dtype.
      ValueError: shapes do not fit, an option is not one of those accepted, or the implementation cannot be had.

    Example:
      >>> x = jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16)
      >>> qt = jax.eval_shape(jw.quantize, jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))
      >>> found = jw.explain(x, qt, platform="cuda")
      >>> found.m, found.weight_bytes, found.flops
      (8, 8388608, 268435456)
      >>> jw.explain(x, qt, platform="tpu").path
      'xla'
      >>> experts = jax.eval_shape(jw.quantize, jax.ShapeDtypeStruct((16, 4096, 4096), jnp.bfloat16))
      >>> jw.explain(x, experts, platform="cuda", experts="sizes").operation
      'ragged_matmul'
    """
    if not isinstance(x, jax.ShapeDtypeStruct):
        check_array("x", x)
    weight = qt.weight if isinstance(qt, WrappedTensor) else qt
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(f"jax_wonly: qt is a {type(qt).__name__}; accepted: a QuantizedTensor.")
    bits, k, n = weight.bits, weight.k, weight.n
    inputs = n if transpose else k
    check_choice("experts", experts, EXPERTS)
    if len(x.shape) == 0 or x.shape[-1] != inputs:
        raise ValueError(f"jax_wonly: x has shape {tuple(x.shape)}; accepted: [..., {inputs}].")
    if experts and len(weight.shape) != 3:
        raise ValueError(f"jax_wonly: qt has shape {weight.shape}; accepted with experts=True: [E, K, N].")
    platform = _platform_of(x) if platform is None else platform
    check_choice("platform", platform, PLATFORMS)
    implementation = _ffi.resolve_implementation(implementation)
    if activation_quantization is not None and (transpose or experts):
        raise ValueError(
            f"jax_wonly: activation_quantization={activation_quantization!r} with transpose={transpose!r} and "
            f"experts={experts!r}; accepted: None."
        )
    bound = _bound(
        x,
        weight,
        transpose=transpose,
        experts=experts,
        implementation=implementation,
        activation_quantization=activation_quantization,
        precision=precision,
    )

    lead = weight.shape[:-2]
    rows = math.prod(x.shape[:-1])
    if experts:
        batch, m = lead[0], rows
    else:
        batch = math.prod(lead)
        m = math.prod(broadcast_leads(x=x.shape[:-2], qt=lead)) * math.prod(x.shape[-2:-1]) // max(batch, 1)
    if batch == 0:
        raise ValueError(f"jax_wonly: qt has shape {weight.shape}; accepted: no axis of size 0.")
    outputs = k if transpose else n

    why = _no_kernels(platform, implementation)
    targets = () if why else _calls(bound, platform)
    shift = weight.zeros if weight.offsets is None else weight.offsets
    mode = shift_mode_of(weight.zeros, weight.offsets) if weight.table is None else ShiftMode.TABLE
    kernel = kernel_us = dequantize_us = None
    scale_dtype, shift_dtype = weight.scales.dtype, getattr(shift, "dtype", None)
    if not transpose:
        scale_dtype, shift_dtype = _cuda_dispatch.parameter_types(scale_dtype, shift_dtype)
    types = (x.dtype, scale_dtype, mode, shift_dtype)
    product = _cuda_dispatch.Product(m, k, n, batch, bits, *types, groups=weight.scales.shape[-2])
    ids = experts != "sizes"
    native = platform == "cuda" and not why and implementation != "dequantize"
    if native and may_round(x.dtype, bound.params["params"].precision) and activation_quantization is None:
        product = (_cuda_experts if experts else _cuda_dispatch).rounded(product, transpose=transpose)
    rounds_x = product.x_dtype != x.dtype
    rounds = None if transpose or activation_quantization is not None else x.dtype.itemsize == 2 or rounds_x
    if platform == "cuda" and _abi.RAGGED_MATMUL in targets:
        product = _cuda_experts.widened(product, ids=ids)
        kernel = _cuda_experts.kernel(product, ids=ids)
        rounds = _cuda_experts.rounds_weights(product, ids=ids)
    elif platform == "cuda" and _abi.RAGGED_MATMUL_TRANSPOSED in targets:
        kernel = _cuda_experts.transposed_kernel(product)
    elif platform == "cuda" and not (experts or transpose) and _cuda_dispatch.has_kernels(product.x_dtype):
        if activation_quantization is None:
            product = _cuda_dispatch.widened(_cuda_dispatch.whole_inputs(product, forced=implementation == "cuda"))
        kernel_us, dequantize_us = _cuda_dispatch.estimate(product)
        if _abi.MATMUL in targets:
            kernel = _cuda_dispatch.kernel(product)
            rounds = _cuda_dispatch.rounds_weights(product)
        elif _abi.QUANTIZED_MATMUL in targets:
            kernel = "quantized_matmul"
    elif platform == "cuda" and _abi.MATMUL_TRANSPOSED in targets:
        product = _cuda_dispatch.whole_outputs(product)
        if _cuda_dispatch.rounds_transposed_parameters(product):
            product = product.with_own_types()
        apart = _cuda_dispatch.transposed_shift_apart(product)
        kernel = _cuda_dispatch.transposed_kernel(product.without_shift() if apart else product)
    elif platform == "cpu" and targets:
        kernel = importlib.import_module("jax_wonly._cpu").active_isa()
    path = "xla" if not targets else "dequantize" if _abi.DEQUANTIZE in targets else "kernel"
    read = min(batch, m) if experts and path == "kernel" else batch
    per_weight = {name: math.prod(a.shape) * a.dtype.itemsize * read // batch for name, a in _arrays(weight).items()}
    return Explanation(
        operation=("ragged_" if experts else "") + "matmul" + ("_transposed" if transpose else ""),
        platform=platform,
        device=_device(platform),
        path=path,
        kernel=kernel if path == "kernel" else None,
        rounds_x=rounds_x,
        rounds_weights=rounds and not (platform == "cpu" and path == "kernel"),
        targets=targets,
        reason=why
        or _reason_of_codes(bound, targets, platform, weight)
        + _reason(path, platform, m, transpose, experts, implementation, kernel_us, dequantize_us),
        dtype=str(x.dtype),
        scheme=scheme(weight),
        batch=batch,
        m=m,
        k=k,
        n=n,
        weight_bytes=per_weight.pop("qvalue"),
        scale_bytes=sum(per_weight.values()),
        x_bytes=rows * inputs * x.dtype.itemsize,
        result_bytes=(m if experts else m * batch) * outputs * x.dtype.itemsize,
        dense_weight_bytes=read * k * n * x.dtype.itemsize,
        flops=2 * m * k * n * (1 if experts else batch),
        kernel_us=kernel_us,
        dequantize_us=dequantize_us,
    )


def _arrays(weight: QuantizedTensor) -> dict[str, Any]:
    arrays = {name: getattr(weight, name) for name in ("qvalue", "scales", "zeros", "offsets")}
    return {name: a for name, a in arrays.items() if a is not None}


def _platform_of(x) -> str:
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        device = next(iter(x.devices()))
    else:
        device = jax.config.jax_default_device or jax.devices()[0]  # type: ignore[attr-defined]
    name = device if isinstance(device, str) else device.platform
    return "cuda" if name == "gpu" else name


def _device(platform: str) -> str:
    if platform == "cpu":
        return "this machine"
    try:
        return jax.devices(platform)[0].device_kind
    except RuntimeError:
        return "an H100, for there is no GPU here" if platform == "cuda" else "which is not here"


def _no_kernels(platform: str, implementation: str | None) -> str:
    """Why there are no kernels, where that is not a matter of the product; empty where there are."""
    if implementation == "xla":
        return "implementation='xla' was asked for"
    if platform not in _ffi.PLATFORMS:
        return f"there are no kernels for {platform}"
    if implementation in _ffi.PLATFORMS and implementation != platform:
        raise ValueError(f"jax_wonly: implementation={implementation!r} does not run on {platform!r}.")
    reason = _ffi.ensure_registered()[platform]
    if reason is None or (platform == "cuda" and not _ffi.gpu_here()):
        return ""
    if implementation == platform:
        raise ValueError(f"jax_wonly: implementation={implementation!r} is not available: {reason}.")
    return reason


_NATIVE = {
    matmul_primitive.matmul_p: matmul_primitive._native,
    experts_primitive.ragged_matmul_p: experts_primitive._native,
    activations_primitive.quantize_activation_p: activations_primitive._evaluate,
}


def _bound(
    x,
    weight: QuantizedTensor,
    *,
    transpose: bool,
    experts: bool | str,
    implementation: str | None,
    activation_quantization,
    precision,
):
    """The equation of the primitive that the public product is traced to, which checks the operands."""
    primal = jax.ShapeDtypeStruct((*x.shape[:-1], weight.k), x.dtype)

    options: dict[str, Any] = {"implementation": implementation, "precision": precision}

    def product(x, qt):
        if experts == "sizes":
            return ragged_dot(x, qt, jnp.zeros(weight.shape[0], jnp.int32), **options)
        if experts:
            return gather_matmul(x, qt, jnp.zeros(x.shape[:-1], jnp.int32), **options)
        return matmul(x, qt, activation_quantization=activation_quantization, **options)

    def gradient(dy, qt):
        return jax.linear_transpose(lambda x: product(x, qt), primal)(dy)[0]

    operands = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, weight))
    traced = jax.make_jaxpr(gradient if transpose else product)(*operands)
    return next(e for e in _equations(traced.jaxpr) if e.primitive in _NATIVE)


def _calls(bound, platform: str) -> tuple[str, ...]:
    """The custom calls that a primitive is lowered to."""
    lowered = jax.make_jaxpr(partial(_NATIVE[bound.primitive], platform=platform, **bound.params))(
        *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in bound.invars)
    )
    calls = []
    for equation in _equations(lowered.jaxpr):
        if equation.primitive.name == "ffi_call":
            calls.append(equation.params["target_name"])
        elif equation.primitive in _NATIVE:
            calls.extend(_calls(equation, platform))
    return tuple(dict.fromkeys(calls))


def _equations(jaxpr) -> Iterator[Any]:
    """Those of a program and of its inner programs."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _reason_of_codes(bound, targets, platform: str, weight: QuantizedTensor) -> str:
    """What becomes of the codes of activations that are quantized, ahead of the reason for the rest."""
    codes = getattr(bound.params["params"], "activations", None)
    if codes is None:
        return ""
    if _abi.QUANTIZED_MATMUL in targets:
        return "codes of x meet those of the weights on the tensor cores; "
    if not activations_primitive.takes_codes(codes, weight.k, weight.bits, weight.scales.shape[-2], platform):
        return f"no kernel on {platform} takes such codes, so that x is dequantized again; "
    return "for so few rows, or on this GPU, x is dequantized again; "


def _reason(path, platform, m, transpose, experts, implementation, kernel_us, dequantize_us) -> str:
    if implementation is not None:
        return f"implementation={implementation!r} was asked for"
    if path == "kernel":
        if kernel_us is None or m <= _cuda_dispatch.STREAM_TOKENS:
            return (
                f"up to {_cuda_dispatch.STREAM_TOKENS} rows, one pass over the packed weights bounds the time"
                if kernel_us is not None
                else f"on {platform} the packed weights are read whatever the number of rows"
            )
        if kernel_us > dequantize_us:
            return "dequantizing weights with a table measured slower"
        return f"the model expects {dequantize_us / kernel_us:.2f} times the speed of dequantizing first"
    if path == "dequantize" and kernel_us is not None:
        return f"the model expects dequantizing first to be {kernel_us / dequantize_us:.2f} times as fast"
    if transpose and platform == "cuda":
        return "the fused kernels of this GPU are expected to be slower than dequantizing first, or need a newer one"
    what = "experts" if experts else "this product"
    return f"there is no fused kernel for {what} here on {platform}"
