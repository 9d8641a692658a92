"""What a release publishes, and what an installation of it draws."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from makers.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RELEASE: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
JOBS = RELEASE["jobs"]


def drawn_by(extra: str) -> set[str]:
    """The packages that `pip install tfexport[extra]` draws, by the metadata of those installed here."""
    names: set[str] = set()
    seen: set[tuple[str, str]] = set()
    project = PROJECT["project"]
    waiting = [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"][extra])]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        names.add(name)
        new = {(name, extra) for extra in ("", *requirement.extras)} - seen
        seen |= new
        lines = map(Requirement, (requires(name) or ()) if new else ())
        waiting += [
            line
            for line in lines
            if any(line.marker is None or line.marker.evaluate({"extra": extra}) for _, extra in new)
        ]
    return names


def test_decoding_on_a_cpu_draws_no_pytorch() -> None:
    drawn = drawn_by("cpu")
    assert {"numpy", "onnxruntime", "tokenizers", "typer"} <= drawn
    assert not {"torch", "onnx", "onnx-ir", "safetensors"} & drawn
    assert not [name for name in drawn if name.startswith("nvidia")]
    assert "torch" in drawn_by("export")


def test_a_release_has_a_wheel_for_each_system_which_decodes_after_its_build() -> None:
    wheels = PROJECT["tool"]["cibuildwheel"]
    systems = {"manylinux_x86_64", "manylinux_aarch64", "macosx_arm64", "win_amd64"}
    assert set(wheels["build"]) == {f"cp311-{system}" for system in systems}
    assert len(JOBS["wheels"]["strategy"]["matrix"]["system"]) == len(systems)
    assert wheels["test-extras"] == ["cpu"]
    check = re.fullmatch(r"python \{project\}/(.*)", wheels["test-command"])
    assert check is not None
    assert (ROOT / check[1]).is_file()


def test_what_is_published_is_what_the_other_jobs_built() -> None:
    publish = JOBS["publish"]
    assert set(publish["needs"]) == {"sdist", "wheels"}
    assert publish["environment"] == "pypi"
    assert publish["permissions"] == {"id-token": "write", "attestations": "write", "contents": "write"}
    (pattern,) = [step["with"]["pattern"] for step in publish["steps"] if "download" in step.get("uses", "")]
    for job in ("sdist", "wheels"):
        (name,) = [step["with"]["name"] for step in JOBS[job]["steps"] if "upload" in step.get("uses", "")]
        assert name.startswith(pattern.rstrip("*"))


@pytest.mark.parametrize("job", JOBS)
def test_only_what_publishes_may_write(job: str) -> None:
    assert RELEASE["permissions"] == {"contents": "read"}
    assert ("permissions" in JOBS[job]) == (job in ("publish", "site"))
    for step in JOBS[job]["steps"]:
        if "actions/checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False
