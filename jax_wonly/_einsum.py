"""``einsum`` and ``dot_general`` with a quantized weight on the right."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax

from jax_wonly._contraction import Einsum, Kernel, Labels, contract
from jax_wonly._format import check_array, check_size
from jax_wonly._tensor import QuantizedTensor, check_parts


def einsum(
    equation: str,
    x,
    qt: QuantizedTensor,
    *,
    axis_sizes: Mapping[str, int] | None = None,
    preferred_element_type=None,
    precision=None,
    implementation: str | None = None,
) -> jax.Array:
    """:func:`jax.numpy.einsum` of an equation that is one product with a quantized weight.

    ``einsum("btd,dhk->bthk", x, qt, axis_sizes={"h": 8})`` projects to eight heads with ``qt [D, 8 * head]``, and
    ``einsum("bthk,hkd->btd", y, qt)`` back with ``qt [8 * head, D]``: the weight has its inputs joined into K and its
    outputs into N, in the order of the equation. Its leading axes have one letter each.

    Args:
      equation: ``"x,weight->result"``. The letters of the weight are those of its leading axes, then its inputs (in x
        and not in the result), then its outputs (in the result and not in x). A letter of a leading axis that x lacks
        gives a product for each entry. ``...`` may stand for axes of x and of the result.
      x: float16, bfloat16 or float32.
      qt: a :class:`QuantizedTensor` ``[..., K, N]``.
      axis_sizes: the sizes of outputs, where there are several; one of them may be left out.
      preferred_element_type, precision, implementation: as in :func:`jax_wonly.matmul`.

    Returns:
      The result, with the axes that the equation says.

    Raises:
      TypeError: an argument has a wrong type or dtype.
      ValueError: the equation is not one such product, or the shapes do not fit it.

    Example:
      >>> x = jnp.ones((2, 5, 128))
      >>> query = jw.quantize(jnp.ones((128, 4 * 16)))
      >>> jw.einsum("btd,dhk->bthk", x, query, axis_sizes={"h": 4}).shape
      (2, 5, 4, 16)
    """
    _check_right("einsum", "x", "qt", x, qt)
    if not isinstance(equation, str):
        raise TypeError(f"jax_wonly: equation is a {type(equation).__name__}; accepted: a str 'x,weight->result'.")
    if not isinstance(axis_sizes, Mapping | None):
        raise TypeError(
            f"jax_wonly: axis_sizes is a {type(axis_sizes).__name__}; accepted: a mapping of axes to sizes."
        )
    parsed = Einsum.parse(equation)
    rhs = parsed.kernel.axes
    lhs, result = parsed.expand(len(x.shape))
    known: dict[Hashable, int] = {
        label: check_size(f"axis_sizes[{label!r}]", size) for label, size in (axis_sizes or {}).items()
    }
    stacked = len(qt.shape) - 2
    if unknown := [label for label in known if label not in rhs[stacked:] or label in lhs]:
        raise ValueError(
            f"jax_wonly: axis_sizes has {unknown[0]!r}; accepted: outputs of the weight, "
            f"{[label for label in rhs[stacked:] if label not in lhs]}."
        )
    return _product(
        f"the equation {equation!r}",
        "x",
        x,
        qt,
        lhs,
        rhs,
        result,
        known,
        preferred_element_type=preferred_element_type,
        precision=precision,
        implementation=implementation,
    )


def dot_general(
    lhs,
    rhs: QuantizedTensor,
    dimension_numbers: tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]],
    precision=None,
    preferred_element_type=None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """:func:`jax.lax.dot_general` with a quantized weight on the right.

    Args:
      lhs: float16, bfloat16 or float32.
      rhs: a :class:`QuantizedTensor` ``[..., K, N]``.
      dimension_numbers: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``, where the weight is summed
        over its axis K alone and batched over leading axes only.
      precision, preferred_element_type, implementation: as in :func:`jax_wonly.matmul`.

    Returns:
      Batch axes, other axes of lhs, other leading axes of rhs, and N.

    Raises:
      TypeError: an argument has a wrong type or dtype.
      ValueError: the dimension numbers are not one such product, or the shapes do not fit.

    Example:
      >>> x, experts = jnp.ones((8, 4, 128)), jw.quantize(jnp.ones((8, 128, 64)))
      >>> jw.dot_general(x, experts, (((2,), (1,)), ((0,), (0,)))).shape
      (8, 4, 64)
    """
    _check_right("dot_general", "lhs", "rhs", lhs, rhs)
    said = f"dimension_numbers={dimension_numbers!r}"
    try:
        pairs = [tuple(tuple(int(i) for i in axes) for axes in pair) for pair in dimension_numbers]
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = pairs
    except (TypeError, ValueError):
        raise TypeError(
            f"jax_wonly: {said}; accepted: ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))."
        ) from None
    ndim, weight_ndim = len(lhs.shape), len(rhs.shape)
    for name, axes, limit in (("lhs", lhs_sum + lhs_batch, ndim), ("rhs", rhs_sum + rhs_batch, weight_ndim)):
        if len(set(axes)) < len(axes) or any(not 0 <= i < limit for i in axes):
            raise ValueError(f"jax_wonly: {said} does not name different axes 0 to {limit - 1} of {name}.")
    if len(lhs_sum) != len(rhs_sum) or len(lhs_batch) != len(rhs_batch):
        raise ValueError(f"jax_wonly: {said} pairs different numbers of axes.")
    if rhs_sum != (weight_ndim - 2,) or any(i >= weight_ndim - 2 for i in rhs_batch):
        raise ValueError(
            f"jax_wonly: {said} is not one product with a weight of shape {rhs.shape}; accepted: a sum over its axis "
            f"{weight_ndim - 2} (K), and batch axes before it. Use rhs.dequantize() for others."
        )
    labels: list[Hashable] = [f"rhs axis {i}" for i in range(weight_ndim)]
    of_lhs: Labels = tuple(range(ndim))
    for i, j in zip(lhs_sum + lhs_batch, rhs_sum + rhs_batch, strict=True):
        labels[j] = i
    free = [i for i in range(ndim) if i not in lhs_sum + lhs_batch]
    result = (*lhs_batch, *free, *(label for label in labels if label not in of_lhs))
    return _product(
        said,
        "lhs",
        lhs,
        rhs,
        of_lhs,
        tuple(labels),
        result,
        {},
        preferred_element_type=preferred_element_type,
        precision=precision,
        implementation=implementation,
    )


def _check_right(function: str, left: str, right: str, x, qt) -> None:
    if isinstance(x, QuantizedTensor):
        raise TypeError(
            f"jax_wonly: {left} is a QuantizedTensor; accepted: {function} with one on the right, as {right}, alone."
        )
    check_array(left, x)
    if not isinstance(qt, QuantizedTensor):
        own = f"{'jax.numpy' if function == 'einsum' else 'jax.lax'}.{function}"
        raise TypeError(
            f"jax_wonly: {right} is a {type(qt).__name__}; accepted: a QuantizedTensor (use {own} for arrays)."
        )
    check_parts(right, qt)


def _product(
    said: str, name: str, x, qt: QuantizedTensor, lhs: Labels, rhs: Labels, result: Labels, known: dict, **options: Any
) -> jax.Array:
    """The product of labelled axes; ``said`` and ``name`` are it and x in messages, ``known`` are sizes of outputs."""
    stacked = len(qt.shape) - 2
    lead, own = rhs[:stacked], rhs[stacked:]
    inputs = tuple(label for label in own if label in lhs)
    outputs = tuple(label for label in own if label not in lhs)
    if own != inputs + outputs or not inputs or not outputs or any(label in result for label in inputs):
        hint = (
            "quantize the dense kernel with its axes in that order, those of the inputs joined into K and those of "
            "the outputs into N"
        )
        raise ValueError(
            f"jax_wonly: {said} does not fit a weight of shape {qt.shape}; accepted: {stacked} leading axes, then "
            f"inputs that are summed, then outputs ({hint})."
        )
    if summed := [label for label in lead if label not in result]:
        raise ValueError(
            f"jax_wonly: {said} sums over {summed[0]!r}, a leading axis of the weight; accepted: leading axes that the "
            "result keeps. Sum the result, or quantize that axis as a part of K."
        )
    length = dict(zip(lhs, x.shape, strict=True))
    sizes = dict(zip(lead, qt.shape, strict=False)) | {label: length[label] for label in inputs}
    if math.prod(sizes[label] for label in inputs) != qt.k:
        raise ValueError(
            f"jax_wonly: {name} has shape {tuple(x.shape)}, whose summed axes have "
            f"{[sizes[label] for label in inputs]} elements; accepted: a product of K = {qt.k}."
        )
    missing = [label for label in outputs if label not in known]
    given = math.prod(known[label] for label in outputs if label in known)
    if len(missing) > 1 or given < 1 or qt.n % given or (not missing and given != qt.n):
        raise ValueError(
            f"jax_wonly: axis_sizes={known} does not say how the N = {qt.n} outputs are split into {list(outputs)}; "
            f"accepted: sizes with the product {qt.n}, of all of them but one."
        )
    sizes |= known | dict.fromkeys(missing, qt.n // given)

    batch = tuple(label for label in lead if label in lhs)
    each = tuple(label for label in lead if label not in lhs)
    kernel = Kernel((*batch, *inputs, *outputs), batch, inputs, outputs)
    inner = tuple(label for label in result if label not in each)

    def function(x, qt):
        return contract(x, qt, lhs, kernel, inner, sizes, **options)

    # Innermost last: the leading axes before this one that are left are those of the batch.
    for label in reversed(each):
        before = [other for other in lead[: lead.index(label)] if other in batch]
        function = jax.vmap(function, in_axes=(None, len(before)))
    y = function(x, qt)
    made = (*each, *inner)
    return y.transpose([made.index(label) for label in result])
