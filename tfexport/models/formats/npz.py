"""Reading of NumPy's archives (.npz): nothing is unpickled, and the size of every array is checked against its bytes."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tfexport.errors import CheckpointError

_MOST_PACKED, _FREE = 4, 2**24
"""Maximum ratio of unpacked to packed size, and additional bytes. Weights hardly compress, except for a few zeros."""

_LARGEST_EMPTY = 2**20
"""Maximum axis size of an array without elements. Arrays computed from it would have the same size."""


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Read all arrays of a file that `numpy.savez` or Marian wrote.

    Raises:
        CheckpointError: the file is missing or damaged, contains Python objects, or would be far larger unpacked.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}. Give the path of a model such as model.npz.")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > _MOST_PACKED * path.stat().st_size + _FREE:
                raise CheckpointError(
                    f"{path} would become more than {_MOST_PACKED} times as large when it is unpacked: it is not read. "
                    "Save the model again."
                )
            if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
                raise CheckpointError(f"{path} is packed in a way that NumPy does not use. Save the model again.")
            arrays = {}
            for member in members:
                with archive.open(member) as file:
                    arrays[member.filename.removesuffix(".npy")] = _array(file, member)
            return arrays
    except CheckpointError:
        raise
    except Exception as error:  # for a damaged file, zipfile and NumPy may raise any error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read as an .npz file: {reason}. Check that it was copied completely."
        ) from error


def _array(file: IO[bytes], member: zipfile.ZipInfo) -> NDArray[Any]:
    """One array. Its header must declare exactly the bytes that follow, before memory is allocated."""
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read_header(file)
    size = math.prod(shape) * dtype.itemsize
    fits = size == member.file_size - file.tell() and (size > 0 or max(shape, default=0) <= _LARGEST_EMPTY)
    if dtype.hasobject or min(shape, default=0) < 0 or not fits:
        raise ValueError(f"the header of {member.filename} does not fit its content")
    return np.frombuffer(file.read(), dtype).reshape(shape, order="F" if by_columns else "C")
