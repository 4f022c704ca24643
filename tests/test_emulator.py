"""The emulator of CUDA kernels: it computes what PTX says, and stops where that is undefined (tests/emulator)."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_cases import assert_rows, by_expert
from matmul_cases import SHARED_STRIPS, TILES_OF_TOKENS, check_tiles_of_tokens, product_of, rounds_weights, takes_turns
from reference import MODES, UNITS, as_kernels_see_it, assert_product, random_weight, random_x, repeated

import jax_wonly as jw
from jax_wonly import _cuda_costs, _cuda_dispatch, _selftest

HEAD = """
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 room[];
.visible .entry kernel(.param .u64 x, .param .u64 y)
{
  .reg .pred %p<4>;
  .reg .f32 %f<8>;
  .reg .b32 %r<16>;
  .reg .b64 %rd<8>;
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %rd2, %r0, 4;
  ld.param.u64 %rd0, [x];
  add.s64 %rd0, %rd0, %rd2;
  ld.param.u64 %rd1, [y];
  add.s64 %rd1, %rd1, %rd2;
  shl.b32 %r1, %r0, 2;
  mov.u32 %r2, room;
  add.s32 %r3, %r2, %r1;
"""


@pytest.fixture
def run(emulated):
    def call(body: str, x, y, *, threads=32, shared=0, seed=0, races=False, bounds=""):
        emulated.set_seed(seed)
        emulated.watch_races(races)
        arrays = [(a.ctypes.data, a.nbytes) for a in (x, y)]
        arguments = [address for address, _ in arrays]
        text = HEAD.replace("\n{", f"\n{bounds}\n{{", 1) + f"{body}\n}}\n"
        emulated.run_ptx(text, "kernel", [1], threads, 1, shared, arguments, arrays)

    return call


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32 %r5, %r4, 7;", lambda x: x + 7),
        ("shr.s32 %r5, %r4, 3;", lambda x: x >> 3),
        ("shr.u32 %r5, %r4, 40;", lambda x: x * 0),
        ("mul.hi.u32 %r5, %r4, %r4;", lambda x: (x.astype(np.uint32).astype(np.uint64) ** 2 >> 32).astype(np.int32)),
        ("max.s32 %r5, %r4, -5;", lambda x: np.maximum(x, -5)),
        ("prmt.b32 %r5, %r4, %r4, 0x0123;", lambda x: x.byteswap()),
        ("lop3.b32 %r5, %r4, 255, 170, 0xea;", lambda x: x & 255 | 170),
        ("bfi.b32 %r5, 5, %r4, 4, 8;", lambda x: x & ~0xFF0 | 0x50),
        ("shfl.sync.bfly.b32 %r5|%p1, %r4, 3, 31, -1;", lambda x: x[np.arange(32) ^ 3]),
        ("shfl.sync.idx.b32 %r5|%p1, %r4, 9, 31, -1;", lambda x: x * 0 + x[9]),
        ("shfl.sync.up.b32 %r5|%p1, %r4, 1, 0, -1;", lambda x: x[np.maximum(np.arange(32) - 1, 0)]),
        ("setp.lt.s32 %p1, %r4, 0; selp.b32 %r5, 1, 2, %p1;", lambda x: np.where(x < 0, 1, 2)),
        (
            "mov.u32 %r5, 3; setp.lt.s32 %p1, %r4, 0; @!%p1 bra end; neg.s32 %r5, %r4; end:",
            lambda x: np.where(x < 0, -x, 3),
        ),
        (
            "cvt.rn.f32.s32 %f1, %r4; fma.rn.f32 %f1, %f1, 0f40000000, 0f3F800000; cvt.rzi.s32.f32 %r5, %f1;",
            lambda x: x.astype(np.float32) * np.float32(2) + 1,
        ),
        ("cvt.s32.s8 %r5, %r4;", lambda x: x.astype(np.int8)),
        ("{ .reg .b32 t; add.s32 t, %r4, 1; mov.b32 %r5, t; }", lambda x: x + 1),
    ],
)
def test_instructions(run, rng, instruction, expected):
    x = rng.integers(-(2**20), 2**20, 32, dtype=np.int32)
    y = np.zeros(32, np.int32)
    run(f"ld.global.u32 %r4, [%rd0]; {instruction} st.global.u32 [%rd1], %r5; ret;", x, y)
    np.testing.assert_array_equal(y, expected(x).astype(np.int32))


def test_half_precision(run, rng):
    """Rounded once, subnormal numbers and all."""
    bits = rng.integers(0, 0x7C00, (32, 2), dtype=np.uint16)
    x, y = bits.view(np.float16), np.zeros((32, 2), np.float16)
    run("ld.global.u32 %r4, [%rd0]; fma.rn.f16x2 %r5, %r4, 0x3c013c01, %r4; st.global.u32 [%rd1], %r5; ret;", x, y)
    with np.errstate(over="ignore"):
        exact = x.astype(np.float64) * np.uint16(0x3C01).view(np.float16) + x
        np.testing.assert_array_equal(y, exact.astype(np.float16))


EXCHANGE = """
  ld.global.u32 %r4, [%rd0];
  st.shared.u32 [%r3], %r4;
  {barrier}
  xor.b32 %r5, %r1, 128;
  add.s32 %r5, %r2, %r5;
  ld.shared.u32 %r6, [%r5];
  st.global.u32 [%rd1], %r6;
  ret;
"""
COPY = """
  ld.param.u64 %rd3, [x];
  setp.ne.s32 %p1, %r0, 0;
  @%p1 bra there;
  mbarrier.init.shared::cta.b64 [%r2], 1;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
  add.s32 %r4, %r2, 128;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd3], {bytes}, [%r2];
