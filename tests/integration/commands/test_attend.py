"""Pictures of attention: the right cells are dark, labels stand at their rows and columns, and a page needs nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfexport.__main__ import main
from tfexport.decoding import attention_maps

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    (tmp_path / "in").write_text("de5 de6\n\nde9 Zwerg\nde30 de4\n")
    (tmp_path / "out").write_text("wört8 wört9 wört8\nwört4\nwört10\nwört11\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run_main(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["tfexport", "attend", *map(str, arguments), "--threads", "1"])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), capsys.readouterr().err

    return run_main


def test_more_than_a_page_could_hold_is_refused_before_it_is_computed(
    run: Run, aligned_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_maps, "MOST_WEIGHTS", 3 * 4 * 3)
    code, said = run(aligned_bundle, "in", "out")
    assert code == 2
    assert "Give fewer --lines, or shorter ones." in said.splitlines()[-1]
    monkeypatch.setattr(attention_maps, "MOST_WEIGHTS", 3 * 4 * 4)
    assert run(aligned_bundle, "in", "out", "--lines", 1)[0] == 0


def test_the_command_draws_what_is_decoded(run: Run, aligned_bundle: Path) -> None:
    code, said = run(aligned_bundle, "in")
    assert code == 0
    assert "wrote attention.html" in said
    text = Path("attention.html").read_text(encoding="utf-8")
    assert text.count("<h2>") == 3  # the empty line has no picture
    assert "<h2>&lt;sos&gt; de9 Zwerg &lt;eos&gt; → " in text
    assert text.count("<figcaption>") == 3 * 4


def test_the_command_draws_given_outputs(run: Run, aligned_bundle: Path) -> None:
    for flags in ([], ["--runtime", "torch"]):
        code, said = run(aligned_bundle, "in", "out", "-o", "a.html", "--layer", 0, "--head", 1, "--lines", 3, *flags)
        assert code == 0
        assert "note: further lines are not drawn: --lines is 3" in said
        text = Path("a.html").read_text(encoding="utf-8")
        assert "<h2>&lt;sos&gt; de5 de6 &lt;eos&gt; → wört8 wört9 wört8 &lt;eos&gt;</h2>" in text
        assert text.count("<figcaption>layer 0, head 1<") == text.count("<figcaption>") == 2


@pytest.mark.thorough
def test_the_command_writes_pictures(run: Run, aligned_bundle: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(aligned_bundle, "in", "-o", "a.png", "--beam", 3)[0] == 0
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_refused_first(
    run: Run, aligned_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("tfexport.runtimes.load_runtime", None)
    code, message = run(aligned_bundle, "in", "-o", "a.png")
    assert code == 2
    assert "a PNG needs matplotlib" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in", "-o", "a.jpg"], "a.jpg is neither .html nor .png"),
        (["in", "-o", "missing/a.html"], "cannot write missing/a.html"),
        (["in", "--layer", 4], "no decoder layer 4: this model has 1"),
        (["in", "--head", 9], "no head 9: this model has 3"),
        (["none"], "cannot read none"),
        (["blank"], "no line that can be decoded"),
        (["in", "blank"], "more lines of the input than of the outputs"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(run: Run, aligned_bundle: Path, arguments: list[Any], message: str) -> None:
    Path("blank").write_text("\n")
    code, said = run(aligned_bundle, *arguments)
    assert code == 2
    assert message in said.splitlines()[-1]
    assert not Path("attention.html").exists()


def test_a_bundle_without_such_graphs_says_how_to_get_them(run: Run, tiny_bundle: Path) -> None:
    code, said = run(tiny_bundle, "in")
    assert code == 2
    assert "Export again with --alignments, or decode with --runtime torch" in said


def test_flags_of_decoding_are_refused_beside_targets(run: Run, aligned_bundle: Path) -> None:
    code, error = run(aligned_bundle, "in", "out", "--beam", 2, "-o", "a.html")
    assert code == 2
    assert "TARGETS are given" in error
    code, error = run(aligned_bundle, "-", "-", "-o", "a.html")
    assert code == 2
    assert "stdin" in error
