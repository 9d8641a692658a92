"""What a pack for a GPU machine holds, how it travels in parts, and what of it that machine uses."""

from __future__ import annotations

import json
import random
import struct
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu_day import fatbin, pack, parts, unpack
from benchmarks.gpu_day.fatbin import CONTAINER, CUBIN, MAGIC, MEMBER, PTX, NoFatbin, thin
from benchmarks.gpu_day.pack import LEFT_OUT, wheel_of
from benchmarks.gpu_day.parts import BadPack, OtherPython
from benchmarks.gpu_day.requirements import ON_THE_MACHINE, ROOT, closure, packages, pinned
from benchmarks.gpu_day.unpack import choose
from makers.paths import ROOT as REPOSITORY

HEADER = 64


def member(kind: int, architecture: int, code: bytes) -> bytes:
    header = bytearray(HEADER)
    MEMBER.pack_into(header, 0, kind, 0x101, HEADER, len(code))
    struct.pack_into("<I", header, fatbin.ARCHITECTURE, architecture)
    return bytes(header) + code


def container(*members: bytes) -> bytes:
    body = b"".join(members)
    return CONTAINER.pack(MAGIC, 1, CONTAINER.size, len(body)) + body


def codes(data: bytes | bytearray) -> list[list[tuple[int, int, bytes]]]:
    """Kind, architecture and code of the members of each container."""
    return [
        [
            (kind, arch, bytes(data[start + HEADER : start + size]))
            for kind, arch, start, size in fatbin.members(data, first, end)
        ]
        for _, first, end in fatbin.containers(data, 0, len(data))
    ]


def test_only_the_code_of_the_architecture_stays_and_places_do_not_move() -> None:
    first = container(member(CUBIN, 80, b"a" * 40), member(CUBIN, 90, b"b" * 24), member(PTX, 90, b"p" * 16))
    second = container(member(CUBIN, 90, b"c" * 8), member(CUBIN, 120, b"d" * 80))
    data = bytearray(first + bytes(16) + second)
    found = thin(data, 0, len(data), 90)
    assert codes(data) == [[(CUBIN, 90, b"b" * 24)], [(CUBIN, 90, b"c" * 8)]]
    assert len(data) == len(first) + 16 + len(second)
    assert struct.unpack_from("<I", data, len(first) + 16)[0] == MAGIC
    assert (found.containers, found.without) == (2, 0)
    assert found.after == 2 * HEADER + 32
    assert data[CONTAINER.size + HEADER + 24 : len(first)] == bytes(len(first) - CONTAINER.size - HEADER - 24)


def test_several_codes_of_one_architecture_stay() -> None:
    data = bytearray(container(member(CUBIN, 90, b"a" * 8), member(CUBIN, 80, b"x" * 8), member(CUBIN, 90, b"b" * 8)))
    thin(data, 0, len(data), 90)
    assert codes(data) == [[(CUBIN, 90, b"a" * 8), (CUBIN, 90, b"b" * 8)]]


def test_code_of_an_earlier_minor_version_or_ptx_takes_the_place_of_what_is_missing() -> None:
    data = bytearray(
        container(member(CUBIN, 80, b"a" * 8), member(CUBIN, 86, b"b" * 8), member(CUBIN, 90, b"c" * 8))
        + container(member(CUBIN, 70, b"d" * 8), member(PTX, 70, b"e" * 8), member(PTX, 90, b"f" * 8))
    )
    thin(data, 0, len(data), 89)
    assert codes(data) == [[(CUBIN, 86, b"b" * 8)], [(PTX, 70, b"e" * 8)]]


def test_a_container_with_nothing_for_the_architecture_is_left_alone() -> None:
    data = bytearray(container(member(CUBIN, 120, b"a" * 8)))
    before = bytes(data)
    assert thin(data, 0, len(data), 90).without == 1
    assert data == before


