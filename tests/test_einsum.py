"""``einsum`` and ``dot_general`` with a quantized weight, against ``numpy`` and ``jax.lax``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import MODES, random_weight, random_x

import jax_wonly as jw

CALL = 'custom_call_target="wonly_matmul_v1"'


def calls(f, *args) -> int:
    return jax.jit(f).lower(*args).compile().as_text().count(CALL)


# equation, shape of x, leading axes of the weight, axis_sizes, shape of the dense kernel
EQUATIONS = [
    ("bd,df->bf", (3, 64), (), {}, (64, 70)),
    ("btd,dhk->bthk", (2, 3, 64), (), {"h": 7}, (64, 7, 10)),
    ("btd,dhk->bhtk", (2, 3, 64), (), {"h": 7, "k": 10}, (64, 7, 10)),
    ("bthk,hkd->btd", (2, 3, 4, 16), (), {}, (4, 16, 70)),
    ("...hk,hkd->...d", (2, 3, 4, 16), (), {}, (4, 16, 70)),
    ("dbt,df->tfb", (64, 2, 3), (), {}, (64, 70)),
    ("ebd,edf->ebf", (3, 5, 64), (3,), {}, (3, 64, 70)),
    ("bed,edhk->hbek", (5, 3, 64), (3,), {"k": 7}, (3, 64, 10, 7)),
    ("bd,edf->bef", (5, 64), (3,), {}, (3, 64, 70)),
    ("bld,eldf->belf", (5, 2, 64), (3, 2), {}, (3, 2, 64, 70)),
    ("ld,lemdf->melf", (2, 64), (2, 3, 4), {}, (2, 3, 4, 64, 70)),
    ("d,df->f", (64,), (), {}, (64, 70)),
]


@pytest.mark.parametrize(("equation", "shape", "lead", "axis_sizes", "dense"), EQUATIONS)
def test_einsum(rng, equation, shape, lead, axis_sizes, dense):
    weight = random_weight(rng, 64, 70, group_size=32, mode=str(rng.choice(MODES)), lead=lead)
    x = random_x(rng, shape)

    def f(x, qt):
        return jw.einsum(equation, x, qt, axis_sizes=axis_sizes)

    y = f(x, weight.qt)
    expected = np.einsum(equation, np.asarray(x, np.float64), weight.dense.reshape(dense))
    assert y.shape == expected.shape and y.dtype == jnp.float32
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    assert calls(f, x, weight.qt) == 1
    dx = jax.grad(lambda x: (f(x, weight.qt) ** 2).sum() / 2)(x)
    back = jax.vjp(lambda x: jnp.einsum(equation, x, weight.dense.reshape(dense), precision="highest"), x)[1]
    np.testing.assert_allclose(dx, back(y)[0], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("shape", "lead", "numbers"),
    [
        ((5, 64), (), (((1,), (0,)), ((), ()))),
        ((2, 64, 5), (), (((1,), (0,)), ((), ()))),
        ((3, 5, 64), (3,), (((2,), (1,)), ((0,), (0,)))),
        ((5, 64, 3, 2), (2, 3), (((1,), (2,)), ((3, 2), (0, 1)))),
        ((5, 64, 3, 2), (2, 3), (((1,), (2,)), ((2, 3), (1, 0)))),
        ((5, 64), (2, 3), (((1,), (2,)), ((), ()))),
        ((3, 5, 64), (2, 3), (((2,), (2,)), ((0,), (1,)))),
    ],
)
def test_dot_general(rng, shape, lead, numbers):
    weight = random_weight(rng, 64, 70, group_size=32, mode="float_zeros", lead=lead)
    x = random_x(rng, shape)
    dense = jnp.asarray(weight.dense, jnp.float32)
    y = jw.dot_general(x, weight.qt, numbers)
    expected = jax.lax.dot_general(x, dense, numbers, precision="highest")
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    assert calls(lambda x, qt: jw.dot_general(x, qt, numbers), x, weight.qt) == 1


def test_options(rng):
    weight = random_weight(rng, 64, 70, group_size=32)
    x = random_x(rng, (3, 64), "bfloat16")
    y = jw.einsum("bd,df->bf", x, weight.qt, preferred_element_type=jnp.float32, implementation="xla")
    assert y.dtype == jnp.float32
    assert jw.dot_general(x, weight.qt, (([1], [0]), ([], [])), "highest").dtype == jnp.bfloat16


def test_errors(rng):
    qt = random_weight(rng, 64, 70, group_size=32).qt
    stack = random_weight(rng, 64, 70, group_size=32, lead=(3,)).qt
    x = random_x(rng, (3, 64))
    numbers = (((1,), (0,)), ((), ()))
    for error, message, call in [
        (ValueError, "not of the form", lambda: jw.einsum("bd,df", x, qt)),
        (ValueError, "not of the form", lambda: jw.einsum("bd,df,fg->bg", x, qt)),
        (ValueError, "sums the axis 'f' of the kernel alone", lambda: jw.einsum("bd,df->b", x, qt)),
        (ValueError, "sums over nothing", lambda: jw.einsum("bd,ef->bdef", x, qt)),
        (ValueError, r"then inputs that are summed, then outputs", lambda: jw.einsum("bd,fd->bf", x, qt)),
        (ValueError, r"weight of shape \(3, 64, 70\)", lambda: jw.einsum("bd,df->bf", x, stack)),
        (ValueError, "sums over 'b', a leading axis", lambda: jw.einsum("bd,bdf->f", x, stack)),
        (ValueError, r"summed axes have \[32\] elements; .* K = 64", lambda: jw.einsum("bd,df->bf", x[:, :32], qt)),
        (ValueError, r"N = 70 outputs are split into \['h', 'k'\]", lambda: jw.einsum("bd,dhk->bhk", x, qt)),
        (ValueError, r"axis_sizes=\{'h': 3\}", lambda: jw.einsum("bd,dhk->bhk", x, qt, axis_sizes={"h": 3})),
        (ValueError, "axis_sizes has 'b'", lambda: jw.einsum("bd,df->bf", x, qt, axis_sizes={"b": 3})),
        (ValueError, "x has 2 axes", lambda: jw.einsum("btd,df->btf", x, qt)),
        (TypeError, "x is a QuantizedTensor; accepted: .* on the right", lambda: jw.einsum("df,fb->db", qt, x)),
        (TypeError, "use jax.numpy.einsum", lambda: jw.einsum("bd,df->bf", x, x.T)),
        (TypeError, "equation is a tuple", lambda: jw.einsum((0, 1), x, qt)),
        (ValueError, r"x has shape \(2, 64\)", lambda: jw.einsum("ed,edf->ef", x[:2], stack)),
        (TypeError, r"dimension_numbers=1; accepted", lambda: jw.dot_general(x, qt, 1)),
        (ValueError, "pairs different numbers", lambda: jw.dot_general(x, qt, (((1,), ()), ((), ())))),
        (ValueError, "different axes 0 to 1 of lhs", lambda: jw.dot_general(x, qt, (((2,), (0,)), ((), ())))),
        (ValueError, r"sum over its axis 0 \(K\)", lambda: jw.dot_general(x, qt, (((1,), (1,)), ((), ())))),
        (ValueError, r"sum over its axis 1 \(K\)", lambda: jw.dot_general(x, stack, numbers)),
        (TypeError, "use jax.lax.dot_general", lambda: jw.dot_general(x, x.T, numbers)),
    ]:
        with pytest.raises(error, match=message):
            call()
