"""The tensors of a checkpoint folder by name, read lazily; every fault names the tensor and the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from llmserve.errors import CheckpointError

INDEX = "model.safetensors.index.json"


class SafetensorsFolder:
    """A model in one file or in shards with an index. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _file_of_each_tensor(folder)
        self._open: dict[str, safe_open] = {}

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def names(self) -> Iterator[str]:
        return iter(self.files)

    def file_names(self) -> list[str]:
        return sorted(set(self.files.values()))

    def where(self, name: str) -> str:
        return str(self.folder / self.files[name]) if name in self.files else str(self.folder)

    def get(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Read a tensor; with `shape`, it must have that one."""
        file = self.files.get(name)
        if file is None:
            raise CheckpointError(f"tensor {name} is missing: no file of {self.folder} has it")
        try:
            tensor = self._handle(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {name} cannot be read from {self.folder / file}: {error}") from error
        if shape is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {name} in {self.folder / file} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        return tensor

    def shape(self, name: str) -> tuple[list[int], str]:
        """Shape and stored dtype, without reading the data."""
        part = self._handle(self.files[name]).get_slice(name)
        return part.get_shape(), part.get_dtype()

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            self._open[file] = _open_file(self.folder / file)
        return self._open[file]


def _open_file(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the index names it") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or not a safetensors file: {error}") from error


def _file_of_each_tensor(folder: Path) -> dict[str, str]:
    index = folder / INDEX
    if index.is_file():
        files = _read_index(index)
        for file in sorted(set(files.values())):
            present = set(_open_file(folder / file).keys())
            gone = next((name for name, where in files.items() if where == file and name not in present), None)
            if gone is not None:
                raise CheckpointError(f"tensor {gone} is missing from {folder / file}, where {index.name} puts it")
        return files
    single = sorted(path.name for path in folder.glob("*.safetensors"))
    if not single:
        raise CheckpointError(f"{folder}: no .safetensors file found")
    return {name: file for file in single for name in _open_file(folder / file).keys()}  # noqa: SIM118


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor; a file must lie in the folder itself."""
    try:
        files = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: no weight_map can be read: {error}") from error
    if not isinstance(files, dict):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names, got {type(files).__name__}")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name} must be in a file of this folder, got {file!r}")
    return files
