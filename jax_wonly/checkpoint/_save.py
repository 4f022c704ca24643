"""Writing checkpoints: our own safetensors, GPTQ's and compressed-tensors'."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_wonly._tensor import QuantizedTensor
from jax_wonly._validate import check_choice
from jax_wonly.checkpoint._files import as_path, replace_atomically
from jax_wonly.checkpoint._formats import OWN_KEY, OWN_VERSION
from jax_wonly.compat import PermutedTensor, compressed_tensors, gptq
from jax_wonly.compat._codes import pack, unpack
from jax_wonly.progress import progress as progress_bar

FORMATS = ("jax_wonly", "gptq", "compressed-tensors")
_Arrays = dict[str, np.ndarray]


def save(
    path,
    tensors,
    format: str = "jax_wonly",
    *,
    max_file_bytes: int = 5 << 30,
    version: int = 1,
    progress: bool = False,
) -> None:
    """Writes tensors as safetensors. The same tensors give the same bytes.

    Args:
      path: a folder, which is made if need be; or, for ``"jax_wonly"``, a file that ends in ``.safetensors``.
      tensors: names with a :class:`~jax_wonly.QuantizedTensor`, :class:`~jax_wonly.PermutedTensor` or dense
        array each, such as a :class:`~jax_wonly.checkpoint.Checkpoint`; or, for ``"jax_wonly"``, a Flax nnx model.
      format: ``"jax_wonly"`` (every weight, as it is), ``"gptq"`` or ``"compressed-tensors"`` (symmetric weights and
        integer zeros; a name that ends in ``.weight`` gives its parts). Dense arrays are written as they are, so that
        for the latter two they must be in PyTorch's layout.
      max_file_bytes: a folder gets a further file, and an index, beyond this.
      version: 1 or 2, of GPTQ.
      progress: whether to draw a progress bar on standard error.

    Raises:
      ImportError: safetensors is not installed.
      TypeError: ``tensors`` is neither a mapping nor a model, or a value is no array.
      ValueError: the format cannot hold a weight, or is not one of those accepted. Nothing has been written then.

    Example:
      >>> import pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> jw.checkpoint.save(folder, {"up.weight": jw.quantize(jnp.ones((128, 64)))}, format="compressed-tensors")
      >>> sorted(file.name for file in folder.iterdir())
      ['config.json', 'model.safetensors']
    """
    try:
        from safetensors.numpy import save as serialize
    except ImportError as error:
        raise ImportError("jax_wonly.checkpoint needs safetensors: pip install 'jax-wonly[checkpoint]'") from error

    check_choice("format", format, FORMATS)
    path = as_path(path)
    if path.suffix == ".safetensors" and format != "jax_wonly":
        raise ValueError(f"jax_wonly: path={str(path)!r} is a file; accepted for {format!r}: a folder.")
    if not isinstance(tensors, Mapping):
        from jax_wonly.checkpoint.nnx import tensors_of

        if format != "jax_wonly":
            raise TypeError(
                f"jax_wonly: tensors is a {type(tensors).__name__}; accepted for {format!r}: a mapping with the names "
                "that its readers expect."
            )
        tensors = tensors_of(tensors)
    names = sorted(tensors)
    if progress and names:
        names = progress_bar(names, "save", total=len(names), unit="tensors")
    parts: list[tuple[_Arrays, dict[str, Any]]] = [({}, {})]
    size = 0
    config: dict[str, Any] = {}
    written: set[str] = set()
    for name in names:
        arrays, described = _parts(name, tensors[name], format, version, config)
        if taken := written & set(arrays):
            raise ValueError(f"jax_wonly: two tensors would be written as {sorted(taken)[0]!r}.")
        written |= set(arrays)
        nbytes = sum(a.nbytes for a in arrays.values())
        if size and size + nbytes > max_file_bytes and path.suffix != ".safetensors":
            parts.append(({}, {}))
            size = 0
        size += nbytes
        parts[-1][0].update(arrays)
        parts[-1][1].update(described)

    files = {}
    for i, (arrays, described) in enumerate(parts):
        # One key: the order of several is that of a hash table.
        header = {OWN_KEY: _canonical_json({"version": OWN_VERSION, "tensors": described})}
        name = path.name if path.suffix == ".safetensors" else _file_name(i, len(parts))
        files[name] = serialize(arrays, header if format == "jax_wonly" else {"format": "pt"})
    if path.suffix == ".safetensors":
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(path, files[path.name])
        return
    path.mkdir(parents=True, exist_ok=True)
    if len(parts) > 1:
        where = {name: _file_name(i, len(parts)) for i, (arrays, _) in enumerate(parts) for name in arrays}
        total = sum(a.nbytes for arrays, _ in parts for a in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        files["model.safetensors.index.json"] = _canonical_json(index, indent=2).encode()
    if config:
        files["config.json"] = _canonical_json({"quantization_config": config}, indent=2).encode()
    for name, data in files.items():
        replace_atomically(path / name, data)


def _file_name(i: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _canonical_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, sort_keys=True, indent=indent, separators=None if indent else (",", ":"))


def _parts(
    name: str, value: Any, format: str, version: int, config: dict[str, Any]
) -> tuple[_Arrays, dict[str, dict[str, Any]]]:
    """The arrays of one tensor by full name, and its entry in our metadata; ``config`` is filled in for the others."""
    if not isinstance(value, QuantizedTensor | PermutedTensor):
        if not (hasattr(value, "dtype") and hasattr(value, "shape")):
            raise TypeError(f"jax_wonly: {name} is a {type(value).__name__}; accepted: weights and arrays.")
        return {name: np.asarray(value)}, {}
    weight = value.weight if isinstance(value, PermutedTensor) else value
    if format == "jax_wonly":
        # Padding is not part of the value, and must not be part of the bytes.
        qvalue = pack(unpack(weight.qvalue, weight.bits, weight.k, weight.n), weight.bits)
        arrays, described = dataclasses.replace(weight, qvalue=qvalue).to_arrays()
        if isinstance(value, PermutedTensor):
            arrays["permutation"] = value.permutation
        return {f"{name}.{part}": np.asarray(a) for part, a in arrays.items()}, {name: described}
    base = name.removesuffix(".weight")
    try:
        encode = compressed_tensors.encode_packed if format == "compressed-tensors" else gptq.encode
        arrays = encode(value) if format == "compressed-tensors" else gptq.encode(value, version=version)
        _describe(base, value, weight, format, version, config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"jax_wonly: {name} cannot be written as {format!r}: {error}") from error
    return {f"{base}.{part}": np.asarray(a) for part, a in arrays.items()}, {}


def _describe(
    base: str, value: Any, weight: QuantizedTensor, format: str, version: int, config: dict[str, Any]
) -> None:
    """Adds a weight to the configuration of the whole checkpoint, which must then be true of all its weights."""
    group_size = -1 if weight.group_size == weight.k else weight.group_size
    act_order = isinstance(value, PermutedTensor)
    symmetric = weight.zeros is None
    if format == "gptq":
        scheme = {"bits": weight.bits, "group_size": group_size}
        if config and any(config[key] != scheme[key] for key in scheme):
            raise ValueError(
                f"jax_wonly: it has {scheme}, and others { ({k: config[k] for k in scheme}) }; GPTQ has one."
            )
        config.update(
            scheme,
            quant_method="gptq",
            checkpoint_format="gptq" if version == 1 else "gptq_v2",
            sym=config.get("sym", True) and symmetric,
            desc_act=config.get("desc_act", False) or act_order,
        )
        return
    config.setdefault("quant_method", "compressed-tensors")
    config.setdefault("format", "pack-quantized")
    config.setdefault("quantization_status", "compressed")
    weights = {
        "num_bits": weight.bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "actorder": "group" if act_order else None,
    }
    groups = config.setdefault("config_groups", {})
    same = [group for group in groups.values() if group["weights"] == weights]
    if not same:
        same = [groups.setdefault(f"group_{len(groups)}", {"targets": [], "weights": weights})]
    same[0]["targets"].append(base)
