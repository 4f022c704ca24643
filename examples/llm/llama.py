"""A LLaMA-style decoder in Flax nnx, and text generation with it.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. Queries, keys and values are one product, and so are gate
and up, so that a layer has four. ``jax_wonly.nnx.quantize`` quantizes every product of the model, the head included.
Sizes and their names are those of a LLaMA ``config.json``.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import safetensors
from flax import nnx
from jax import lax
from safetensors.flax import save_file

from decode_attention import decode_attention, supports

Cache = list[tuple[jax.Array, jax.Array]]
"""For each layer keys and values, ``[batch, key-value heads, capacity, head size]``."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a LLaMA-style decoder, named as in the ``config.json`` of a checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads or self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of num_key_value_heads="
                f"{self.num_key_value_heads}, and hidden_size={self.hidden_size} an even multiple of both"
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads


LLAMA_3_8B = Config(128256, 4096, 14336, 32, 32, 8, max_position_embeddings=8192, rope_theta=500000.0)
SMALL = Config(2048, 256, 768, 6, 4, 2)
"""The model that is trained here, 5.8 million parameters."""


def rotation(config: Config, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of the rotary angles, float32 ``[length, 1, head size / 2]``."""
    exponents = jnp.arange(0, config.head_size, 2, dtype=jnp.float32) / config.head_size
    angles = positions[:, None, None].astype(jnp.float32) * config.rope_theta**-exponents
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns pairs of ``x [batch, length, heads, head size]``, whose members are half a head apart."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(q: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array | int) -> jax.Array:
    """Attention of the tokens at ``position`` and after it to the cache, where they have been written already.

    Args:
      q: ``[batch, length, heads, head size]``.
      keys, values: ``[batch, key-value heads, capacity, head size]``.
      position: of the first of the tokens.

    Returns:
      ``[batch, length, heads, head size]``.
    """
    batch, length, heads, size = q.shape
    q = q.reshape(batch, length, keys.shape[1], -1, size)
    logits = jnp.einsum("btkgd,bksd->bktgs", q, keys, preferred_element_type=jnp.float32) * size**-0.5
    seen = jnp.arange(keys.shape[2]) <= position + jnp.arange(length)[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None], logits, -jnp.inf)).astype(values.dtype)
    return jnp.einsum("bktgs,bksd->btkgd", weights, values).reshape(batch, length, heads, size)


class RMSNorm(nnx.Module):
    """``x * scale / rms(x)`` in two parts: ``x * scale``, and the squares that give the factor for a product with it.

    The factor of a row can wait until after the product, where what reads the product applies it. Before the product it
    would have to wait for the whole row, in a kernel of its own.
    """

    def __init__(self, size: int, *, epsilon: float, dtype, param_dtype):
        self.scale = nnx.Param(jnp.ones(size, param_dtype))
        self.epsilon = epsilon
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns ``x * scale [..., size]`` and the sum of squares, float32 ``[..., 1]``."""
        x = x.astype(jnp.float32)
        return (x * self.scale[...]).astype(self.dtype), jnp.sum(x * x, axis=-1, keepdims=True)

    def factor(self, squares: jax.Array) -> jax.Array:
        """Returns ``1 / rms(x)`` for the sum of squares."""
        return lax.rsqrt(squares / self.scale.shape[0] + self.epsilon)


def dropout(x: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


class Block(nnx.Module):
    """One layer: attention and a gated perceptron, each after a norm and added to its input."""

    def __init__(self, config: Config, *, dtype, param_dtype, attention: str, fused_decode: bool, rngs: nnx.Rngs):
        size = config.hidden_size
        self.config = config
        self.attention = attention
        self.fused_decode = fused_decode
        self.heads = config.num_attention_heads, config.num_key_value_heads
        self.dtype = dtype
        norm = functools.partial(RMSNorm, size, epsilon=config.rms_norm_eps, dtype=dtype, param_dtype=param_dtype)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        # What is added to the residual starts small, the smaller the more layers add to it.
        residual = nnx.initializers.variance_scaling(0.5 / config.num_hidden_layers, "fan_in", "truncated_normal")
        self.attention_norm = norm()
        self.qkv = linear(size, (self.heads[0] + 2 * self.heads[1]) * config.head_size)
        self.output = linear(size, size, kernel_init=residual)
        self.mlp_norm = norm()
        self.gate_up = linear(size, 2 * config.intermediate_size)
        self.down = linear(config.intermediate_size, size, kernel_init=residual)

    def __call__(self, x, turn, cache=None, position=0, key=None, rate=0.0):
        keys = (None, None) if key is None else jax.random.split(key)
        attended, cache = self._attention(*self.attention_norm(x), turn, cache, position)
        x = x + dropout(self.output(attended), keys[0], rate)
        scaled, squares = self.mlp_norm(x)
        gate, up = jnp.split(self.gate_up(scaled).astype(jnp.float32) * self.mlp_norm.factor(squares), 2, axis=-1)
        return x + dropout(self.down((nnx.silu(gate) * up).astype(self.dtype)), keys[1], rate), cache

    def _attention(self, x, squares, turn, cache, position):
        heads, shared = self.heads
        qkv = self.qkv(x).reshape(*x.shape[:2], heads + 2 * shared, -1)
        if self.fused_decode and cache is not None and x.shape[1] == 1 and supports(*cache[0].shape[2:]):
            cos, sin = (a[0, 0] for a in turn)
            y, *cache = decode_attention(
                qkv[:, 0],
                squares[:, 0, 0],
                cos,
                sin,
                *cache,
                position,
                heads=heads,
                width=x.shape[-1],
                epsilon=self.config.rms_norm_eps,
            )
            return y.reshape(x.shape), tuple(cache)
        qkv = qkv.astype(jnp.float32) * self.attention_norm.factor(squares)[..., None]
        q, k = rotate(qkv[:, :, :heads], *turn), rotate(qkv[:, :, heads : heads + shared], *turn)
        q, k, v = (a.astype(self.dtype) for a in (q, k, qkv[:, :, heads + shared :]))
        if cache is not None:
            cache = tuple(
                lax.dynamic_update_slice_in_dim(old, new.swapaxes(1, 2).astype(old.dtype), position, axis=2)
                for old, new in zip(cache, (k, v), strict=True)
            )
        if isinstance(position, int) and position == 0:  # nothing came before: the new tokens are all there is
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        else:
            y = attend(q, *cache, position)
        return y.reshape(x.shape), cache


class Llama(nnx.Module):
    """The decoder: token ids to logits.

    Args:
      config: the sizes.
      dtype: of the computation.
      param_dtype: of the parameters.
      attention: implementation of ``jax.nn.dot_product_attention`` for whole prompts, ``"xla"`` or ``"cudnn"``.
      fused_decode: whether single tokens use ``decode_attention``, on a GPU alone.
      rngs: random streams.
    """

    def __init__(
        self,
        config: Config,
        *,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        attention: str = "xla",
        fused_decode: bool = False,
        rngs: nnx.Rngs,
    ):
        size = config.hidden_size
        types = {"dtype": dtype, "param_dtype": param_dtype}
        kinds = {"attention": attention, "fused_decode": fused_decode}
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size, size, embedding_init=nnx.initializers.normal(size**-0.5), rngs=rngs, **types
        )
        self.blocks = nnx.List(Block(config, rngs=rngs, **types, **kinds) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, epsilon=config.rms_norm_eps, **types)
        self.head = nnx.Linear(size, config.vocab_size, use_bias=False, rngs=rngs, **types)

    def __call__(
        self,
        ids: jax.Array,
        cache: Cache | None = None,
        position: jax.Array | int = 0,
        at: jax.Array | int | None = None,
        key: jax.Array | None = None,
        rate: float = 0.0,
    ) -> tuple[jax.Array, Cache | None]:
        """Returns logits, and the cache with these tokens in it.

        Args:
          ids: int32 ``[batch, length]``.
          cache: of the tokens before, or None where there are none and none is wanted.
          position: how many tokens come before; a Python 0 says at compile time that there are none.
          at: the one position of ``ids`` to give logits for; None: all.
          key: random key of the dropout in training; None: no dropout.
          rate: share of each layer's additions that training drops.

        Returns:
          float32 ``[batch, length or 1, vocabulary]``, and the cache.
        """
        x = self.embed(ids)
        turn = rotation(self.config, position + jnp.arange(ids.shape[1]))
        keys = [None] * len(self.blocks) if key is None else list(jax.random.split(key, len(self.blocks)))
        caches = [None] * len(self.blocks) if cache is None else cache
        new = []
        for block, old, subkey in zip(self.blocks, caches, keys, strict=True):
            x, updated = block(x, turn, old, position, subkey, rate)
            new.append(updated)
        if at is not None:
            x = lax.dynamic_slice_in_dim(x, at, 1, axis=1)
        scaled, squares = self.norm(x)
        logits = self.head(scaled).astype(jnp.float32) * self.norm.factor(squares)
        return logits, None if cache is None else new


def empty_cache(config: Config, batch: int, capacity: int, dtype) -> Cache:
    """Returns a cache for ``capacity`` tokens in each of ``batch`` texts."""
    shape = (batch, config.num_key_value_heads, capacity, config.head_size)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_hidden_layers)]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: with ``temperature`` 0 the likeliest, else drawn from the ``top_k`` likeliest."""

    temperature: float = 0.0
    top_k: int = 40

    def __call__(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Returns tokens int32 ``[batch]`` for float32 logits ``[batch, vocabulary]``."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        best, tokens = lax.top_k(logits, min(self.top_k, logits.shape[-1]))
        chosen = jax.random.categorical(key, best / self.temperature)
        return jnp.take_along_axis(tokens, chosen[:, None], axis=-1)[:, 0].astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("graph", "sampling"), donate_argnames="cache")
def prefill(graph, state, cache: Cache, ids, length, key, *, sampling: Sampling = Sampling()):
    """Reads prompts into an empty cache and returns the tokens after them, int32 ``[batch]``, and the cache.

    Args:
      graph, state: of the model, from ``nnx.split``.
      cache: from ``empty_cache``; its buffers are reused for the result.
      ids: int32 ``[batch, padded length]``, all prompts of one length, with anything after it.
      length: of the prompts.
      key: random key of the sampling.
      sampling: how the next token is chosen.
    """
    logits, cache = nnx.merge(graph, state)(ids, cache, 0, at=length - 1)
    return sampling(logits[:, 0], key), cache


@functools.partial(jax.jit, static_argnames=("graph", "steps", "sampling"), donate_argnames="cache")
def decode(graph, state, cache: Cache, token, position, key, *, steps: int, sampling: Sampling = Sampling()):
    """Generates ``steps`` tokens in one program: int32 ``[batch, steps]``, the last of them ``[batch]``, the cache.

    Args:
      graph, state: of the model, from ``nnx.split``.
      cache: of the tokens before; its buffers are reused for the result.
      token: int32 ``[batch]``, the last token, not in the cache yet.
      position: how many tokens the cache holds; it needs room for ``steps`` more.
      key: random key of the sampling.
      steps: how many tokens to generate.
      sampling: how they are chosen.
    """
    model = nnx.merge(graph, state)

    def step(carry, key):
        cache, token, position = carry
        logits, cache = model(token[:, None], cache, position)
        token = sampling(logits[:, 0], key)
        return (cache, token, position + 1), token

    position = jnp.asarray(position, jnp.int32)
    keys = jax.random.split(jax.random.fold_in(key, position), steps)
    (cache, token, _), tokens = lax.scan(step, (cache, token, position), keys)
    return tokens.T, token, cache


def save(model: Llama, path: Path, dtype=jnp.bfloat16) -> None:
    """Writes the parameters, in ``dtype``, and the sizes into one safetensors file."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    arrays = {".".join(map(str, name)): variable[...].astype(dtype) for name, variable in flat}
    partial = path.with_suffix(".partial")
    save_file(arrays, partial, {"config": json.dumps(dataclasses.asdict(model.config))})
    partial.replace(path)