there:
  bar.sync 0;
  {wait}
  ld.shared.u32 %r6, [%r3+128];
  st.global.u32 [%rd1], %r6;
  {leave}
  ret;
"""
WAIT = "again: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra again;"


def test_threads_meet(run, rng):
    x = rng.integers(0, 1000, 64, dtype=np.int32)
    found = []
    for barrier in "bar.sync 0;", "":
        y = np.zeros(64, np.int32)
        ok = True
        for seed in range(20):
            run(EXCHANGE.format(barrier=barrier), x, y, threads=64, shared=256, seed=seed)
            ok &= np.array_equal(y, np.roll(x, 32))
        found.append(ok)
    assert found == [True, False]  # without the barrier one warp reads what the other has not written


def test_copies_are_waited_for(run, rng):
    x = rng.integers(0, 1000, 32, dtype=np.int32)
    found = []
    for wait in WAIT, "":
        y = np.zeros(32, np.int32)
        ok = True
        for seed in range(20):
            # Without the first wait the copy must still have come before the CTA ends.
            body = COPY.format(bytes=128, wait=wait, leave="" if wait else WAIT)
            run(body, x, y, shared=256, seed=seed)
            ok &= np.array_equal(y, x)
        found.append(ok)
    assert found == [True, False]


TWO = """
  setp.lt.u32 %p1, %r0, 32;
  {first}
  @%p1 {one};
  {between}
  @!%p1 {other};
  {last}
  ret;