@pytest.mark.parametrize("body", [bytes(80), member(CUBIN, 90, b"a" * 8)[:-4]])
def test_another_layout_is_refused(body: bytes) -> None:
    data = bytearray(CONTAINER.pack(MAGIC, 1, CONTAINER.size, len(body)) + body + bytes(64))
    with pytest.raises(NoFatbin, match="the layout is another one"):
        thin(data, 0, len(data), 90)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "a" / "inner").mkdir(parents=True)
    (tree / "a" / "inner" / "random").write_bytes(random.Random(0).randbytes(50_000))
    (tree / "a" / "run").write_text("text")
    (tree / "a" / "run").chmod(0o755)
    return tree


def test_parts_are_small_and_come_back_whole(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    out.mkdir()
    found = parts.write_parts(tree, out, 8_000)
    assert len(found) == 7
    assert all(part["bytes"] == (out / part["file"]).stat().st_size <= 8_000 for part in found)
    parts.extract_parts(out, {"parts": found}, tmp_path / "site")
    for path in (p for p in tree.rglob("*") if p.is_file()):
        copy = tmp_path / "site" / path.relative_to(tree)
        assert copy.read_bytes() == path.read_bytes()
        assert copy.stat().st_mode == path.stat().st_mode


def test_a_part_that_is_missing_or_damaged_is_named(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    out.mkdir()
    manifest = {"parts": parts.write_parts(tree, out, 20_000)}
    data = bytearray((out / "part-01").read_bytes())
    data[100] ^= 1
    (out / "part-01").write_bytes(data)
    with pytest.raises(BadPack, match=r"part-01 is damaged.* Copy it again"):
        parts.extract_parts(out, manifest, tmp_path / "site")
    (out / "part-02").unlink()
    with pytest.raises(BadPack, match=r"part-02 of the pack is not in .* Copy it there"):
        parts.extract_parts(out, manifest, tmp_path / "site")


def test_a_pack_for_another_python_is_refused_and_none_is_nothing(tmp_path: Path) -> None:
    assert unpack.unpack(tmp_path / "none", tmp_path / "site") == {}
    (tmp_path / "pack.json").write_text(json.dumps({"python": "3.4", "parts": []}))
    with pytest.raises(OtherPython, match=r"is for Python 3\.4, and this is .* PACK_FLAGS='--python 3\.\d+'"):
        unpack.unpack(tmp_path, tmp_path / "site")


def atleast(installed: str, wanted: str) -> bool:
    return not wanted or int(installed) >= int(wanted.removeprefix(">="))


NEEDS = {"": [("a", ">=2"), ("b", "")], "a": [("c", ">=5")], "b": [("d", ">=9")], "c": [], "d": []}


@pytest.mark.parametrize(
    ("installed", "used", "there"),
    [
        ({}, ["a", "b", "c", "d"], []),
        ({"a": "2", "b": "1", "c": "9", "d": "9"}, [], ["a", "b"]),
        ({"a": "1", "b": "1", "c": "9", "d": "1"}, ["a"], ["b", "c"]),
        ({"a": "1", "b": "1", "c": "4"}, ["a", "c"], ["b"]),
        # What the machine has fits what the machine has, whatever the pack's version of it would ask for.
        ({"a": "3", "c": "1", "d": "9"}, ["b"], ["a", "d"]),
    ],
)
def test_only_what_the_machine_lacks_is_used(installed: dict[str, str], used: list[str], there: list[str]) -> None:
    found, kept = choose(NEEDS, installed.get, atleast)
    assert found == used
    assert sorted(kept) == there


def test_requirements_are_followed_but_not_to_what_the_machine_has() -> None:
    asked = {
        "A-b": ["c>=1; python_version >= '3.12'", "d; python_version < '3.12'", "e; extra == 'more'", "torch>=2"],
        "c": ["nvidia-cublas", "a_b<9"],
    }
    first = [Requirement("A_b>=3"), Requirement("numpy")]
    found = closure(first, "3.12", lambda name: asked.get({"a-b": "A-b"}.get(name, name), []))
    assert found == {ROOT: [("a-b", ">=3")], "a-b": [("c", ">=1")], "c": [("a-b", "<9")]}


def test_the_pack_has_what_tfexport_imports_there_in_pinned_versions() -> None:
    versions, needs = packages(REPOSITORY, "3.12")
    pins = pinned(REPOSITORY / "constraints.txt")
    assert versions == {name: pins[name] for name in versions}
    assert set(needs) == {ROOT, *versions}
    expected = {
        "onnxruntime-gpu",
        "ctranslate2",
        "typer",
        "onnx",
        "onnx-ir",
        "safetensors",
        "tokenizers",
        "cuda-bindings",
    }
    assert expected | {"protobuf", "pytest", "rich", "ml-dtypes", "packaging", "pyyaml"} <= set(versions)
    assert not ON_THE_MACHINE & set(versions)
    assert versions["onnxruntime-gpu"] == pins["onnxruntime"]
    assert set(LEFT_OUT) <= set(versions)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("onnx-ir", "onnx_ir-1.2-py3-none-any.whl"),
        ("PyYAML", "pyyaml-1.2-cp312.whl"),
        ("a.b", "a.b-1.2-py3-none-any.whl"),
    ],
)
def test_wheels_are_found_however_their_names_are_written(tmp_path: Path, name: str, file: str) -> None:
    (tmp_path / "onnx-1.2-x.whl").touch()
    (tmp_path / file).touch()
    assert wheel_of(name, "1.2", tmp_path).name == file
    with pytest.raises(FileNotFoundError, match=r"no wheel of .* 1\.3"):
        wheel_of(name, "1.3", tmp_path)


