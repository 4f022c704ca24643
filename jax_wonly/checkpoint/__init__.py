"""Checkpoints of quantized weights: read those of other systems, write ours and theirs::

    checkpoint = jax_wonly.checkpoint.load("path/to/folder")
    print(checkpoint)
    y = x @ checkpoint["model.layers.0.mlp.up_proj.weight"]

Needs safetensors: ``pip install 'jax-wonly[checkpoint]'`` (GGUF files do not). Nothing is ever unpickled or evaluated.
"""

import warnings
from collections import Counter
from collections.abc import ItemsView, Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_wonly._validate import check_choice
from jax_wonly.checkpoint._files import (
    FormatError,
    GgufFile,
    SafetensorsFiles,
    as_path,
    is_gguf,
    read_json,
    refuse_pickle,
    safetensors_paths,
)
from jax_wonly.checkpoint._formats import (
    INEXACT,
    OWN_KEY,
    READERS,
    Entry,
    TensorInfo,
    read_gguf,
    read_safetensors,
)
from jax_wonly.checkpoint._save import save
from jax_wonly.compat import PermutedTensor
from jax_wonly.progress import progress as progress_bar

# load_into and tensors_of are here too, once asked for.
__all__ = ["Checkpoint", "FormatError", "PermutedTensor", "TensorInfo", "load", "save"]

FORMATS = ("auto", "gguf", *READERS)