"""
STORE, LOAD = "st.shared.u32 [%r2+32], %r0", "ld.shared.u32 %r6, [%r2+32]"
ARRIVE, MEET = "mbarrier.arrive.shared::cta.b64 _, [%r2];", "bar.sync 0;"
INIT = "setp.eq.s32 %p3, %r0, 0; @%p3 mbarrier.init.shared::cta.b64 [%r2], 32; bar.sync 0; setp.lt.u32 %p1, %r0, 32;"


@pytest.mark.parametrize(
    ("body", "races"),
    [
        (EXCHANGE.format(barrier=""), True),
        (EXCHANGE.format(barrier=MEET), False),
        (COPY.format(bytes=128, wait="", leave=WAIT), True),
        (COPY.format(bytes=128, wait=WAIT, leave=""), False),
        (TWO.format(first="", one=STORE, between="", other=LOAD, last=""), True),
        (TWO.format(first="", one=LOAD, between="", other=STORE, last=""), True),
        (TWO.format(first="", one=STORE, between="", other=STORE, last=""), True),
        (TWO.format(first="", one=LOAD, between="", other=LOAD, last=""), False),
        (TWO.format(first="", one=STORE, between=MEET, other=LOAD, last=""), False),
        (TWO.format(first=MEET, one=STORE, between="", other=LOAD, last=MEET), True),
        # By arrivals at an mbarrier, which order what was before them alone.
        (INIT + f"@!%p1 bra other; {STORE}; {ARRIVE} ret; other: {WAIT} {LOAD}; ret;", False),
        (INIT + f"@!%p1 bra other; {ARRIVE} {STORE}; ret; other: {WAIT} {LOAD}; ret;", True),
        (INIT + f"@!%p1 bra other; {STORE}; {ARRIVE} ret; other: {LOAD}; {WAIT} ret;", True),
        ("atom.shared.or.b32 %r6, [%r2], %r0; ret;", False),
    ],
)
def test_races(run, rng, body, races):
    """Told in every order of events, the one where nothing goes wrong included."""
    x, y = rng.integers(0, 9, 64, dtype=np.int32), np.zeros(64, np.int32)
    for seed in range(12):
        if races:
            with pytest.raises(RuntimeError, match="a race in shared memory"):
                run(body, x, y, threads=64, shared=512, seed=seed, races=True)
        else:
            run(body, x, y, threads=64, shared=512, seed=seed, races=True)


@pytest.mark.parametrize(
    ("body", "shared", "message"),
    [
        ("ld.global.u32 %r4, [%rd0+4]; st.global.u32 [%rd1], %r4; ret;", 0, "128 bytes into one of 128"),
        ("ld.global.u32 %r4, [%rd0+-4]; st.global.u32 [%rd1], %r4; ret;", 0, "memory that is nobody's"),
        ("ld.global.u64 %rd4, [%rd0]; st.global.u64 [%rd1], %rd4; ret;", 0, "not aligned"),
        ("st.shared.u32 [%r3+4], %r0; ret;", 128, "shared memory at 128 of 128"),
        ("st.shared.u32 [%r3+2], %r0; ret;", 256, "not aligned"),
        ("bar.sync 1, 64; ret;", 0, "nothing comes on any more"),
        ("bar.arrive 1, 64; ret;", 0, "with threads at barrier 1"),
        ("setp.lt.s32 %p1, %r0, 4; @%p1 bra end; bar.sync 0; end: bar.sync 0; ret;", 0, "wait for each other"),
        ("setp.lt.s32 %p1, %r0, 4; @%p1 bar.sync 0; ret;", 0, "lanes that are not all here"),
        (WAIT + "ret;", 16, "was not initialised"),
        (COPY.format(bytes=112, wait=WAIT, leave=""), 256, "nothing comes on any more"),
        (COPY.format(bytes=128, wait="", leave=""), 256, "copies on their way"),
        (COPY.format(bytes=144, wait=WAIT, leave=""), 512, "memory that is nobody's"),
        ("trap;", 0, "trap"),
        ("frobnicate.u32 %r4, %r5; ret;", 0, "not known: frobnicate.u32"),
    ],
)
def test_faults(run, rng, body, shared, message):
    x, y = rng.integers(0, 9, 32, dtype=np.int32), np.zeros(32, np.int32)
    with pytest.raises(RuntimeError, match=message):
        for seed in range(6):
            run(body, x, y, shared=shared, seed=seed)


MOVE = """
  setp.lt.u32 %p1, %r0, 128;
  @%p1 bra fewer;
  setmaxnreg.inc.sync.aligned.u32 {more};
  ret;
fewer:
  setmaxnreg.dec.sync.aligned.u32 {fewer};
  ret;
