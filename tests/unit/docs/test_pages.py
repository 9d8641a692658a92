"""The documentation is true: its links lead somewhere, and what it names exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import tfexport
import tfexport.scale
from docs import generate, mkdocs_hooks
from makers.paths import ROOT
from tfexport import graph_contract
from tfexport.cli import app
from tfexport.decoding.line_reader import Status
from tfexport.models.checkpoints.load import FAMILIES
from tfexport.runtimes import RUNTIMES
from tfexport.search.profiles import PROFILES

DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted(DOCS.rglob("*.md")),
]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@cache
def text_of(page: Path) -> str:
    """A page with the files that it includes."""
    return mkdocs_hooks.included(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_generated_text_is_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generate.current(text) == text, f"{page.relative_to(ROOT)} is not current. Write it again with: make pages"


def test_every_generator_has_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in generate.GENERATORS:
        assert text.count(f"\n<!-- generated: {name} -->\n") == 1, name
    assert text.count("<!-- generated: ") == text.count("\n<!-- end -->") == len(generate.GENERATORS)


def codes_of(page: Path) -> str:
    """What stands as code on a page, in blocks and within lines."""
    blocks = re.findall(r"```\w*\n(.*?)```", text_of(page), re.DOTALL)
    lines = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", lines)])


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_examples_use_public_names_alone(page: Path) -> None:
    code = codes_of(page)
    for name in OF_RAY:
        code = code.replace(name, "")
    assert not re.findall(r"(?:from|import) tfexport\.\w+", code)
    if not page.is_relative_to(DOCS / "how-it-works"):  # there `tfexport` is also the domain of ONNX functions
        assert set(re.findall(r"\btfexport\.([A-Za-z_]\w*)\b(?!/)", code)) <= set(tfexport.__all__)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", text_of(file.resolve()), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]
            assert heading in anchors, target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|h|cpp|safetensors))`", text_of(page))
    for name in named:
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "tfexport")) or name.startswith("run/"), name


def test_packages_that_are_named_exist() -> None:
    table = text_of(DOCS / "how-it-works/index.md").partition("## Packages")[2]
    named = set(re.findall(r"`(\w+)/`", table))
    there = {path.parent.name for path in (ROOT / "tfexport").glob("*/__init__.py")}
    assert named == there


OF_RAY = (
    "tfexport.serving.ray:app",
    *(f"tfexport.scale.{name}" for name in tfexport.scale.__all__),
    "import tfexport.scale\n",
)
"""Public names that are not in `tfexport` itself."""


OTHERS = {
    "--constraints",
    "--model-repository",
    "--ctranslate2",
    "--hugging-face",
    "--input",
    "--steps",
    *(
        "--file",
        "--tag",
        "--publish",
        "--volume",
        "--http-host",
        "--http-port",
        "--include-log-monitor",
    ),  # of Docker and Ray
    *("--background", "--minutes", "--from", "--only", "--list", "--architecture", "--out", "--pack"),  # of gpu_day
    *("--quick", "--tune"),  # of benchmarks/serve
    *("--precisions", "--text"),  # of benchmarks/corpus_capacity
    *("--http2", "--local-dir", "--extra-index-url"),  # of curl, of Hugging Face's hf download, and of pip
}
"""Options of other programs."""


@cache
def options() -> frozenset[str]:
    group: Any = typer.main.get_command(app)
    parameters = [*group.params, *(parameter for command in group.commands.values() for parameter in command.params)]
    return frozenset(opt for parameter in parameters for opt in (*parameter.opts, *parameter.secondary_opts))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_options_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", codes_of(page)))
    assert named <= options() | OTHERS | {"--help", "--help-all"}


def test_pages_are_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        assert navigation.count(f" {page.relative_to(DOCS).as_posix()}\n") == 1, page


def test_contract_names_every_tensor() -> None:
    shown = text_of(DOCS / "reference/contract.md")
    for graph in (
        *(graph_contract.ENCODER, graph_contract.DECODER_STEP, graph_contract.SELECT_ROWS),
        graph_contract.ENCODER_CLASSIFIER,
        *graph_contract.SEARCH_GRAPHS,
        *(graph_contract.ORT_ENCODER, graph_contract.ORT_DECODER_STEP, graph_contract.ORT_BEAM_STEP),
    ):
        for side, tensors in (("in", graph.inputs), ("out", graph.outputs)):
            for t in tensors:
                row = f"| `{graph.file}` | {side} | `{t.name}` | {t.dtype} | {', '.join(t.axes)} | {t.about} |"
                assert shown.count(f"{row}\n") == 1
    for name in ("banned", "best.logits", "attention", "candidates", "left_out", "listed.output_weight"):
        assert f"| `{name}` |" in shown


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("docs/guides/checkpoints.md", [family.name for family in FAMILIES]),
        ("docs/guides/decode.md", get_args(Status)),
        ("docs/guides/search.md", PROFILES),
    ],
    ids=["families", "statuses", "profiles"],
)
def test_tables_are_complete(page: str, names: list[str]) -> None:
    for name in names:
        assert f"| `{name}` |" in text_of(ROOT / page)


def test_readme_is_short_and_names_every_runtime() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    for runtime in RUNTIMES:
        assert f"`{runtime}`" in readme


def test_classes_and_operators_that_are_named_are_in_the_source() -> None:
    files = [path for pattern in ("*.py", "*.cpp", "*.h") for path in (ROOT / "tfexport").rglob(pattern)]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    for page in (DOCS / "how-it-works").glob("*.md"):
        for name in re.findall(r"`([A-Z][a-z]+[A-Z]\w+)`", text_of(page)):
            assert re.search(rf"\b{name}\b", source), (page.name, name)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_boxes_have_their_text_in_lines_of_their_own(page: Path) -> None:
    """Anything else in the line of the kind, but for a quoted title, makes a paragraph of a box."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("!!!"):
            assert re.fullmatch(r'!!! [\w-]+( ".*")?', line)
            assert re.match(" {4}[^ ]", after)
