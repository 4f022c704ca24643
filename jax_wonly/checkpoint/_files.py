"""Tensors in files, read one by one through a memory map. Sizes and offsets are checked before anything is read."""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_JSON_LIMIT = 64 << 20  # bytes; an index of a million tensors is smaller


class FormatError(ValueError):
    """A file does not say what its format says it would.

    Example:
      >>> import pathlib, tempfile
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
      >>> _ = file.write_bytes(b"not a checkpoint")
      >>> try:
      ...     jw.checkpoint.load(file)
      ... except jw.checkpoint.FormatError as error:
      ...     print(type(error).__name__, isinstance(error, ValueError))
      FormatError True
    """


def as_path(path: Any) -> Path:
    """The argument ``path`` of a function.

    Raises:
      TypeError: it is none.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"jax_wonly: path is a {type(path).__name__}; accepted: a str or a path.")
    return Path(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      FormatError: the file is no JSON object, or larger than any configuration.
    """
    if path.stat().st_size > _JSON_LIMIT:
        raise FormatError(f"jax_wonly: {path} has {path.stat().st_size} bytes; accepted: up to {_JSON_LIMIT}.")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"jax_wonly: {path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"jax_wonly: {path} holds a {type(value).__name__}; accepted: a JSON object.")
    return value


@dataclass(frozen=True)
class Stored:
    """Where a tensor is: its type as the file names it, its shape there, and its size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class _Tensors(Mapping[str, Stored]):
    """What a file says of its tensors, by name."""

    _stored: dict[str, Stored]

    def __getitem__(self, name: str) -> Stored:
        return self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class SafetensorsFiles(_Tensors):
    """The tensors of one or several safetensors files, by name."""

    def __init__(self, paths: list[Path]):
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError("jax_wonly.checkpoint needs safetensors: pip install 'jax-wonly[checkpoint]'") from error

        self._error = SafetensorError
        self._stored: dict[str, Stored] = {}
        self._files: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}
        self.metadata_of_files: list[dict[str, str]] = []
        for path in paths:
            try:
                file = safe_open(path, framework="numpy")
                names = file.keys()
                self.metadata_of_files.append(file.metadata() or {})
                self.metadata |= self.metadata_of_files[-1]
                for name in names:
                    if name in self._stored:
                        raise FormatError(f"jax_wonly: tensor {name!r} is in several files of {path.parent}.")
                    part = file.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
                    self._stored[name] = Stored(dtype, shape, math.prod(shape) * _BITS.get(dtype, 8) // 8)
                    self._files[name] = file
            except (SafetensorError, OSError, UnicodeDecodeError) as error:
                raise FormatError(f"jax_wonly: {path} is not a sound safetensors file: {error}") from error

    def read(self, name: str) -> np.ndarray:
        """The tensor as a NumPy array (bfloat16 through ``ml_dtypes``).

        Raises:
          FormatError: its type has no NumPy equivalent.
        """
        try:
            return self._files[name].get_tensor(name)
        except (self._error, TypeError, AttributeError, KeyError, ValueError) as error:
            raise FormatError(f"jax_wonly: {name} ({self._stored[name].dtype}) cannot be read: {error}") from error


_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}


def safetensors_paths(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint: ``path`` itself, those of its index, or the one in the folder.

    Raises:
      FileNotFoundError: there is none.
      FormatError: the index names files elsewhere, or there are only pickles.
    """
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
            raise FormatError(f"jax_wonly: {index} has no weight_map of tensor and file names.")
        files = sorted(set(names.values()))
        for name in files:
            if not name.endswith(".safetensors") or Path(name).name != name or "\\" in name:
                raise FormatError(f"jax_wonly: {index} names {name!r}; accepted: safetensors files in the same folder.")
        missing = [name for name in files if not (path / name).is_file()]
        if missing:
            raise FileNotFoundError(f"jax_wonly: {path} lacks {', '.join(missing)}, which its index names.")
        return [path / name for name in files]
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if found:
        return found
    pickles = sorted(p.name for p in path.glob("*") if p.suffix in _PICKLES) if path.is_dir() else []
    if pickles:
        raise FormatError(
            f"jax_wonly: {path} has only pickles ({', '.join(pickles[:3])}), which run code when they are read; "
            "accepted: safetensors and GGUF. Convert them where you trust them."
        )
    raise FileNotFoundError(f"jax_wonly: {path} has no safetensors file.")


def refuse_pickle(path: Path) -> None:
    if path.suffix in _PICKLES:
        raise FormatError(
            f"jax_wonly: {path} is a pickle, which runs code when it is read; accepted: safetensors and GGUF. Convert "
            "it where you trust it."
        )


# --- GGUF ---
# Read here rather than by the `gguf` package, whose reader loops for as long as a damaged count says.

_GGUF_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_DEPTH = 4  # arrays within arrays
_GGUF_DIMENSIONS = 4

# name, weights in a block, bytes of a block
GGUF_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