"""


@pytest.mark.parametrize(
    ("threads", "ctas", "fewer", "more", "message"),
    [
        (384, 1, 40, 232, None),  # all that 168 for each thread are
        (384, 1, 40, 240, "nothing comes on any more"),
        (640, 1, 32, 112, None),
        (640, 1, 56, 112, "nothing comes on any more"),  # launched with 96, not with 102
        (256, 2, 40, 216, None),
        (256, 2, 40, 224, "nothing comes on any more"),
        (384, 1, 176, 232, "168 registers cannot become 176"),
        (384, 1, 40, 160, "168 registers cannot become 160"),
        (384, 1, 40, 228, "168 registers cannot become 228"),
        (384, 0, 40, 232, "of any number of threads"),
    ],
)
def test_registers_are_those_of_the_launch(run, threads, ctas, fewer, more, message):
    """Who asks for more than others give up waits for ever on a GPU."""
    bounds = f".maxntid {threads}, 1, 1\n.minnctapersm {ctas}" if ctas else ""
    body, x = MOVE.format(fewer=fewer, more=more), np.zeros(threads, np.int32)
    for seed in range(6):
        with pytest.raises(RuntimeError, match=message) if message else contextlib.nullcontext():
            run(body, x, x, threads=threads, seed=seed, bounds=bounds)


@pytest.mark.parametrize("late", [True, False])
def test_cluster_of_one(run, rng, late):
    """There ptxas makes a barrier of all threads of the wait: no warp's may come after another has gone on."""
    x, y = rng.integers(0, 9, 64, dtype=np.int32), np.zeros(64, np.int32)
    meet = "barrier.cluster.wait.aligned;"
    body = f"""
      {INIT}
      barrier.cluster.arrive.relaxed.aligned;
      @%p1 bra other;
      {WAIT} {meet} ret;
    other:
      {meet + ARRIVE if late else ARRIVE + meet} ret;
    """
    if late:
        with pytest.raises(RuntimeError, match="nothing comes on any more|wait for each other"):
            run(body, x, y, threads=64, shared=16)
    else:
        run(body, x, y, threads=64, shared=16)


@pytest.mark.parametrize("target", list(_selftest.CASES))
def test_kernels(emulated, seed, target):
    """What ``doctor`` runs on a GPU."""
    before = emulated.counts()[0]
    with _selftest.compilers() as pool:
        prepared = _selftest.prepare(target, "cuda", jax.devices()[0], seed, pool)
        for outcome in _selftest.run_cases(prepared, [("", lambda: None)]):
            assert outcome.ok, outcome.failures
    assert emulated.counts()[0] > before


@pytest.mark.parametrize("wait", ["bar.sync", "barrier.cluster.wait", "mbarrier.try_wait", "wgmma.wait_group"])
def test_missing_waits_show(emulated, seed, wait):
    """Kernels without one of their waits: some order of events gives other results, or comes to a fault."""

    def shows(number: int) -> bool:
        emulated.leave_out(wait, number)
        for order in (1, 4, 2, 5):  # late copies and products, or late by chance
            emulated.set_seed(order)
            outcomes = _selftest.run_cases(prepared, [("", lambda: None)])
            if any(outcome.failures for outcome in outcomes):
                return True
        return False

    with _selftest.compilers() as pool:
        prepared = _selftest.prepare("wonly_ragged_matmul_v1", "cuda", jax.devices()[0], seed, pool)
        try:
            assert any(shows(number) for number in (2, 3, 1, 0))
        finally:
            emulated.leave_out("", -1)
    assert not any(outcome.failures for outcome in _selftest.run_cases(prepared, [("", lambda: None)]))


