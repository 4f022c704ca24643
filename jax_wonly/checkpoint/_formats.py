"""Which tensors of the files make up a weight, format by format, and how each becomes one of ours."""

import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_wonly._format import GROUP_SIZES
from jax_wonly._quantize import quantize
from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import check_choice
from jax_wonly.checkpoint._files import FormatError, GgufFile, SafetensorsFiles
from jax_wonly.compat import PermutedTensor, awq, bitsandbytes, compressed_tensors, gptq, hqq, llama_cpp, mlx, torchao
from jax_wonly.compat._codes import supported_group, words_for

OWN_KEY = "jax_wonly"
OWN_VERSION = 1
INEXACT = ("requantize", "dense", "error")


@dataclass(frozen=True)
class TensorInfo:
    """What a tensor of a checkpoint is, known before it is read.

    Attributes:
      name: such as ``"model.layers.0.mlp.up_proj.weight"``.
      format: ``"dense"``, or how the file stores it: ``"awq"``, ``"gptq"``, ``"Q4_K"``, ...
      shape: of what is read: ``[K, N]`` for a quantized weight, the file's own shape for a dense array.
      bits: of a code in the file; None for a dense array.
      group_size: inputs that share a scale in the file; None for a dense array.
      nbytes: bytes in the file.
      exact: whether a :class:`~jax_wonly.QuantizedTensor` holds the same values.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> jw.checkpoint.save(folder, {"up.weight": jw.quantize(jnp.ones((128, 64)))})
      >>> info = jw.checkpoint.load(folder).info("up.weight")
      >>> info.shape, info.bits, info.group_size, info.exact
      ((128, 64), 4, 128, True)
    """

    name: str
    format: str
    shape: tuple[int, ...]
    bits: int | None
    group_size: int | None
    nbytes: int
    exact: bool


@dataclass(frozen=True)
class Entry:
    """A tensor: what it is, and how to read it; ``dense`` reads a quantized one as float32 ``[K, N]``."""

    info: TensorInfo
    read: Callable[[], Any]
    dense: Callable[[], Any] | None = None

    def load(self, inexact: str):
        """The value, by the rule for weights that the packed format cannot hold."""
        if self.info.exact:
            return self.read()
        if self.dense is None:
            return self.read()  # which says what does not fit
        if inexact == "error":
            raise ValueError(
                f"jax_wonly: {self.info.format} in groups of {self.info.group_size} cannot be held exactly; accepted "
                "with inexact='requantize' or 'dense'."
            )
        weight = self.dense()
        return weight if inexact == "dense" else requantize(weight)


def requantize(weight) -> QuantizedTensor:
    """int8 in groups of 32 inputs (per channel where these do not divide K), the nearest that the format has."""
    k = weight.shape[-2]
    return quantize(weight, bits=8, group_size=GROUP_SIZES[0] if k % GROUP_SIZES[0] == 0 else None)