@dataclass
class _Cursor:
    """Reads forward and never beyond the end."""

    data: np.ndarray
    at: int = 0
    path: Any = field(default="")

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int, what: str) -> np.ndarray:
        if size > self.left:
            raise FormatError(
                f"jax_wonly: {self.path} ends inside {what}: {size} bytes at offset {self.at} of {len(self.data)}."
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, kind: str, what: str) -> int:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), what).tobytes())[0]

    def count(self, each: int, what: str) -> int:
        """A number of things of at least ``each`` bytes, which must follow."""
        count = self.number("Q", what)
        if count * each > self.left:
            raise FormatError(f"jax_wonly: {self.path} says {count} {what}, more than its {self.left} bytes hold.")
        return count

    def string(self, what: str) -> str:
        try:
            return self.take(self.count(1, f"bytes of {what}"), what).tobytes().decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"jax_wonly: {self.path} has {what} that is not UTF-8: {error}") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _GGUF_STRING:
            return self.string("a string value")
        if kind == _GGUF_ARRAY and depth < _GGUF_DEPTH:
            of = self.number("I", "an array's type")
            if of in _GGUF_SCALARS:
                dtype = np.dtype(_GGUF_SCALARS[of])
                count = self.count(dtype.itemsize, "array elements")
                return np.frombuffer(self.take(count * dtype.itemsize, "an array").tobytes(), dtype)
            count = self.count(8 if of == _GGUF_STRING else 12, "array elements")
            return [self.value(of, depth + 1) for _ in range(count)]
        if kind not in _GGUF_SCALARS:
            raise FormatError(f"jax_wonly: {self.path} has a metadata value of unknown type {kind} (or too deep).")
        dtype = np.dtype(_GGUF_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize, "a value").tobytes(), dtype)[0].item()


class GgufFile(_Tensors):
    """The tensors of a GGUF file (version 2 or 3, little-endian), by name; shapes are row-major, ``[N, K]``."""

    def __init__(self, path: Path):
        try:
            data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise FormatError(f"jax_wonly: {path} cannot be mapped: {error}") from error
        cursor = _Cursor(data, path=path)
        if cursor.take(4, "the header").tobytes() != b"GGUF":
            raise FormatError(f"jax_wonly: {path} does not begin as a GGUF file does.")
        version = cursor.number("I", "the header")
        if version not in (2, 3):
            raise FormatError(f"jax_wonly: {path} is GGUF version {version}; accepted: 2 and 3, little-endian.")
        tensors = cursor.count(24, "tensors")
        values = cursor.count(13, "metadata values")
        self.metadata: dict[str, Any] = {}
        for _ in range(values):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                raise FormatError(f"jax_wonly: {path} has the metadata {key!r} twice.")
            self.metadata[key] = cursor.value(cursor.number("I", "a metadata type"))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise FormatError(f"jax_wonly: {path} has general.alignment={alignment!r}; accepted: a power of 2 from 8.")
        headers: dict[str, tuple[Stored, int]] = {}
        for _ in range(tensors):
            name = cursor.string("a tensor's name")
            rank = cursor.number("I", "a tensor's rank")
            if not 1 <= rank <= _GGUF_DIMENSIONS or name in headers:
                raise FormatError(f"jax_wonly: {path} has tensor {name!r} twice, or with {rank} dimensions.")
            shape = tuple(cursor.number("Q", "a tensor's shape") for _ in range(rank))[::-1]
            kind, offset = cursor.number("I", "a tensor's type"), cursor.number("Q", "a tensor's offset")
            if kind not in GGUF_TYPES:
                raise FormatError(f"jax_wonly: {path} has tensor {name!r} of unknown type {kind}.")
            dtype, weights, size = GGUF_TYPES[kind]
            if 0 in shape or shape[-1] % weights:
                raise FormatError(f"jax_wonly: {path} has tensor {name!r} of shape {shape}, no whole {dtype} blocks.")
            headers[name] = Stored(dtype, shape, math.prod(shape) // weights * size), offset
        start = -(-cursor.at // alignment) * alignment
        self._data = data
        self._at: dict[str, int] = {}
        self._stored: dict[str, Stored] = {}
        for name, (stored, offset) in headers.items():
            if offset % alignment or start + offset + stored.nbytes > len(data):
                raise FormatError(
                    f"jax_wonly: {path} has tensor {name!r} at offset {offset} with {stored.nbytes} bytes; its data "
                    f"are {max(len(data) - start, 0)} bytes, aligned to {alignment}."
                )
            self._stored[name], self._at[name] = stored, start + offset

    def read(self, name: str) -> np.ndarray:
        """The bytes of the tensor, uint8 ``[..., bytes of a row]``, still in the map."""
        stored = self._stored[name]
        rows = math.prod(stored.shape[:-1])
        data = self._data[self._at[name] : self._at[name] + stored.nbytes]
        return data.reshape(*stored.shape[:-1], stored.nbytes // rows)


def is_gguf(path: Path) -> bool:
    if path.suffix == ".gguf":
        return True
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def replace_atomically(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
