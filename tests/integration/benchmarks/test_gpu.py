"""The benchmark's logic, on the CPU and the tiny model. Nothing here looks at how long something took."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from benchmarks.gpu import agreement, runtimes, timing
from benchmarks.peers import converters, decoders, hugging_face, pytorch_in_place
from makers.ahead import ahead_runtime, on_host
from makers.paths import ROOT
from makers.tiny import SRC_VOCAB
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.config import ModelConfig
from tfexport.errors import EngineError, RuntimeUnavailable, TfexportError
from tfexport.models.transformer import Transformer
from tfexport.runtimes.buckets import Buckets
from tfexport.runtimes.outputs import FloatArray, IntArray
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, pad, search
from tfexport.verification.parity import random_sources

pytestmark = pytest.mark.thorough

FEW = (
    *("--device", "cpu", "--threads", "1", "--repeats", "2", "--warmup", "1", "--tokens", "5", "--sentences", "5"),
    *("--batch-sizes", "1,3", "--beams", "1,2", "--max-length", "12"),
)


@pytest.fixture
def bundle(tiny_bundle: Path) -> Bundle:
    return open_bundle(tiny_bundle)


@pytest.fixture
def reference(bundle: Bundle) -> agreement.Reference:
    sources = random_sources(bundle.config, 5)
    return agreement.Reference(TorchRuntime.from_bundle(bundle), sources, [1, 3], 12)


def rows_of(record: dict[str, Any], table: str, runtime: str) -> list[dict[str, Any]]:
    return [row for row in record[table] if row["runtime"] == runtime]


def test_a_run_on_the_cpu_writes_every_row(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # What is compiled has a test of its own.
    monkeypatch.setattr(pytorch_in_place, "compile_for_graphs", lambda function: function)
    names = ["torch", "torch-compiled", "ort-cpu", "hugging-face"]
    assert (
        runtimes.main([str(tiny_bundle), *FEW, "--precisions", "fp32,bf16", "--name", "here", "--out", str(tmp_path)])
        == 0
    )

    record = json.loads((tmp_path / "gpu-here.json").read_text())
    settings = [(p, batch, beam) for p in ("float32", "bfloat16") for batch in (1, 3) for beam in (1, 2)]
    for table in ("parity", "benchmark"):
        places = [(row["precision"], row["batch"], row["beam"], row["runtime"]) for row in record[table]]
        assert places == [(*setting, name) for setting in settings for name in names]
    for row in (*rows_of(record, "benchmark", "torch"), *rows_of(record, "benchmark", "torch-compiled")):
        assert row["error"] is None
        assert row["memory"] is None
        assert len(row["seconds"]) == 2
        assert [len(steps) for steps in row["step_seconds"]] == [5, 5]
        rates = [5 * row["batch"] / seconds for seconds in row["seconds"]]
        assert row["tokens_per_second"]["median"] == pytest.approx(np.median(rates))
        assert row["tokens_per_second"]["p10"] <= row["tokens_per_second"]["median"] <= row["tokens_per_second"]["p90"]
    assert {row["ratio"]["median"] for row in rows_of(record, "benchmark", "torch")} == {1.0}
    for row in rows_of(record, "parity", "torch"):
        assert row["passed"]
        assert row["sentences"] == 5
    for row in (*rows_of(record, "parity", "ort-cpu"), *rows_of(record, "benchmark", "ort-cpu")):
        half = row["precision"] == "bfloat16"
        assert row["error"] is None if not half else "Export again with --precision bf16" in row["error"]
    assert torch.__version__.startswith(record["machine"]["versions"]["torch"].partition("+")[0])
    assert record["machine"]["gpu"] is None
    assert record["options"]["tokens"] == 5
    assert record["weights_sha256"] == open_bundle(tiny_bundle).files["weights.safetensors"]

    table = (tmp_path / "gpu-here.md").read_text()
    assert table == capsys.readouterr().out.removesuffix("\n")
    assert sum(line.startswith("| torch-compiled ") for line in table.splitlines()) == 16


def test_a_runtime_that_fails_parity_fails_the_run_and_one_that_breaks_is_a_row(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agree(peer: decoders.Peer, *_: object) -> dict[str, Any]:
        if peer.name == "torch":
            raise MemoryError("all gone")
        facts = {"identical": 1, "sentences": 5, "logits_max_error": 3.0, "top1_agree": 1, "steps": 9}
        return {**facts, "passed": False, "bleu": None, "bleu_reference": None}

    monkeypatch.setattr(runtimes, "agreement", agree)
    arguments = ["--only", "parity", "--precisions", "fp32", "--runtimes", "ort-cpu", "--out", str(tmp_path)]
    assert runtimes.main([str(tiny_bundle), *FEW, *arguments]) == 1
    record = json.loads((tmp_path / "gpu-cpu.json").read_text())
    assert record["benchmark"] == []
    assert {row["error"] for row in rows_of(record, "parity", "torch")} == {"MemoryError: all gone"}
    assert {row["passed"] for row in rows_of(record, "parity", "ort-cpu")} == {False}


def loader(name: str, error: Exception) -> Callable[..., decoders.Peer]:
    """`load_peer` that fails for one peer."""

    def load(asked: str, *rest: Any) -> decoders.Peer:
        if asked == name:
            raise error
        return decoders.load_peer(asked, *rest)

    return load


def decoder(name: str, error: Exception) -> Callable[..., Any]:
    """`agreement` in which one peer fails."""

    def agree(peer: decoders.Peer, *rest: Any) -> dict[str, Any]:
        if peer.name == name:
            raise error
        return agreement.agreement(peer, *rest)

    return agree


@pytest.mark.parametrize(
    ("place", "failing", "name", "error", "code"),
    [
        ("agreement", decoder, "ort-cpu", MemoryError("all gone"), 1),
        ("agreement", decoder, "ort-cpu", EngineError("TensorRT failed. Do this."), 1),
        ("agreement", decoder, "ort-cpu", RuntimeUnavailable("Install that."), 0),
        ("agreement", decoder, "hugging-face", ValueError("not ours"), 0),
        ("load_peer", loader, "ort-cpu", RuntimeError("segments"), 1),
        ("load_peer", loader, "ort-cpu", EngineError("no engines for this GPU."), 0),
        ("load_peer", loader, "ort-cpu", RuntimeUnavailable("Install that."), 0),
    ],
)
def test_a_runtime_that_crashes_fails_the_run_and_one_that_is_not_there_does_not(
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    failing: Any,
    name: str,
    error: Exception,
    code: int,
) -> None:
    monkeypatch.setattr(runtimes, place, failing(name, error))
    arguments = ["--only", "parity", "--precisions", "fp32", "--runtimes", "ort-cpu,hugging-face"]
    assert runtimes.main([str(tiny_bundle), *FEW, *arguments, "--out", str(tmp_path)]) == code
    rows = rows_of(json.loads((tmp_path / "gpu-cpu.json").read_text()), "parity", name)
    assert {row["error"] for row in rows if row["beam"] == 1} == {decoders.one_line(error)}
    table = (tmp_path / "gpu-cpu.md").read_text().splitlines()
    marked = [line.endswith("| NO |") for line in table if line.startswith(f"| {name} | fp32 | 1 | 1 ")]
    assert marked == [code == 1]


def test_a_text_with_its_translations_gives_bleu_for_each_runtime_and_precision(
    half_bundle: Path, tmp_path: Path
) -> None:
    pytest.importorskip("sacrebleu", reason="the train extra is not installed")
    (tmp_path / "in.txt").write_text("de4 de5 de6 de7\nde9 de10\nde11\n")
    (tmp_path / "ref.txt").write_text("wört4 wört5 wört6 wört7\nwört9 wört10 wört11 wört12\nlast\n")
    arguments = ["--only", "parity", "--precisions", "fp32,fp16", "--runtimes", "ort-cpu", "--out", str(tmp_path)]
    arguments += ["--input", str(tmp_path / "in.txt"), "--references", str(tmp_path / "ref.txt")]
    assert runtimes.main([str(half_bundle), *FEW, *arguments]) == 0
    table = (tmp_path / "gpu-cpu.md").read_text().splitlines()
    assert sum("| BLEU (reference) |" in line for line in table) == 1
    for precision in ("fp32", "fp16"):
        for name in ("torch", "ort-cpu"):
            rows = [line for line in table if line.startswith(f"| {name} | {precision} | ")]
            assert len(rows) == 4
            assert all(re.search(r"\| \d+\.\d\d \(\d+\.\d\d\) \| yes \|$", row) for row in rows)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("failing", [None, "pytest", "benchmarks.gpu.runtimes"])
def test_make_gpu_runs_the_tests_and_the_benchmark_and_fails_if_either_does(
    tmp_path: Path, failing: str | None
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$*" in *{failing}*) exit 1;; esac\n')
    python.chmod(0o755)
    flags = ["BUNDLE=ckpt", "GPU_FLAGS=--input test.de --references test.en --sentences 1000"]
    done = subprocess.run(["make", "gpu", f"PYTHON={python}", *flags], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) == (failing is None), done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == [
        "-m pytest -m gpu -rs -v tests/gpu",
        "-m benchmarks.gpu.runtimes ckpt --input test.de --references test.en --sentences 1000",
    ]


@pytest.fixture
def gpu_tests() -> Any:
    """The module of the tests that need a GPU."""
    spec = importlib.util.spec_from_file_location("gpu_tests", ROOT / "tests" / "gpu" / "test_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_engines_that_cannot_be_built_skip_the_tests_of_tensorrt_alone(
    gpu_tests: Any, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mock(
        side_effect=[
            subprocess.CompletedProcess([], 0, "", ""),
            subprocess.CompletedProcess([], 3, "", "note: a\nerror: a fault\n"),
            subprocess.CompletedProcess([], -11, "", ""),
            subprocess.TimeoutExpired("tfexport build", 1800),
        ]
    )
    monkeypatch.setattr(gpu_tests.subprocess, "run", run)
    assert [gpu_tests.build_engines(bundle.directory) for _ in range(4)] == [
        "",
        "error: a fault",
        "tfexport build ended with exit code -11",
        "Command 'tfexport build' timed out after 1800 seconds",
    ]

    def start(name: str, no_engines: str | None) -> Any:
        """`None`: whoever asks for engines fails."""
        request = SimpleNamespace(param=(name, "fp16"), getfixturevalue={"no_engines": no_engines}.__getitem__)
        if no_engines is None:
            request.getfixturevalue = Mock(side_effect=AssertionError)
        return next(gpu_tests.runtime.__wrapped__(request, bundle))

    monkeypatch.setattr(gpu_tests, "load", lambda name, *_: name)
    assert start("ort-cuda", None) == "ort-cuda"
    assert start("tensorrt", "") == "tensorrt"
    with pytest.raises(pytest.skip.Exception, match=r"this was not run \(error: a fault\)"):
        start("tensorrt", "error: a fault")


def test_what_compiles_a_model_is_marked() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu", "-m"]

    def collected(marks: str) -> set[str]:
        done = subprocess.run([*command, marks], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout
        return {line for line in done.stdout.splitlines() if "::" in line}

    quick, compiling = collected("gpu and not compiles"), collected("gpu and compiles")
    assert quick | compiling == collected("gpu")
    assert not [name for name in quick if "compile" in name or "tensorrt" in name]
    assert not [name for name in compiling if "ort-cuda" in name or "[torch-cuda-fp" in name]
    assert any("ort-cuda-fp16" in name for name in quick)
    assert any("tensorrt-fp16" in name for name in compiling)


def test_the_script_runs_from_the_command_line_and_says_what_it_was_called_with(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.runtimes", str(tiny_bundle), *FEW, "--runtimes", "ort-cpu"]
    command += ["--precisions", "fp32", "--beams", "2", "--out", str(tmp_path / "new")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "new" / "gpu-cpu.json").read_text())
    assert "benchmarks.gpu.runtimes" in record["machine"]["command"]
    # The one that the others are a ratio to is there even if it was not asked for.
    assert [row["runtime"] for row in record["benchmark"]] == ["torch", "ort-cpu"] * 2
    assert all(row["ratio"]["median"] > 0 for row in record["benchmark"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_fails(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runtimes.main([str(tiny_bundle)]) == 2
    assert capsys.readouterr().err.startswith("no NVIDIA GPU can be used here: nothing was run. ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "21"], "at most 20 tokens. Give --tokens 20 or fewer"),
        (["--input", "missing.txt"], "missing.txt"),
        (["--input", "/dev/null"], "no line that can be decoded"),
    ],
)
def test_wrong_input_is_one_line(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert runtimes.main([str(tiny_bundle), *FEW, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["a", "--export", "b"], ["a", "--runtimes", "tensorrt"], ["a", "--beams", "0"], ["a", "--precisions", "fp8"]],
)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runtimes.parse([*arguments, "--device", "cpu"])
    assert "error:" in capsys.readouterr().err


def test_bleu_is_that_of_the_lines_that_can_be_decoded(bundle: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu", reason="the train extra is not installed")
    (tmp_path / "in.txt").write_text("de4 de5 de6 de7\n\nde9 de10\nde11\n")
    (tmp_path / "ref.txt").write_text("wört4 wört5 wört6 wört7\nno such line\nwört9 wört10 wört11 wört12\nlast\n")
    options = runtimes.parse(
        ["a", *FEW, "--sentences", "2", "--input", str(tmp_path / "in.txt"), "--references", str(tmp_path / "ref.txt")]
    )
    sources, bleu = runtimes.read_sources(bundle, options)
    assert [len(source) for source in sources] == [6, 4, 3]  # bos and eos included
    assert bleu is not None
    assert bleu([(4, 5, 6, 7, 3), (9, 10, 11, 12, 3)]) == pytest.approx(100.0)
    assert bleu([(4, 5, 6, 7, 3), (8, 8, 8, 8, 3)]) < 60


class Altered:
    """A runtime whose logits have gone wrong."""

    def __init__(self, runtime: TorchRuntime, change: Callable[[FloatArray], FloatArray]):
        self._runtime, self._change = runtime, change
        self.name, self.config, self.precision = runtime.name, runtime.config, runtime.precision
        self.encode, self.best, self.capacity = runtime.encode, runtime.best, runtime.capacity
        self.capabilities = runtime.capabilities

    def step(self, state: Any, tokens: IntArray) -> tuple[FloatArray, Any]:
        logits, state = self._runtime.step(state, tokens)
        return self._change(logits), state


@pytest.mark.parametrize(("batch", "beam"), [(1, 1), (2, 3), (32, 1)])
def test_agreement_with_itself_is_complete(
    bundle: Bundle, reference: agreement.Reference, batch: int, beam: int
) -> None:
    peer = decoders.RuntimePeer("torch", TorchRuntime.from_bundle(bundle))
    row = agreement.agreement(peer, reference, batch, beam)
    steps = beam * sum(len(output) for output in reference.outputs[1])
    assert (row["identical"], row["sentences"], row["top1_agree"], row["steps"]) == (5, 5, steps, steps)
    assert 0 < row["logits_max_error"] < 1e-5
    assert row["passed"]


@pytest.mark.parametrize(
    ("change", "error", "same"),
    [
        (lambda logits: logits + np.float32(0.5), 0.5, True),
        (lambda logits: logits - 9 * (logits == logits.max(axis=1, keepdims=True)), 9.0, False),
        (lambda logits: logits * np.float32(np.nan), "not finite", False),
    ],
)
def test_logits_that_differ_fail(
    bundle: Bundle, reference: agreement.Reference, change: Any, error: float | str, same: bool
) -> None:
    peer = decoders.RuntimePeer("torch", Altered(TorchRuntime.from_bundle(bundle), change))  # type: ignore[arg-type]
    row = agreement.agreement(peer, reference, 2, 1)
    assert row["logits_max_error"] == (error if isinstance(error, str) else pytest.approx(error, abs=1e-4))
    assert (row["top1_agree"] == row["steps"]) == same
    assert row["identical"] == 5  # which comes from `best`
    assert row["passed"] is False


@pytest.mark.parametrize("beam", [1, 3])
def test_every_output_has_the_length_asked_for(bundle: Bundle, beam: int) -> None:
    """Even where the model would have ended sooner."""
    setting = timing.Setting(random_sources(bundle.config, 32), beam, tokens=9)
    peer = decoders.RuntimePeer("torch", TorchRuntime.from_bundle(bundle))
    free = peer.decode(setting.sources, SearchOptions(beam=beam, max_length=9))
    assert {len(ids) for ids in free} != {9}
    assert {len(ids) for ids in peer.decode(setting.sources, setting.options)} == {9}
    assert len(peer.steps) == 9


@pytest.mark.parametrize("beam", [1, 3])
def test_a_runtime_that_searches_ahead_is_measured_so(tiny_bundle: Path, tmp_path: Path, beam: int) -> None:
    runtime = ahead_runtime(tiny_bundle, tmp_path, Buckets((24,), (4,), (20,)))
    launches: list[int] = []
    search_ahead = runtime.search_ahead

    def noted(state: Any, request: Any) -> Any:
        found = search_ahead(state, request)
        launches.append(len(found[0].tokens))
        return found

    runtime.search_ahead = noted  # type: ignore[method-assign]
    setting = timing.Setting(random_sources(runtime.config, 3), beam, tokens=16)
    peer = decoders.RuntimePeer("ahead", runtime)
    outputs = peer.decode(setting.sources, setting.options)
    assert launches == [8, 8]
    assert len(peer.steps) == 16
    assert outputs == [found[0].ids for found in on_host(runtime, setting.sources, setting.options)]


BASE = {
    **{"d_model": 24, "n_heads": 3, "d_ff": 40, "n_encoder_layers": 2, "n_decoder_layers": 3},
    **{"src_vocab_size": SRC_VOCAB, "tgt_vocab_size": 37, "max_source_length": 20, "max_target_length": 24},
    **{"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3},
}
ARITHMETICS = {
    "post-norm": {"embedding_scale": math.sqrt(24)},
    "pre-norm": {"norm_first": True, "final_norm": True},
    "one norm a layer, no biases, other everything": {
        **{"activation": "gelu", "shared_norm": True, "feed_forward": "conv1d", "attention_bias": False},
        **{"feed_forward_bias": False, "output_bias": True, "position_offset": 2, "embedding_scale": 3.3},
        **{"norm_eps": 1e-3, "positions": "learned"},
    },
    "tied": {
        **{"tgt_vocab_size": SRC_VOCAB, "tie_source_target": True, "tie_output": True, "output_bias": True},
        **{"norm_first": True, "final_norm": True},
    },
}


def random_transformer(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**BASE, **changes})).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        if model.output_bias is not None:
            model.output_bias[model.config.eos_id] += 4  # ends outputs soon
    return model


@pytest.mark.parametrize("changes", ARITHMETICS.values(), ids=ARITHMETICS)
def test_hugging_face_computes_the_same(changes: dict[str, Any]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = random_transformer(**changes)
    sources = random_sources(model.config, 6, seed=1)
    ids, lengths = map(torch.from_numpy, pad(sources, 1))
    targets = torch.randint(4, SRC_VOCAB, (6, 9))
    theirs = hugging_face.convert(model)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    with torch.inference_mode():
        logits = theirs(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
        assert (logits - model(ids, lengths, targets)).abs().max() < 1e-5
    assert (theirs.lm_head.weight is theirs.model.decoder.embed_tokens.weight) == model.config.tie_output

    peer = hugging_face.HuggingFace(model, "cpu", "float32")
    options = SearchOptions(max_length=20)
    wanted = [hypotheses[0].ids for hypotheses in search(TorchRuntime(model), sources, options)]
    assert peer.decode(sources, options) == wanted
    if model.output_bias is not None:
        assert min(map(len, wanted)) < 11  # what the forced lengths below are longer than
    for beam in (1, 4):
        forced = peer.decode(sources, timing.Setting(sources, beam, tokens=11).options)
        assert {len(output) for output in forced} == {11}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_first": True}, "no pre-norm without a final norm"),
        ({"final_norm": True}, "no post-norm with a final norm"),
    ],
)
def test_what_hugging_face_cannot_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(TfexportError, match=message):
        hugging_face.convert(random_transformer(**changes))


def test_missing_transformers_is_one_line(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TfexportError, match="pip install transformers"):
        decoders.load_peer("hugging-face", "cpu", bundle, "float32", None)


def test_ctranslate2_is_a_peer_from_a_folder_beside_the_bundle_or_without_one(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    copy = open_bundle(Path(shutil.copytree(tiny_bundle, tmp_path / "copy")))
    sources, options = random_sources(copy.config, 5, seed=1), SearchOptions(max_length=9)
    wanted = decoders.load_peer("torch", "cpu", copy, "float32", None).decode(sources, options)
    written = decoders.load_peer("ctranslate2", "cpu", copy, "float32", None)
    assert list(tmp_path.iterdir()) == [tmp_path / "copy"]
    converters.write_ctranslate2(converters.canonical_model(copy), tmp_path / "copy.ct2")
    monkeypatch.setattr(converters, "write_ctranslate2", Mock(side_effect=AssertionError))
    for peer in (written, decoders.load_peer("ctranslate2", "cpu", copy, "float32", None)):
        assert peer.decode(sources, options) == wanted
        for beam in (1, 4):
            forced = peer.decode(sources, timing.Setting(sources, beam, tokens=7).options)
            assert {len(output) for output in forced} == {7}