@pytest.mark.parametrize("multiprocessors", [3, 7, 10])
def test_even_shares(emulated, rng, monkeypatch, multiprocessors):
    """Products whose stages the CTAs of ``matmul_warpgroup`` share out evenly, on GPUs so small that small ones are."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", multiprocessors))
    emulated.set_gpu(multiprocessors)
    found = 0
    while found < 4:
        tokens = (9, 17) if found == 3 else (17, 150)
        m, k, n = int(rng.integers(*tokens)), 128 * int(rng.integers(5, 24)), int(rng.integers(100, 1200))
        scheme = {"bits": int(rng.choice([4, 8])), "group_size": int(rng.choice([32, 64, 128]))}
        mode, x_dtype = str(rng.choice((*MODES, "table"))), ("bfloat16", "float16", "float32", "bfloat16")[found]
        n = n // 8 * 8 if found else n
        scheme |= {"bits": 4} if mode == "table" else {}
        if chosen_cluster(m, k, n, mode, x_dtype, **scheme) != _cuda_costs.EVENLY:
            continue
        found += 1
        weight = random_weight(rng, k, n, mode=mode, scale_dtype=x_dtype, **scheme)
        x, bias = random_x(rng, (m, k), x_dtype), random_x(rng, (n,))
        how = {"bias": bias, "activation": [None, "relu"][found % 2]}
        y = jw.matmul(x, weight.qt, **how, implementation="cuda")
        close = {"rounded_weights": rounds_weights("cuda", x, weight.qt), "cut_off": True}
        assert_product(y, x, weight, **how, **close)


@pytest.mark.parametrize("scales", ["alike", "float32"])
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", [4, 8])
def test_resident_passes(emulated, rng, monkeypatch, bits, x_dtype, scales):
    """``matmul_resident`` with one, two and four strips of outputs at a time, and one, two and any number of blocks of
    stages for a warp, on a GPU so small that small products have all of that."""
    multiprocessors = int(rng.choice([5, 17]))
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", multiprocessors))
    emulated.set_gpu(multiprocessors)
    scale_dtype = x_dtype if scales == "alike" else "float32"
    wanted = {(strips, blocks) for strips in (1, 2, 4) for blocks in (0, 1, 2)} - {(1, 0)}
    wanted -= {(2, 0)} if scale_dtype == "float32" else set()
    wanted = {(4, blocks) for blocks in (0, 1, 2)} if x_dtype == "float32" else wanted
    while wanted:
        m, k, n = int(rng.integers(1, 9)), 64 * int(rng.integers(1, 160)), int(rng.integers(8, 2500))
        mode, group_size = str(rng.choice(MODES)), int(rng.choice([32, 64, 128]))
        if k * n * bits > 10_000_000 or k % group_size:
            continue
        product = product_of(m, k, n, mode, x_dtype, bits=bits, group_size=group_size, scale_dtype=scale_dtype)
        if _cuda_dispatch.kernel(product) != "matmul_resident":
            continue
        config = min(_cuda_dispatch._resident_times(product), key=lambda pair: pair[1])[0]
        few = _cuda_costs.resident_has_few_blocks(product.scheme, scales == "alike")
        found = config[2], few * _cuda_costs.resident_blocks(m, k, n, bits, config[:3])
        if found not in wanted or config[3] > 1:
            continue
        wanted.remove(found)
        weight = random_weight(rng, k, n, bits=bits, mode=mode, scale_dtype=scale_dtype, group_size=group_size)
        x, bias = random_x(rng, (m, k), x_dtype), random_x(rng, (n,))
        y = jw.matmul(x, weight.qt, bias=bias, activation="relu", implementation="cuda")
        assert_product(y, x, weight, bias=bias, activation="relu", cut_off=True)
        if m > 3 and x_dtype != "float32":  # of one and two rows, or float32 ones, others may be chosen
            few_rows = jw.matmul(x[:3], weight.qt, bias=bias, activation="relu", implementation="cuda")
            np.testing.assert_array_equal(few_rows, y[:3])


@pytest.mark.parametrize(("bits", "mode", "x_dtype"), TILES_OF_TOKENS)
def test_tiles_of_tokens(emulated, rng, monkeypatch, bits, mode, x_dtype):
    """``matmul_resident`` with clusters of their own for each tile of tokens, on a GPU that has room for some."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", 60))
    emulated.set_gpu(60)
    check_tiles_of_tokens(rng, bits=bits, mode=mode, x_dtype=x_dtype, count=2)


