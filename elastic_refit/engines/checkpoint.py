"""A local Hugging Face checkpoint, as far as it can be known without torch: is it there, and what does it hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elastic_refit.core.manifest import TensorSpec
from elastic_refit.errors import ConfigError

__all__ = ["checkpoint_tensor_specs", "layer_order", "require_checkpoint"]

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
_FUSED = {"q_proj": "qkv.0", "k_proj": "qkv.1", "v_proj": "qkv.2", "gate_proj": "gate_up.0", "up_proj": "gate_up.1"}
_MAX_HEADER_BYTES = 100_000_000


def require_checkpoint(directory: str | Path) -> Path:
    """``directory`` as a path, if it holds a model that can be loaded.

    Raises:
        ConfigError: it does not exist, or has no config.json or no safetensors file.
    """
    path = Path(directory)
    if not path.is_dir():
        raise ConfigError(f"model: there is no directory {str(directory)!r}", model=str(directory))
    if not (path / "config.json").is_file():
        raise ConfigError(f"model: {str(directory)!r} holds no config.json", model=str(directory))
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model: {str(directory)!r} holds no *.safetensors file", model=str(directory))
    return path


def checkpoint_tensor_specs(directory: str | Path) -> list[TensorSpec]:
    """Every tensor of the checkpoint, in :func:`layer_order`; reads only the headers of its safetensors files.

    Raises:
        ConfigError: there is no checkpoint, or a header cannot be read.
    """
    files = sorted(require_checkpoint(directory).glob("*.safetensors"))
    specs = [_spec(name, entry) for file in files for name, entry in _read_header(file).items()]
    return sorted(specs, key=lambda spec: layer_order(spec.name))


def layer_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that keeps a layer's tensors together and, in it, those that engines fuse (q, k, v; gate, up).

    An engine that loads layer by layer then holds at most one unfinished layer. Layers sort by number, not by digit.
    """
    parts = ".".join(_FUSED.get(part, part) for part in name.split(".")).split(".")
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def _read_header(file: Path) -> dict[str, Any]:
    """The safetensors layout: eight bytes of little-endian length, then that much JSON."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(stream.read(size))
        return {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model: {str(file)!r} is not a safetensors file: {error}", file=str(file)) from error


def _spec(name: str, entry: dict[str, Any]) -> TensorSpec:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ConfigError(f"model: {name} has dtype {entry['dtype']}, which cannot be refitted", tensor=name)
    start, end = entry["data_offsets"]
    return TensorSpec(name, tuple(entry["shape"]), dtype, end - start)
