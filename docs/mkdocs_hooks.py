"""What MkDocs does beyond its settings: pictures of results, and pages of the repository's root."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "benchmarks" / "results"

_INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of included files, and links to pictures of results as they lie on the site."""
    return included(markdown).replace("../../benchmarks/results/", "")


def included(markdown: str) -> str:
    """`markdown` with the text of files that a line `<!-- include: NAME -->` names, without their titles."""
    return _INCLUDE.sub(lambda mark: _without_title(mark[1]), markdown)


def _without_title(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"\A# .*\n", "", text).strip()


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures that pages in `results/` show."""
    from mkdocs.structure.files import File

    for path in PICTURES.glob("*.png"):
        files.append(File.generated(config, f"results/{path.name}", content=path.read_bytes()))
    return files