@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("modes", [("symmetric", "integer_zeros"), ("float_zeros", "offsets")])
@pytest.mark.parametrize("bits", [4, 8])
def test_resident_turns(emulated, rng, monkeypatch, bits, modes, x_dtype):
    """``matmul_resident`` with more inputs than a CTA has room for, whose pieces take turns, in one CTA and in two,
    with a last piece of any length and half a stage at the end; their sums made meanwhile, or not."""
    wanted = {1, 2} if bits == 4 else {1}  # CTAs of a cluster
    while wanted:
        multiprocessors = int(rng.integers(3, 6))
        monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda of=multiprocessors: ("9.0", of))
        m, k, n = int(rng.integers(1, 9)), 64 * int(rng.integers(200, 500)), int(rng.integers(8, 200))
        mode, group_size = str(rng.choice(modes)), int(rng.choice([32, 64, 128, k]))
        if k * n * bits > 16_000_000 or k % group_size:
            continue
        product = product_of(m, k, n, mode, x_dtype, bits=bits, group_size=group_size)
        if _cuda_dispatch.kernel(product) != "matmul_resident":
            continue
        config = min(_cuda_dispatch._resident_times(product), key=lambda pair: pair[1])[0]
        if config[0] not in wanted or not takes_turns(product, config[:3]):
            continue
        wanted.remove(config[0])
        emulated.set_gpu(multiprocessors)
        weight = random_weight(rng, k, n, bits=bits, mode=mode, scale_dtype=x_dtype, group_size=group_size)
        x = random_x(rng, (m, k), x_dtype)
        y = jw.matmul(x, weight.qt, implementation="cuda")
        assert_product(y, x, weight)


def chosen_cluster(m, k, n, mode, x_dtype, *, bits, group_size) -> int | None:
    """CTAs of ``matmul_warpgroup`` that share a tile's inputs, where that kernel alone is chosen."""
    product = product_of(m, k, n, mode, x_dtype, bits=bits, group_size=group_size)
    if _cuda_dispatch.kernel(product) != "matmul_warpgroup":
        return None
    return min(_cuda_dispatch._warpgroup_times(product), key=lambda pair: pair[1])[0][2]