class Reader:
    """The tensors of safetensors files that no weight has claimed yet."""

    def __init__(self, files: SafetensorsFiles, config: Mapping[str, Any]):
        self.files = files
        self.config = config
        self.left = dict.fromkeys(files)

    def bases(self, *suffixes: str) -> list[str]:
        """What comes before ``suffix`` in the names of the tensors that have it, if they have all of the suffixes."""
        return [
            name[: -len(suffixes[0])]
            for name in list(self.left)
            if name.endswith(suffixes[0]) and all(name[: -len(suffixes[0])] + s in self.files for s in suffixes[1:])
        ]

    def claim(self, base: str, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, str]:
        """Full names by suffix, taken out of what is left.

        Raises:
          FormatError: a required one is missing.
        """
        names = {s: base + s for s in (*required, *optional) if base + s in self.files}
        missing = [base + s for s in required if s not in names]
        if missing:
            raise FormatError(f"jax_wonly: {base} lacks {', '.join(missing)}.")
        for name in names.values():
            self.left.pop(name, None)
        return names

    def shape(self, name: str, rank: int) -> tuple[int, ...]:
        shape = self.files[name].shape
        if len(shape) != rank or 0 in shape:
            raise FormatError(f"jax_wonly: {name} has shape {shape}; accepted: {rank} dimensions, none of them 0.")
        return shape

    def finite(self, name: str) -> np.ndarray:
        """A floating array without NaN and Inf."""
        value = self.files.read(name)
        if value.dtype not in (np.float16, np.float32, ml_dtypes.bfloat16):
            raise FormatError(f"jax_wonly: {name} has dtype {value.dtype}; accepted: float16, bfloat16, float32.")
        if not np.isfinite(value.astype(np.float32)).all():
            raise FormatError(f"jax_wonly: {name} holds NaN or Inf; accepted: finite values.")
        return value

    def nbytes(self, names: Mapping[str, str]) -> int:
        return sum(self.files[name].nbytes for name in names.values())

    def dense(self) -> Iterator[Entry]:
        """What is left, as plain arrays."""
        for name in self.left:
            stored = self.files[name]
            yield Entry(
                TensorInfo(name, "dense", stored.shape, None, None, stored.nbytes, True),
                lambda name=name: plain(self.files.read(name)),
            )


def plain(value: np.ndarray):
    """A JAX array, or the NumPy array where JAX would narrow it."""
    return value if value.dtype.itemsize > 4 else jnp.asarray(value)