def load(path: Path, dtype=jnp.float32, attention: str = "xla") -> Llama:
    """Returns the model that ``save`` wrote, parameters and computation in ``dtype``.

    Raises:
      FileNotFoundError: the file is not there.
      ValueError: it is damaged, or holds no configuration, or arrays of other shapes.
    """
    try:
        return _load(path, dtype, attention)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _load(path: Path, dtype, attention: str) -> Llama:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; examples/llm/train.py writes such a file")
    with safetensors.safe_open(path, framework="flax") as checkpoint:
        metadata = checkpoint.metadata() or {}
        if "config" not in metadata:
            raise ValueError(f"{path} has no metadata 'config': it is no file of examples/llm/train.py")
        config = Config(**json.loads(metadata["config"]))
        graph, state = nnx.split(
            nnx.eval_shape(lambda: Llama(config, dtype=dtype, param_dtype=dtype, attention=attention, rngs=nnx.Rngs(0)))
        )
        parameters = []
        for name, variable in nnx.to_flat_state(state):
            value = checkpoint.get_tensor(".".join(map(str, name)))
            if value.shape != variable.shape:
                raise ValueError(f"{'.'.join(map(str, name))} is {value.shape} in {path}, not {variable.shape}")
            parameters.append((name, variable.replace(value.astype(dtype))))
    return nnx.merge(graph, nnx.from_flat_state(parameters))