@pytest.mark.parametrize("shared_bytes", [232448, 100_000])
@pytest.mark.parametrize("multiprocessors", [3, 8, 17])
def test_even_shares_of_experts(emulated, rng, multiprocessors, shared_bytes):
    """Strips of all experts that the CTAs of ``ragged_resident`` share out evenly, on GPUs so small that those of few
    are, and of which they have room for the sums of some at a time."""
    emulated.set_gpu(multiprocessors, shared_bytes)
    for x_dtype in UNITS:
        k, n, experts = 64 * int(rng.integers(2, 40)), 8 * int(rng.integers(8, 200)), int(rng.integers(3, 20))
        mode, group_size = str(rng.choice((*MODES, "table"))), int(rng.choice([32, 64]))
        scheme = {"bits": 4 if mode == "table" else int(rng.choice([4, 8])), "mode": mode, "group_size": group_size}
        weight = random_weight(rng, k, n, lead=(experts,), scale_dtype=x_dtype, **scheme)
        of_kernel = (2, 2 * experts) if scheme["bits"] == 4 else (experts // 2 + 1, min(2 * experts, 32))
        rows = int(rng.integers(*of_kernel, endpoint=True))
        x, bias = random_x(rng, (rows, k), x_dtype), random_x(rng, (experts, n))
        assert jw.explain(x, weight.qt, experts="ids", platform="cuda").kernel == "ragged_resident"
        how = {"bias": bias, "activation": str(rng.choice(["relu", "silu"]))}
        ids = rng.integers(-1, experts + 1, rows).astype(np.int32)
        y = jw.gather_matmul(x, weight.qt, jnp.asarray(ids), implementation="cuda", **how)
        assert_rows(y, x, weight, ids, implementation="cuda" if mode != "table" else None, **how)
        order, sizes = by_expert(ids, experts)
        in_order = jw.ragged_dot(x[order], weight.qt, jnp.asarray(sizes), implementation="cuda", **how)
        np.testing.assert_array_equal(in_order, y[order])


@pytest.mark.parametrize("multiprocessors", [4, 9])
def test_two_kernels(emulated, rng, monkeypatch, multiprocessors):
    """Products of which two kernels have some outputs each: on GPUs so small that small ones are."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", multiprocessors))
    emulated.set_gpu(multiprocessors)
    period, found = 64, 0
    while found < 2:
        m, k, n = int(rng.integers(17, 200)), 128 * int(rng.integers(2, 9)), 8 * int(rng.integers(20, 200))
        scheme = {"bits": int(rng.choice([4, 8])), "group_size": int(rng.choice([32, 64, 128]))}
        few = random_weight(rng, k, period, mode=str(rng.choice(MODES)), scale_dtype="bfloat16", **scheme)
        x, bias, qt = random_x(rng, (m, k), "bfloat16"), random_x(rng, (period,)), repeated(few.qt, n)
        if " + " not in (jw.explain(x, qt, implementation="cuda").kernel or ""):
            continue
        found += 1
        biases = jnp.tile(bias, -(-n // period))[:n]
        activation = [None, "relu"][found % 2]
        y = jw.matmul(x, qt, bias=biases, activation=activation, implementation="cuda")
        close = {"rounded_weights": rounds_weights("cuda", x, qt), "cut_off": True}
        for first in range(0, n, period):
            width = min(period, n - first)
            these = dataclasses.replace(few, dense=few.dense[:, :width], magnitude=few.magnitude[:, :width])
            part = y[:, first : first + width]
            assert_product(part, x, these, bias=bias[:width], activation=activation, **close)


def check_gradient(rng, m, k, n, x_dtype, *, mode, lead=(), own=False, **scheme):
    """Holds the gradient of x to float64; ``own``: scales are of the type of x, and not any of the two."""
    other = "float32" if mode in ("symmetric", "integer_zeros", "table") and not own else x_dtype
    scale_dtype = str(rng.choice([x_dtype, other]))
    weight = random_weight(rng, k, n, lead=lead, mode=mode, scale_dtype=scale_dtype, **scheme)
    dy, x = random_x(rng, (*lead, m, n), x_dtype), jnp.zeros((*lead, m, k), x_dtype)
    product = jax.vmap(jw.matmul) if lead else jw.matmul
    dx = jax.jit(lambda dy, qt: jax.vjp(lambda x: product(x, qt), x)[1](dy)[0])(dy, weight.qt)
    seen = as_kernels_see_it(weight, x_dtype) if mode == "table" else weight
    for i in range(lead[0] if lead else 1):
        of = (i,) if lead else ()
        turned = dataclasses.replace(
            weight, qt=weight.qt[of] if of else weight.qt, dense=seen.dense[of].T, magnitude=seen.magnitude[of].T
        )
        assert_product(dx[of], dy[of], turned, rounded_weights=True, cut_off=x_dtype == "float32")


@pytest.mark.parametrize("multiprocessors", [3, 10, 17, 33])
def test_waves_of_gradients(emulated, rng, monkeypatch, multiprocessors):
    """Gradients on GPUs so small that few strips of inputs run at once, in clusters of up to four, or not, and that a
    CTA walks through its ring of stages many times."""
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", multiprocessors))
    emulated.set_gpu(multiprocessors)
    for x_dtype in 3 * (*UNITS, "bfloat16"):
        m = int(rng.integers(1, 41)) if rng.random() < 0.6 else int(rng.integers(41, 280))
        n = int(rng.integers(60, 700)) if rng.random() < 0.7 else 16 * int(rng.integers(50, 130))
        k = 64 * int(rng.integers(max(1, multiprocessors // 5), 2 * multiprocessors + 3))
        mode, group_size = str(rng.choice([*MODES, "table"])), int(rng.choice([32, 64]))
        scheme = {"bits": 4 if mode == "table" else int(rng.choice([4, 8])), "mode": mode, "group_size": group_size}
        check_gradient(rng, m, k, n, x_dtype, lead=() if rng.random() < 0.7 else (2,), **scheme)


@pytest.mark.parametrize("m", SHARED_STRIPS)
def test_shared_strips_of_gradients(emulated, rng, monkeypatch, m):
    """Every way in which CTAs of fewer than eight warps share multiprocessors (``test_shared_strips`` in
    ``test_dispatcher.py``)."""
    multiprocessors, cases = SHARED_STRIPS[m]
    monkeypatch.setattr(_cuda_dispatch, "_gpu", lambda: ("9.0", multiprocessors))
    emulated.set_gpu(multiprocessors)
    for strips, n in cases:
        scheme = {"bits": 4, "mode": "symmetric", "group_size": int(rng.choice([32, 64])) if m <= 16 else 64}
        check_gradient(rng, m, 64 * strips, n, str(rng.choice(["bfloat16", "float16"])), own=True, **scheme)