def integer(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of the keys that the configuration has, an integer."""
    for key in keys:
        if key in config and config[key] is not None:
            value = config[key]
            if isinstance(value, bool) or not isinstance(value, int):
                raise FormatError(f"jax_wonly: the configuration has {key}={value!r}; accepted: an integer.")
            return value
    if default is None:
        raise FormatError(f"jax_wonly: the configuration has no {keys[0]!r}.")
    return default


def _is_exact(group_size: int, k: int) -> bool:
    try:
        supported_group(group_size, k)
    except ValueError:
        return False
    return True


def _check_one_of(config: Mapping[str, Any], key: str, accepted: tuple, default) -> Any:
    value = config.get(key)
    value = default if value is None else value
    try:
        check_choice(key, value, accepted)
    except ValueError as error:
        raise FormatError(str(error)) from None
    return value


def read_awq(r: Reader) -> Iterator[Entry]:
    _check_one_of(r.config, "version", ("gemm", "GEMM"), "gemm")
    if integer(r.config, "bits", "w_bit", default=4) != 4:
        raise FormatError("jax_wonly: AWQ checkpoints are supported with 4 bits alone.")
    for base in r.bases(".qweight"):
        names = r.claim(base, (".qweight", ".scales"), (".qzeros",))
        k, words = r.shape(names[".qweight"], 2)
        groups, n = r.shape(names[".scales"], 2)
        if k % groups or n != 8 * words:
            raise FormatError(f"jax_wonly: {base} has scales {(groups, n)} for qweight {(k, words)}.")

        def read(names=names):
            zeros = r.files.read(names[".qzeros"]) if ".qzeros" in names else None
            return awq.decode(r.files.read(names[".qweight"]), zeros, r.finite(names[".scales"]))

        exact = _is_exact(k // groups, k)
        yield Entry(TensorInfo(f"{base}.weight", "awq", (k, n), 4, k // groups, r.nbytes(names), exact), read)


def read_gptq(r: Reader) -> Iterator[Entry]:
    version = {"gptq": 1, "gptq_v2": 2}[_check_one_of(r.config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")]
    _check_one_of(r.config, "pack_dtype", ("int32",), "int32")
    of_config = integer(r.config, "bits", default=4)
    for base in r.bases(".qweight"):
        names = r.claim(base, (".qweight", ".qzeros", ".scales"), (".g_idx",))
        rows, n = r.shape(names[".qweight"], 2)
        groups, _ = r.shape(names[".scales"], 2)
        bits = of_config
        if ".g_idx" in names:  # modules may have bits of their own
            (k,) = r.shape(names[".g_idx"], 1)
            bits = next((b for b in gptq.BITS if words_for(k, b) == rows and rows * 32 == k * b), of_config)
        k = rows * 32 // max(bits, 1)
        group_size = r.config.get("group_size")
        if not isinstance(group_size, int) or group_size < 1 or -(-k // group_size) != groups:
            group_size = -(-k // groups)

        def read(names=names, bits=bits, group_size=group_size):
            qzeros = r.files.read(names[".qzeros"])
            if version == 1 and bits == 4 and r.config.get("sym") and (qzeros.view(np.uint32) == 0x88888888).all():
                warnings.warn(
                    f"jax_wonly: {names['.qzeros']} is 8 throughout in a symmetric version 1 checkpoint, which stores "
                    "zeros less one: it is probably of version 2 (checkpoint_format 'gptq_v2').",
                    stacklevel=2,
                )
            g_idx = r.files.read(names[".g_idx"]) if ".g_idx" in names else None
            return gptq.decode(
                r.files.read(names[".qweight"]),
                qzeros,
                r.finite(names[".scales"]),
                g_idx,
                bits=bits,
                version=version,
                group_size=group_size,
            )

        info = TensorInfo(f"{base}.weight", "gptq", (k, n), bits, group_size, r.nbytes(names), _is_exact(group_size, k))
        yield Entry(info, read)


def _compressed_tensors_bits(config: Mapping[str, Any]) -> dict[int, int | None]:
    """The numbers of bits of the configuration's groups, with the group size of each."""
    groups = config.get("config_groups") or {}
    found: dict[int, int | None] = {}
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            if weights.get("type", "int") != "int":
                raise FormatError(f"jax_wonly: weights of type {weights['type']!r} are not supported; accepted: 'int'.")
            size = weights.get("group_size")
            found[integer(weights, "num_bits")] = size if isinstance(size, int) and size > 0 else None
    return found


def read_compressed_tensors(r: Reader) -> Iterator[Entry]:
    _check_one_of(r.config, "format", ("pack-quantized", "int-quantized"), "pack-quantized")
    of_config = _compressed_tensors_bits(r.config)
    ignored = (".input_scale", ".input_zero_point", ".weight_g_idx", ".weight_zero_point")
    for base in r.bases(".weight_packed"):
        names = r.claim(base, (".weight_packed", ".weight_scale", ".weight_shape"), ignored)
        n, words = r.shape(names[".weight_packed"], 2)
        _, groups = r.shape(names[".weight_scale"], 2)
        stored = r.files[names[".weight_shape"]]
        if stored.shape != (2,) or stored.dtype not in ("I64", "I32"):
            raise FormatError(
                f"jax_wonly: {names['.weight_shape']} is {stored.dtype}{stored.shape}; accepted: I64 (2,)."
            )
        shape = [int(size) for size in r.files.read(names[".weight_shape"])]
        k = shape[1]
        fitting = [b for b in (of_config or dict.fromkeys(compressed_tensors.BITS)) if words_for(k, b) == words]
        if shape[0] != n or k < 1 or len(fitting) != 1 or groups > k:
            raise FormatError(
                f"jax_wonly: {base} has weight_packed {(n, words)} and weight_scale {(n, groups)} for weight_shape "
                f"{shape} and {sorted(of_config)} bits."
            )
        bits = fitting[0]
        group_size = of_config.get(bits) or -(-k // groups)
        if -(-k // group_size) != groups:
            group_size = -(-k // groups)

        def read(names=names, bits=bits, shape=tuple(shape), group_size=group_size):
            return compressed_tensors.decode_packed(
                r.files.read(names[".weight_packed"]),
                r.finite(names[".weight_scale"]),
                shape,
                *(r.files.read(names[s]) if s in names else None for s in (".weight_zero_point", ".weight_g_idx")),
                bits=bits,
                group_size=group_size,
            )

        exact = _is_exact(group_size, k)
        info = TensorInfo(f"{base}.weight", "pack-quantized", (k, n), bits, group_size, r.nbytes(names), exact)
        yield Entry(info, read)
    for base in r.bases(".weight", ".weight_scale"):
        names = r.claim(base, (".weight", ".weight_scale"), ignored)
        if r.files[names[".weight"]].dtype != "I8":
            raise FormatError(f"jax_wonly: {base}.weight is {r.files[names['.weight']].dtype}; accepted: I8.")
        n, k = r.shape(names[".weight"], 2)
        scale = r.files[names[".weight_scale"]].shape
        groups = scale[-1] if len(scale) == 2 else 1

        def read_int8(names=names):
            zero = r.files.read(names[".weight_zero_point"]) if ".weight_zero_point" in names else None
            return compressed_tensors.decode_int8(
                r.files.read(names[".weight"]), r.finite(names[".weight_scale"]), zero
            )

        group_size = -(-k // max(groups, 1))
        exact = _is_exact(group_size, k)
        info = TensorInfo(f"{base}.weight", "int-quantized", (k, n), 8, group_size, r.nbytes(names), exact)
        yield Entry(info, read_int8)


_HQQ_SCALARS = (
    ".nbits .group_size .axis .shape .packing .view_as_float .channel_wise .optimize .round_zero .unpack_view_dtype "
    ".compute_dtype .quant_scale .quant_zero .offload_meta .encoded_state_dict .stores_quant_config"
).split()


def read_hqq(r: Reader) -> Iterator[Entry]:
    for base in r.bases(".W_q"):
        names = r.claim(base, (".W_q", ".scale", ".zero", ".nbits", ".shape"), _HQQ_SCALARS)

        def number(suffix: str, default=None, names=names, base=base):
            if suffix not in names:
                return default
            value = r.files.read(names[suffix])
            if value.size != 1 or not np.isfinite(value.astype(np.float64)).all():
                raise FormatError(f"jax_wonly: {base}{suffix} is {value.dtype}{list(value.shape)}; accepted: a number.")
            return int(value.reshape(())[()])

        for suffix in (".quant_scale", ".quant_zero"):
            if number(suffix, 0):
                raise FormatError(f"jax_wonly: {base} has quantized scales or zeros, which are not supported.")
        sizes = r.files.read(names[".shape"])
        shape = [int(size) for size in sizes.reshape(-1)[:3]] if sizes.dtype.kind in "iu" else []
        if len(shape) != 2 or min(shape) < 1:
            raise FormatError(f"jax_wonly: {base}.shape is {shape}; accepted: [N, K].")
        bits, group_size, axis = number(".nbits"), number(".group_size"), number(".axis", 1)
        if bits not in hqq.BITS or axis not in (0, 1) or (group_size is not None and group_size < 1):
            raise FormatError(f"jax_wonly: {base} has nbits={bits}, group_size={group_size}, axis={axis}.")
        as_float = bool(number(".view_as_float", 0))

        def arguments(names=names, shape=tuple(shape), bits=bits, group_size=group_size, axis=axis, as_float=as_float):
            w_q = r.files.read(names[".W_q"])
            if as_float:
                w_q = w_q.view(np.int32 if bits == 3 else np.uint8)
            arrays = (w_q, r.finite(names[".scale"]), r.finite(names[".zero"]), shape)
            return arrays, dict(bits=bits, group_size=group_size, axis=axis)

        def call(function, arguments=arguments):
            arrays, options = arguments()
            return function(*arrays, **options)

        n, k = shape
        exact = axis == 1 and _is_exact(group_size or k, k)
        info = TensorInfo(f"{base}.weight", "hqq", (k, n), bits, group_size or k, r.nbytes(names), exact)
        yield Entry(info, lambda call=call: call(hqq.decode), lambda call=call: call(hqq.dequantize))


def read_mlx(r: Reader) -> Iterator[Entry]:
    for base in r.bases(".scales", ".weight"):
        if r.files[f"{base}.weight"].dtype != "U32":
            continue
        config = {**r.config, **(r.config[base] if isinstance(r.config.get(base), dict) else {})}
        _check_one_of(config, "mode", ("affine",), "affine")
        names = r.claim(base, (".weight", ".scales", ".biases"))
        bits, group_size = integer(config, "bits"), integer(config, "group_size")
        rank = max(len(r.files[names[".weight"]].shape), 2)
        *lead, n, words = r.shape(names[".weight"], rank)
        groups = r.shape(names[".scales"], rank)[-1]
        k = groups * group_size
        if bits not in mlx.BITS or group_size < 1 or words_for(k, bits) != words:
            raise FormatError(
                f"jax_wonly: {base} has {words} words to a row and {groups} groups, which {bits} bits in groups of "
                f"{group_size} do not explain."
            )

        def read(names=names, bits=bits, group_size=group_size):
            return mlx.decode(
                r.files.read(names[".weight"]),
                r.finite(names[".scales"]),
                r.finite(names[".biases"]),
                group_size=group_size,
                bits=bits,
            )

        exact = _is_exact(group_size, k)
        yield Entry(TensorInfo(f"{base}.weight", "mlx", (*lead, k, n), bits, group_size, r.nbytes(names), exact), read)


_BITSANDBYTES_STATE = ".quant_state.bitsandbytes__"


def _bitsandbytes_state(r: Reader, name: str) -> dict[str, Any]:
    """The numbers beside a weight, which are JSON in a tensor of bytes, those that are used checked."""
    data = r.files.read(name)
    try:
        state = json.loads(data.tobytes()) if data.dtype == np.uint8 else None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"jax_wonly: {name} is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise FormatError(f"jax_wonly: {name} is {data.dtype}{list(data.shape)}; accepted: an object as JSON in uint8.")
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or any(type(s) is not int or s < 1 for s in shape):
        raise FormatError(f"jax_wonly: {name} has shape={shape!r}; accepted: [N, K].")
    for key, default in (("blocksize", None), ("nested_blocksize", 1)):
        if integer(state, key, default=default) < 1:
            raise FormatError(f"jax_wonly: {name} has {key}={state[key]}; accepted: at least 1.")
    offset = state.get("nested_offset", 0.0)
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not np.isfinite(np.float32(offset)):
        raise FormatError(f"jax_wonly: {name} has nested_offset={offset!r}; accepted: a finite number.")
    return state


def read_bitsandbytes(r: Reader) -> Iterator[Entry]:
    for kind in ("nf4", "fp4"):
        for base in r.bases(_BITSANDBYTES_STATE + kind):
            state_key = _BITSANDBYTES_STATE + kind
            nested = base + ".nested_absmax" in r.files
            parts = ("", ".absmax", ".quant_map", state_key)
            names = r.claim(base, (*parts, ".nested_absmax", ".nested_quant_map") if nested else parts)
            state = _bitsandbytes_state(r, names[state_key])
            n, k = state["shape"]
            blocksize = state["blocksize"]
            if nested and not {"nested_blocksize", "nested_offset"} <= set(state):
                raise FormatError(f"jax_wonly: {names[state_key]} lacks nested_blocksize or nested_offset.")

            def call(function, names=names, state=state, nested=nested):
                absmax = r.files.read(names[".absmax"]) if nested else r.finite(names[".absmax"])
                if nested:
                    absmax = bitsandbytes.dequantize_absmax(
                        absmax,
                        r.finite(names[".nested_absmax"]),
                        r.finite(names[".nested_quant_map"]),
                        state["nested_offset"],
                        nested_blocksize=state["nested_blocksize"],
                    )
                weight = r.files.read(names[""]).reshape(-1).view(np.uint8)
                quant_map = r.finite(names[".quant_map"])
                return function(weight, absmax, quant_map, tuple(state["shape"]), blocksize=state["blocksize"])

            exact = _is_exact(math.gcd(k, blocksize), k)
            yield Entry(
                TensorInfo(base, kind, (k, n), 4, blocksize, r.nbytes(names), exact),
                lambda call=call: call(bitsandbytes.decode),
                lambda call=call: call(bitsandbytes.dequantize),
            )


_TORCHAO = re.compile(r"(?P<base>.*?)(?::|\._(?P<parameter>\w+?)_)qdata")


def read_torchao(r: Reader) -> Iterator[Entry]:
    for name in list(r.left):
        if not (match := _TORCHAO.fullmatch(name)):
            continue
        prefix = name[: -len("qdata")]
        tensor = match["base"] + (f".{match['parameter']}" if match["parameter"] else "")
        described = r.files.metadata.get(tensor)
        if described is not None:
            try:
                kind = json.loads(described)["_type"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise FormatError(f"jax_wonly: the metadata of {tensor} is not torchao's: {error!r}") from error
            if kind != "Int4Tensor":
                raise FormatError(f"jax_wonly: {tensor} is a torchao {kind}; accepted: Int4Tensor, the plain packing.")
        if prefix + "act_pre_scale" in r.files:
            raise FormatError(f"jax_wonly: {tensor} scales its activations (act_pre_scale), which is not supported.")
        names = r.claim(prefix, ("qdata", "scale", "zero_point"))
        shape = r.files[name].shape
        scale = r.files[names["scale"]].shape
        if len(shape) not in (2, 3) or len(scale) != len(shape) or 0 in shape + scale or 2 * shape[-1] % scale[-2]:
            raise FormatError(f"jax_wonly: {tensor} has scale {scale} for qdata {shape}.")
        k, n = 2 * shape[-1], shape[-2]

        def read(names=names):
            return torchao.decode(r.files.read(names["qdata"]), r.finite(names["scale"]), r.finite(names["zero_point"]))

        size = k // scale[-2]
        info = TensorInfo(tensor, "torchao", (*shape[:-2], k, n), 4, size, r.nbytes(names), _is_exact(size, k))
        yield Entry(info, read)
    for name in list(r.left):
        if name.endswith(":_data"):
            stored = r.files[name]
            r.left.pop(name)
            info = TensorInfo(name[: -len(":_data")], "dense", stored.shape, None, None, stored.nbytes, True)
            yield Entry(info, lambda name=name: plain(r.files.read(name)))


def read_own(r: Reader) -> Iterator[Entry]:
    versions, entries = set(), []
    try:
        # Each file describes its own tensors.
        for text in (metadata[OWN_KEY] for metadata in r.files.metadata_of_files if OWN_KEY in metadata):
            header = json.loads(text)
            versions.add(header["version"])
            entries += [(str(name), dict(meta)) for name, meta in header["tensors"].items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"jax_wonly: the metadata {OWN_KEY!r} is not that of jax_wonly.checkpoint: {error!r}"
        ) from error
    if versions != {OWN_VERSION}:
        found = ", ".join(sorted(map(repr, versions)))
        raise FormatError(f"jax_wonly: the file is of version {found}; accepted: {OWN_VERSION}.")
    for name, meta in entries:
        names = r.claim(name, (".qvalue", ".scales"), (".zeros", ".offsets", ".permutation"))
        try:
            bits, k, n = (int(meta[key]) for key in ("bits", "k", "n"))
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"jax_wonly: {name} lacks sound bits, k and n in the metadata: {error!r}") from error
        lead = r.shape(names[".qvalue"], len(r.files[names[".qvalue"]].shape))[:-3]
        groups = (r.files[names[".scales"]].shape or (1,))[-2:][0]

        def read(name=name, names=names, meta=meta, k=k):
            arrays = {full: r.files.read(full) for full in names.values()}
            weight = QuantizedTensor.from_arrays(arrays, {f"{name}.{key}": str(v) for key, v in meta.items()}, name)
            permutation = arrays.get(f"{name}.permutation")
            if permutation is None:
                return weight
            if permutation.dtype != np.int32 or not np.array_equal(np.sort(permutation), np.arange(k)):
                raise FormatError(f"jax_wonly: {name}.permutation is not an order of 0 to {k - 1}.")
            return PermutedTensor(weight, jnp.asarray(permutation))

        info = TensorInfo(name, "jax_wonly", (*lead, k, n), bits, k // max(groups, 1), r.nbytes(names), True)
        yield Entry(info, read)


READERS: dict[str, Callable[[Reader], Iterator[Entry]]] = {
    "jax_wonly": read_own,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "gptq": read_gptq,
    "compressed-tensors": read_compressed_tensors,
    "hqq": read_hqq,
    "mlx": read_mlx,
    "torchao": read_torchao,
    "dense": lambda r: iter(()),
}

# What a quantized tensor of another kind leaves behind, so that it is not taken for a dense one.
_RELICS = (
    ".qweight",
    ".qzeros",
    ".W_q",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".absmax",
    ".SCB",
    ":qdata",
)


def read_safetensors(files: SafetensorsFiles, config: Mapping[str, Any], format: str) -> Iterator[Entry]:
    """Every tensor of the files.

    Raises:
      FormatError: they are not as the format has them, or hold quantized tensors of another.
    """
    reader = Reader(files, config)
    yield from READERS[format](reader)
    for name in reader.left:
        if name.endswith(_RELICS) or ".quant_state." in name or name.endswith("_qdata"):
            raise FormatError(
                f"jax_wonly: {name} belongs to a quantized weight, but not of the format {format!r}; accepted formats: "
                f"{', '.join(map(repr, READERS))} (LLM.int8, fp8 and fp4 are not supported)."
            )
    yield from reader.dense()


_GGUF_DENSE = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


def read_gguf(file: GgufFile) -> Iterator[Entry]:
    """Every tensor of the file; those of types that are not supported raise when they are read."""
    for name, stored in file.items():
        if stored.dtype in _GGUF_DENSE:
            info = TensorInfo(name, "dense", stored.shape, None, None, stored.nbytes, True)

            def read(name=name, dtype=_GGUF_DENSE[stored.dtype]):
                return plain(np.ascontiguousarray(file.read(name)).view(dtype))

            yield Entry(info, read)
            continue
        kind = stored.dtype
        shape = (*stored.shape[:-2], *stored.shape[-2:][::-1])
        if kind not in llama_cpp.KINDS or len(shape) < 2:

            def refuse(kind=kind, shape=stored.shape):
                raise FormatError(
                    f"jax_wonly: {kind} of shape {shape} is not supported; accepted: matrices of "
                    f"{', '.join(llama_cpp.KINDS)}."
                )

            yield Entry(TensorInfo(name, kind, stored.shape, None, None, stored.nbytes, True), refuse)
            continue

        def fields(function, name=name, kind=kind):
            blocks = np.ascontiguousarray(file.read(name))
            value = function(blocks, kind)
            parts = value if isinstance(value, QuantizedTensor) else (value,)
            if not all(bool(jnp.isfinite(part).all()) for part in parts if jnp.issubdtype(part.dtype, jnp.floating)):
                raise FormatError("jax_wonly: its scales hold NaN or Inf; accepted: finite values.")
            return value

        of = llama_cpp.KINDS[kind]
        info = TensorInfo(name, kind, shape, of.bits, of.group, stored.nbytes, of.group in GROUP_SIZES)
        yield Entry(
            info,
            lambda fields=fields: fields(llama_cpp.decode),
            lambda fields=fields: fields(llama_cpp.dequantize),
        )