class Checkpoint(Mapping[str, Any]):
    """The tensors of a checkpoint, each read when it is asked for, and not kept. Made by :func:`load`.

    A value is a :class:`~jax_wonly.QuantizedTensor` or :class:`~jax_wonly.PermutedTensor` ``[K, N]`` (inputs by
    outputs), or a dense array exactly as stored: PyTorch's ``[out, in]`` in most of these formats.

    Attributes:
      path: where it was found.
      format: how it is stored.
      config: the configuration of its quantization, or the metadata of a GGUF file.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> jw.checkpoint.save(folder, {"up.weight": jw.quantize(jnp.ones((128, 64))), "norm.scale": jnp.ones(64)})
      >>> ck = jw.checkpoint.load(folder)
      >>> ck.format, list(ck)
      ('jax_wonly', ['up.weight', 'norm.scale'])
      >>> ck["up.weight"]
      QuantizedTensor(int4[128, 64], group_size=128, symmetric, scales float32, 4.2 KiB)
    """

    def __init__(self, path: Path, format: str, config: Mapping[str, Any], entries: Iterator[Entry], **options: Any):
        self.path = path
        self.format = format
        self.config = config
        self._inexact: str = options["inexact"]
        self._progress: bool = options["progress"]
        self._entries: dict[str, Entry] = {}
        for entry in entries:
            if entry.info.name in self._entries:
                raise FormatError(f"jax_wonly: {path} has two tensors that are called {entry.info.name!r}.")
            self._entries[entry.info.name] = entry

    def __getitem__(self, name: str):
        entry = self._entries[name]
        try:
            return entry.load(self._inexact)
        except (TypeError, ValueError) as error:
            raise FormatError(f"jax_wonly: tensor {name!r} of {self.path}: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # that of Mapping would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> ItemsView[str, Any]:
        """Names and values, with a progress bar if the checkpoint was loaded with one."""
        return _Items(self)

    def info(self, name: str) -> TensorInfo:
        """What the tensor ``name`` is, without reading it; KeyError if there is none."""
        return self._entries[name].info

    def _requantized(self) -> list[str]:
        return [name for name, entry in self._entries.items() if not entry.info.exact and entry.dense is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(entry.info.nbytes for entry in self._entries.values())

    def __str__(self) -> str:
        kinds = Counter((e.info.format, e.info.bits, e.info.group_size, e.info.exact) for e in self._entries.values())
        lines = [f"{self.path}: {self.format}, {len(self)} tensors, {self.nbytes / 1e6:.1f} MB"]
        for (format, bits, group_size, exact), count in sorted(kinds.items(), key=lambda kind: -kind[1]):
            scheme = f", {bits} bits in groups of {group_size}" if bits else ""
            lines.append(f"  {count:5d}  {format}{scheme}{'' if exact else f' (inexact: {self._inexact})'}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.format!r}, {len(self)} tensors)"


class _Items(ItemsView):
    def __iter__(self) -> Iterator[tuple[str, Any]]:
        checkpoint: Checkpoint = self._mapping  # type: ignore[assignment]
        names = list(checkpoint)
        for name in progress_bar(names, "load", unit="tensors") if checkpoint._progress and names else names:
            yield name, checkpoint[name]


def load(
    path, format: str = "auto", *, inexact: str = "requantize", progress: bool = False, config: Mapping | None = None
) -> Checkpoint:
    """Opens a checkpoint. Headers are read and checked at once, tensors when they are asked for.

    Args:
      path: a safetensors or GGUF file, or a folder with safetensors files and a ``config.json``.
      format: ``"auto"`` (from the configuration, else from the names of the tensors), ``"jax_wonly"``, ``"awq"``,
        ``"bitsandbytes"``, ``"gptq"``, ``"compressed-tensors"``, ``"hqq"``, ``"mlx"``, ``"torchao"``, ``"gguf"`` or
        ``"dense"``.
      inexact: what to do with weights that the packed format cannot hold, which are GGUF's Q6_K, HQQ's axis 0, groups
        that are no multiple of 32, and blocks of bitsandbytes that have no such group in common with K:
        ``"requantize"`` (int8 in groups of 32, with a warning), ``"dense"`` (float32 ``[K, N]``) or ``"error"``.
      progress: whether iterating over the tensors draws a progress bar on standard error.
      config: the configuration of the quantization, instead of the one beside the files.

    Raises:
      ImportError: safetensors is not installed.
      FileNotFoundError: there is nothing at ``path``.
      FormatError: (a ``ValueError``) the files are damaged, pickles, or of a format that is not supported.
      ValueError: ``format`` or ``inexact`` is not one of those accepted.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> jw.checkpoint.save(folder, {"up.weight": jw.quantize(jnp.ones((128, 64)))}, format="gptq")
      >>> ck = jw.checkpoint.load(folder)
      >>> ck.format, ck["up.weight"].shape
      ('gptq', (128, 64))
    """
    for name, value, accepted in (("format", format, FORMATS), ("inexact", inexact, INEXACT)):
        check_choice(name, value, accepted)
    if not isinstance(config, Mapping | None):
        raise TypeError(f"jax_wonly: config is a {type(config).__name__}; accepted: a mapping, or None.")
    path = as_path(path)
    if not path.exists():
        raise FileNotFoundError(f"jax_wonly: {path} does not exist.")
    if path.is_file():
        refuse_pickle(path)
    options = {"inexact": inexact, "progress": progress}
    if path.is_file() and (format == "gguf" or (format == "auto" and is_gguf(path))):
        file = GgufFile(path)
        checkpoint = Checkpoint(path, "gguf", file.metadata, read_gguf(file), **options)
    else:
        files = SafetensorsFiles(safetensors_paths(path))
        found = _config_beside(path) if config is None else dict(config)
        format = _detect(files, found) if format in ("auto", "gguf") else format
        checkpoint = Checkpoint(path, format, found, read_safetensors(files, found, format), **options)
    inexpressible = checkpoint._requantized()
    if inexpressible and inexact == "requantize":
        warnings.warn(
            f"jax_wonly: {len(inexpressible)} tensors of {path}, such as {inexpressible[0]!r}, cannot be held exactly, "
            "and will be int8 in groups of 32; pass inexact='dense' for float32 arrays of the same values.",
            stacklevel=2,
        )
    return checkpoint


def _config_beside(path: Path) -> dict[str, Any]:
    """The configuration of the quantization, from any of the files that have held one."""
    folder = path if path.is_dir() else path.parent
    for name, keys in (
        ("config.json", ("quantization_config", "quantization")),
        ("quantize_config.json", ()),
        ("quant_config.json", ()),
    ):
        if (folder / name).is_file():
            config = read_json(folder / name)
            found = next((config[key] for key in keys if key in config), config if not keys else None)
            if found is not None:
                if not isinstance(found, dict):
                    raise FormatError(
                        f"jax_wonly: the quantization of {folder / name} is {found!r}; accepted: an object."
                    )
                return found
    return {}


_METHODS = ("awq", "bitsandbytes", "gptq", "compressed-tensors", "hqq", "torchao")


def _detect(files: SafetensorsFiles, config: Mapping[str, Any]) -> str:
    if OWN_KEY in files.metadata:
        return "jax_wonly"
    method = config.get("quant_method")
    if any(".quant_state.bitsandbytes__" in name for name in files):
        method = "bitsandbytes"
    if method is not None:
        if method not in _METHODS:
            raise FormatError(
                f"jax_wonly: checkpoints of quant_method={method!r} are not supported; accepted: "
                f"{', '.join(map(repr, _METHODS))}."
            )
        return method
    endings = {name[name.rfind(".") :] for name in files}
    if ".W_q" in endings:
        return "hqq"
    if ".weight_packed" in endings:
        return "compressed-tensors"
    if ".qweight" in endings:
        base = next(name for name in files if name.endswith(".qweight"))[: -len("qweight")]
        outputs = files[base + "scales"].shape[-1:] if base + "scales" in files else None
        return "gptq" if base + "g_idx" in files or files[base + "qweight"].shape[-1:] == outputs else "awq"
    if any(name.endswith(("qdata", ":_data")) for name in files):
        return "torchao"
    if ".scales" in endings and ".biases" in endings and {"bits", "group_size"} <= set(config):
        return "mlx"
    return "dense"


def __getattr__(name: str):
    if name in ("load_into", "tensors_of", "PermutedLinear", "LoadReport"):  # these need Flax, which is optional
        from jax_wonly.checkpoint import nnx

        return getattr(nnx, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
