"""safetensors files read and written one tensor, or a part of one, at a time, whatever their size.

The library reads a single tensor but writes a file only from all of its tensors in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data_prep.errors import UserError
from data_prep.files import naming

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorFiles:
    """The tensors of some safetensors files, each read when it is asked for.

    A file is opened for each tensor anew: a mapping that stays would keep all that was read in memory.

    Attributes:
        shapes: of every tensor, by name.
        dtypes: likewise.

    Raises UserError naming a file that cannot be read, or that holds anything but floating-point numbers.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.shapes: dict[str, list[int]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._paths: dict[str, Path] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():
                        tensor = file.get_slice(name)
                        self.shapes[name] = tensor.get_shape()
                        self.dtypes[name] = _DTYPES[tensor.get_dtype()]
                        self._paths[name] = path
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: {' '.join(str(error).split())}") from None
            except KeyError as error:
                raise UserError(f"{path}: holds numbers of type {error}, known are {', '.join(_DTYPES)}") from None

    def tensor(self, name: str) -> Tensor:
        """A tensor; it may be mapped from the file."""
        with safe_open(self._paths[name], framework="pt") as file:
            return file.get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, nothing else of it read."""
        with safe_open(self._paths[name], framework="pt") as file:
            return file.get_slice(name)[start:stop]


def write_tensors(
    path: Path,
    shapes: Mapping[str, Iterable[int]],
    dtypes: Mapping[str, torch.dtype],
    pieces: Callable[[str], Iterable[Tensor]],
) -> None:
    """Write a safetensors file whose tensors exist one piece at a time.

    Args:
        shapes: of every tensor, in the order in which they are written.
        dtypes: likewise.
        pieces: of a tensor's name, its parts along the first dimension; they are cast to its dtype.

    Raises OSError naming the file.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        shape, start = list(shape), end
        end += math.prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": _NAMES[dtypes[name]], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data
    with naming(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            for piece in pieces(name):
                file.write(piece.to(dtypes[name]).contiguous().flatten().view(torch.uint8).numpy().data)
    assert path.stat().st_size == 8 + len(text) + end, f"{path}: pieces of other shapes than announced"
