"""Contractions of an input with a kernel of any axes, as one product with a weight ``[batch..., K, N]``.

The axes of input, kernel and result have labels: letters of an equation, or numbers. A label of the kernel is *batch*
where all three have it, an *input* where only the input has it too, an *output* where only the result has it too. The
weight keeps the batch axes, and joins the others into K and N.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_wonly._matmul import matmul
from jax_wonly._tensor import QuantizedTensor

Labels = tuple[Hashable, ...]


@dataclass(frozen=True)
class Kernel:
    """The labels of a kernel's axes in order, and the parts they play."""

    axes: Labels
    batch: Labels
    inputs: Labels
    outputs: Labels

    def sizes(self, shape: Sequence[int]) -> dict[Hashable, int]:
        """The size of every label, from the shape of a kernel, which may have leading axes more."""
        return dict(zip(self.axes, shape[len(shape) - len(self.axes) :], strict=True))

    def arrange(self, kernel: jax.Array) -> jax.Array:
        """The kernel as ``[..., batch..., K, N]``."""
        stacked = kernel.ndim - len(self.axes)
        sizes = self.sizes(kernel.shape)
        order = [stacked + self.axes.index(label) for label in (*self.batch, *self.inputs, *self.outputs)]
        kept = kernel.shape[:stacked] + tuple(sizes[label] for label in self.batch)
        k, n = (math.prod(sizes[label] for label in labels) for labels in (self.inputs, self.outputs))
        return kernel.transpose(*range(stacked), *order).reshape(*kept, k, n)

    def arrange_bias(self, bias: jax.Array, result: Sequence[Hashable], sizes: Mapping[Hashable, int]) -> jax.Array:
        """A bias over the kernel's axes of the result, in the result's order, as ``[batch..., N]``."""
        labels = [label for label in result if label in self.batch or label in self.outputs]
        bias = bias.reshape([sizes[label] for label in labels])
        bias = bias.transpose([labels.index(label) for label in (*self.batch, *self.outputs)])
        return bias.reshape(*(sizes[label] for label in self.batch), -1)


def as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    """Axes or sizes as Flax's layers take them: one, or several."""
    return (value,) if isinstance(value, int) else tuple(value)


def dense_general(batch: Sequence[int], axis: Sequence[int], outputs: int, ndim: int) -> tuple[Labels, Kernel, Labels]:
    """The labels of input, kernel and result of a layer over several axes, as ``jax.lax.dot_general`` orders them.

    Args:
      batch, axis: the axes of the input, none of them negative, that go with the kernel's first axes.
      outputs: how many axes follow in the kernel.
      ndim: of the input.
    """
    made = tuple(range(ndim, ndim + outputs))
    free = tuple(a for a in range(ndim) if a not in batch and a not in axis)
    kernel = Kernel((*batch, *axis, *made), tuple(batch), tuple(axis), made)
    return tuple(range(ndim)), kernel, (*batch, *free, *made)


@dataclass(frozen=True)
class Einsum:
    """An equation that is one product: the labels of input, kernel and result. ``...`` stands for any axes."""

    lhs: Labels
    kernel: Kernel
    result: Labels

    @classmethod
    def parse(cls, equation: str) -> "Einsum":
        """Reads an equation with the kernel as its second operand.

        Raises:
          ValueError: it is no such equation, or needs more than one product; the message says what of it.
        """

        def refuse(why: str):
            return ValueError(f"jax_wonly: the equation {equation!r} is not one product with a kernel: {why}.")

        operands, arrow, result_text = equation.replace(" ", "").partition("->")
        texts = operands.split(",")
        if not arrow or len(texts) != 2:
            raise refuse("it is not of the form 'input,kernel->result'")
        lhs, rhs, result = (
            tuple(part for chunk in (text.partition("...")) for part in ([chunk] if chunk == "..." else chunk))
            for text in (*texts, result_text)
        )
        for labels in (lhs, rhs, result):
            if any(not (label == "..." or label.isalpha()) for label in labels):
                raise refuse("its axes are not letters")
            if len(set(labels)) < len(labels):
                raise refuse("it repeats an axis")
        if "..." in rhs:
            raise refuse("its kernel has an ellipsis")
        if ("..." in lhs) != ("..." in result):
            raise refuse("only one of input and result has an ellipsis")
        if unknown := sorted(set(result) - set(lhs) - set(rhs)):
            raise refuse(f"no operand has the axis {unknown[0]!r}")
        if alone := sorted(set(rhs) - set(lhs) - set(result)):
            raise refuse(f"it sums the axis {alone[0]!r} of the kernel alone")
        if alone := sorted(set(lhs) - set(rhs) - set(result)):
            raise refuse(f"it sums the axis {alone[0]!r} of the input alone")
        kernel = Kernel(
            rhs,
            tuple(label for label in rhs if label in lhs and label in result),
            tuple(label for label in rhs if label in lhs and label not in result),
            tuple(label for label in rhs if label not in lhs),
        )
        if not kernel.inputs:
            raise refuse("it sums over nothing")
        return cls(lhs, kernel, result)

    def expand(self, ndim: int) -> tuple[Labels, Labels]:
        """The labels of an input of ``ndim`` axes and of its result, every axis with one of its own."""
        more = ndim - len(self.lhs) + ("..." in self.lhs)
        if more < 0 or ("..." not in self.lhs and more):
            raise ValueError(
                f"jax_wonly: x has {ndim} axes; accepted: those of '{''.join(map(str, self.lhs))}' in the equation."
            )

        def fill(labels: Labels) -> Labels:
            return tuple(part for label in labels for part in (range(more) if label == "..." else [label]))

        return fill(self.lhs), fill(self.result)


def contract(
    x: jax.Array,
    weight: QuantizedTensor,
    lhs: Labels,
    kernel: Kernel,
    result: Labels,
    sizes: Mapping[Hashable, int],
    bias: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """The contraction of ``x`` with a kernel whose weight is ``[batch..., K, N]``.

    Args:
      x: the input, an axis for each label of ``lhs``.
      weight: of the kernel that ``kernel`` describes.
      lhs: labels of the input.
      kernel: labels of the kernel; those of its batch and of its inputs are in ``lhs``.
      result: labels of the result.
      sizes: of the kernel's labels.
      bias: in the order of the result, over those of its axes that the kernel has.
      **options: of ``jax_wonly.matmul``.

    Raises:
      ValueError: an axis of ``x`` is not as long as that of the kernel.
    """
    length = dict(zip(lhs, x.shape, strict=True))
    wrong = [label for label in (*kernel.batch, *kernel.inputs) if length[label] != sizes[label]]
    if wrong:
        raise ValueError(
            f"jax_wonly: x has shape {tuple(x.shape)}; accepted: {sizes[wrong[0]]} in axis {lhs.index(wrong[0])}, as "
            "the kernel has."
        )
    free = [label for label in lhs if label not in kernel.axes]
    batch, rows = [length[label] for label in kernel.batch], [length[label] for label in free]
    x = x.transpose([lhs.index(label) for label in (*kernel.batch, *free, *kernel.inputs)])
    x = x.reshape(*batch, *([math.prod(rows)] if batch else rows), weight.k)
    if bias is not None:
        bias = kernel.arrange_bias(bias, result, sizes)
    y = matmul(x, weight, bias=bias, **options)
    made = (*kernel.batch, *free, *kernel.outputs)
    y = y.reshape(*batch, *rows, *(sizes[label] for label in kernel.outputs))
    return y.transpose([made.index(label) for label in result])