def test_wheels_of_another_python_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(names: Iterable[str], python: str, folder: Path) -> None:
        assert [*names] == ["one==1.2"]
        asked.append(python)
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "one-1.2-cp3-cp3-linux.whl", "w") as wheel:
            wheel.writestr("one/python", python)

    monkeypatch.setattr(pack, "packages", lambda *_: ({"one": "1.2"}, {"": []}))
    monkeypatch.setattr(pack, "download", download)
    monkeypatch.setattr(pack, "commit", lambda: None)
    for python in ("3.12", "3.13", "3.12"):
        out, site = tmp_path / "pack", tmp_path / f"site-{len(asked)}"
        words = ["--python", python, "--wheels", str(tmp_path / "wheels"), "--out", str(out), "--no-bundle"]
        assert pack.main(words) == 0
        parts.extract_parts(out, json.loads((out / "pack.json").read_text()), site)
        assert (site / "one" / "one" / "python").read_text() == python
    assert asked == ["3.12", "3.13"]


def test_cublas_of_cuda_13_gets_the_name_that_ctranslate2_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "cu13" / "libcublas.so.13"
    library.parent.mkdir()
    library.touch()
    (tmp_path / "site").mkdir()
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    manifest = {"packages": {}, "needs": {"": []}, "parts": [], "python": here}
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "pack.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(unpack, "extract_parts", lambda *_: None)
    monkeypatch.setattr(unpack, "find_cublas", lambda: library)
    (tmp_path / "site" / "unpacked.json").write_text(json.dumps({"parts": []}))
    for _ in range(2):
        found = unpack.unpack(tmp_path / "pack", tmp_path / "site", say=lambda _: None)
        assert found["libraries"] == [str(tmp_path / "site" / "cublas12"), str(library.parent)]
        assert (tmp_path / "site" / "cublas12" / "libcublas.so.12").resolve() == library


def test_the_library_that_compares_versions_is_not_taken_for_the_machine_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the machine has none, that of the pack is imported, and used."""
    about = tmp_path / "site" / "packaging" / "packaging-99.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: packaging\nVersion: 99\n")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    needs = {"": [["packaging", ""]], "packaging": []}
    manifest = {"packages": {"packaging": "99"}, "needs": needs, "parts": [], "python": here}
    (tmp_path / "pack.json").write_text(json.dumps(manifest))
    (tmp_path / "site" / "unpacked.json").write_text(json.dumps({"parts": []}))
    monkeypatch.setattr(unpack, "find_spec", lambda name: None)
    others = [path for path in sys.path if not (Path(path) / "packaging").is_dir()]
    monkeypatch.setattr(sys, "path", others)
    found = unpack.unpack(tmp_path, tmp_path / "site", say=lambda _: None)
    assert found["used"] == {"packaging": "99"}
    assert found["paths"] == [str(tmp_path / "site" / "packaging")]
    assert sys.path == others
