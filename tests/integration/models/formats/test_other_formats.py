"""Files that no reader here takes are named, with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfexport.errors import CheckpointError
from tfexport.models.formats.files import read_file


@pytest.mark.parametrize(
    ("name", "head", "about"),
    [
        ("model.weights", b"\x89HDF\r\n\x1a\n", "HDF5 file"),
        ("model.h5", b"anything", "HDF5 file"),
        ("model.bin", b"GGUF\x03\0\0\0", "GGUF file"),
        ("flax_model.msgpack", b"\xdf\0\0\0\x02", "checkpoint of Flax"),
        ("translate-de_en.argosmodel", b"PK\x03\x04", "package of Argos Translate"),
        ("model.onnx", b"\x08\x08\x12\x07pytorch", "ONNX graph"),
        ("model.intgemm.alphas.bin", b"\x01\0\0\0\0\0\0\0", "binary model of Marian"),
        ("model.bin", b"\x01\0\0\0\0\0\0\0", "binary model of Marian"),
        ("ckpt.pt.gz", b"\x1f\x8b\x08\0", "compressed by gzip"),
    ],
)
def test_a_file_of_another_format_is_named_with_the_way_out(name: str, head: bytes, about: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(head + b"\0" * 64)
    with pytest.raises(CheckpointError, match=about) as caught:
        read_file(tmp_path / name)
    assert any(way in str(caught.value) for way in ("Load it into", "Give the", "Extract it"))
