"""What benchmarks/peers/converters.py writes computes what the canonical model does, in the engines that read it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers import converters
from makers.paths import ROOT
from makers.tiny import randomised
from tests.support.fakes import Ids
from tfexport.bench.peers import CTranslate2Peer, HuggingFacePeer, Peer, RuntimePeer
from tfexport.bundle.reader import open_bundle
from tfexport.config import ModelConfig
from tfexport.errors import BundleError, RuntimeUnavailable, TfexportError
from tfexport.models.transformer import Transformer
from tfexport.runtimes import load_runtime
from tfexport.runtimes.outputs import FloatArray
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, pad
from tfexport.verification.parity import random_sources

pytestmark = pytest.mark.thorough

OPTIMUM_PYTHON = os.environ.get("TFEXPORT_OPTIMUM_PYTHON")
"""An interpreter with the packages of benchmarks/peers/optimum.txt."""

BASE = ModelConfig(
    d_model=12,
    n_heads=3,
    d_ff=20,
    n_encoder_layers=2,
    n_decoder_layers=1,
    src_vocab_size=31,
    tgt_vocab_size=37,
    max_source_length=44,
    max_target_length=25,
    unk_id=0,
    pad_id=1,
    bos_id=2,
    eos_id=3,
    embedding_scale=12**0.5,
)
"""No two sizes alike where that is possible, so that swapped axes do not fit."""
PRE_NORM: dict[str, Any] = {"norm_first": True, "final_norm": True}
ONE_VOCABULARY: dict[str, Any] = {"src_vocab_size": 37, "tie_source_target": True}
BOTH_READ: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "gelu": {"activation": "gelu"},
    "no embedding scale": {"embedding_scale": 1.0},
    "learned positions": {"positions": "learned"},
    "positions from row 2": {"positions": "stored", "position_offset": 2},
    "no biases": {"attention_bias": False, "feed_forward_bias": False},
    "output bias": {"output_bias": True},
    "conv1d and one norm a layer": {"feed_forward": "conv1d", "shared_norm": True},
    "larger source vocabulary, shorter source": {"src_vocab_size": 41, "max_source_length": 23},
    "other heads in the encoder": {"n_encoder_heads": 2},
    "tied output": {"tie_output": True},
    "one vocabulary": ONE_VOCABULARY,
    "one matrix": {**ONE_VOCABULARY, "tie_output": True},
    "pre-norm, one matrix": {**PRE_NORM, **ONE_VOCABULARY, "tie_output": True},
    "pre-norm, own output": {**PRE_NORM, **ONE_VOCABULARY, "output_bias": True},
}
"""Changes of `BASE`."""
CTRANSLATE2_READS: dict[str, dict[str, Any]] = {
    **BOTH_READ,
    "another eps": {"norm_eps": 0.03},
    "another embedding scale": {"embedding_scale": 0.7},
    "pre-norm, two vocabularies": PRE_NORM,
    "pre-norm, no final norm": {"norm_first": True},
    "post-norm, final norm": {"final_norm": True},
    "a final norm in the encoder": {"final_norm": True, "final_norm_in": "encoder"},
    "pre-norm, a final norm in the decoder": {"norm_first": True, "final_norm": True, "final_norm_in": "decoder"},
    "no unknown token": {"unk_id": -1},
    "bos that the source has not": {"src_vocab_size": 9, "bos_id": 20},
    "unknown token that the target has not": {"src_vocab_size": 41, "unk_id": 39},
}
HUGGING_FACE_REFUSES: list[tuple[dict[str, Any], str]] = [
    ({"norm_eps": 1e-6}, "norm_eps 1e-06, only 1e-05"),
    ({"embedding_scale": 0.7}, "embedding_scale 0.7, only 1 and sqrt"),
    (PRE_NORM, "two embedding matrices"),
    ({"norm_eps": 1e-6, "embedding_scale": 2.0}, "norm_eps 1e-06, only 1e-05; embedding_scale 2"),
    ({"final_norm": True}, "no post-norm with a final norm"),
    ({"norm_first": True, **ONE_VOCABULARY}, "no pre-norm without a final norm"),
    ({**PRE_NORM, **ONE_VOCABULARY, "final_norm_in": "encoder"}, "final_norm_in encoder"),
    ({"positions": "none"}, "not positions none"),
]


def random_model(changes: dict[str, Any]) -> Transformer:
    model = Transformer(BASE.replace(**changes))
    randomised(model, seed=5)
    with torch.no_grad():
        for stack in (model.encoder, model.decoder):
            # Not to be swallowed by scaled embeddings; a stored table is not one of the parameters.
            if model.config.positions in ("learned", "stored"):
                stack.positions.table.copy_(torch.randn(stack.positions.table.shape))
        if model.output_bias is not None:
            model.output_bias[model.config.pad_id] = -20.0  # a trained model does not emit it
    return model.eval()


def sources_of(config: ModelConfig) -> list[Ids]:
    """Of many lengths, the longest possible among them."""
    drawn = [source[: config.max_source_length] for source in random_sources(config, 12)]
    longest = [4 + index % (config.src_vocab_size - 4) for index in range(config.max_source_length)]
    return [*map(tuple, drawn), tuple(longest)]


def log_probs(model: Transformer, source: Ids, target: Ids) -> FloatArray:
    """Of each of `target`'s tokens, given those before it."""
    tokens = torch.tensor([[model.config.bos_id, *target[:-1]]])
    with torch.no_grad():
        found = model(torch.tensor([source]), torch.tensor([len(source)]), tokens).log_softmax(-1)
    return found[0, range(len(target)), list(target)].numpy()


def same_outputs(peer: Peer, model: Transformer) -> None:
    """The tokens of greedy and of beam search. Penalties of length are other formulas, and so left out."""
    own = RuntimePeer(TorchRuntime(model))
    sources = sources_of(model.config)
    for beam in (1, 3):
        options = SearchOptions(beam=beam, length_penalty=0.0, max_length=100)  # beyond the model's own limit
        assert peer.decode(sources, options, 4) == own.decode(sources, options, 4)


@pytest.fixture
def ctranslate2() -> Any:
    return pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed: pip install ctranslate2")


@pytest.mark.parametrize("changes", CTRANSLATE2_READS.values(), ids=CTRANSLATE2_READS)
def test_ctranslate2_computes_what_the_model_does(ctranslate2: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    model = random_model(changes)
    converters.write_ctranslate2(model, tmp_path / "ct2")

    translator = ctranslate2.Translator(str(tmp_path / "ct2"), compute_type="float32", intra_threads=1)
    sources = sources_of(model.config)
    eos = model.config.eos_id
    # Every position and nearly every token; eos is added by CTranslate2.
    targets = [
        tuple((7 * row + step) % 33 + 4 for step in range(model.config.max_target_length - 1))
        for row in range(len(sources))
    ]
    words = [[list(map(str, ids)) for ids in side] for side in (sources, targets)]
    scored = translator.score_batch(*words, max_input_length=0)
    for source, target, result in zip(sources, targets, scored, strict=True):
        np.testing.assert_allclose(result.log_probs, log_probs(model, source, (*target, eos)), atol=2e-5)
    same_outputs(CTranslate2Peer(tmp_path / "ct2"), model)


@pytest.mark.parametrize("changes", BOTH_READ.values(), ids=BOTH_READ)
def test_a_hugging_face_folder_computes_what_the_model_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed: pip install transformers")
    model = random_model(changes)
    config = model.config
    converters.write_hugging_face(model, tmp_path / "hf")

    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf").eval()
    sources = sources_of(config)
    src_ids, src_len = map(torch.from_numpy, pad(sources, config.pad_id))
    steps = torch.arange(config.max_target_length)
    tgt_ids = (steps + 7 * torch.arange(len(sources))[:, None]) % 33 + 4
    mask = (torch.arange(src_ids.shape[1]) < src_len[:, None]).long()
    with torch.no_grad():
        found = theirs(input_ids=src_ids, attention_mask=mask, decoder_input_ids=tgt_ids).logits
        wanted = model(src_ids, src_len, tgt_ids)
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=0)
    same_outputs(HuggingFacePeer(tmp_path / "hf"), model)


@pytest.mark.parametrize(("changes", "tensors"), [({}, 3), ({"tie_output": True}, 2), (BOTH_READ["one matrix"], 1)])
def test_a_matrix_that_is_used_twice_is_stored_once(tmp_path: Path, changes: dict[str, Any], tensors: int) -> None:
    from safetensors import safe_open

    pytest.importorskip("transformers", reason="Transformers is not installed: pip install transformers")
    converters.write_hugging_face(random_model(changes), tmp_path / "hf")
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if re.search(r"embed_tokens|shared|lm_head", name)]  # noqa: SIM118
    assert len(names) == tensors


@pytest.mark.parametrize(("changes", "message"), HUGGING_FACE_REFUSES)
def test_hugging_face_refuses_what_its_folder_cannot_say(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed: pip install transformers")
    with pytest.raises(TfexportError, match=message) as caught:
        converters.write_hugging_face(random_model(changes), tmp_path / "hf")
    assert "Leave this peer out." in str(caught.value).replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("write", "package"),
    [(converters.write_ctranslate2, "ctranslate2"), (converters.write_hugging_face, "transformers")],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None], package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RuntimeUnavailable, match=f"pip install {package}"):
        write(random_model({}), tmp_path / "new")


def test_a_bundle_is_decoded_as_by_its_own_runtime(ctranslate2: Any, tiny_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed: pip install transformers")
    command = [sys.executable, "-m", "benchmarks.peers.converters", str(tiny_bundle)]
    command += ["--ctranslate2", str(tmp_path / "ct2"), "--hugging-face", str(tmp_path / "deep" / "hf")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"ctranslate2: {tmp_path}/ct2", f"hugging-face: {tmp_path}/deep/hf"]
    bundle = open_bundle(tiny_bundle)
    own, sources = (
        RuntimePeer(load_runtime("ort-cpu", bundle, threads=1)),
        [s[:20] for s in random_sources(bundle.config, 20)],
    )
    for beam in (1, 4):
        options = SearchOptions(beam=beam, length_penalty=0.0)
        wanted = own.decode(sources, options, 7)
        for peer in (CTranslate2Peer(tmp_path / "ct2"), HuggingFacePeer(tmp_path / "deep" / "hf")):
            assert peer.decode(sources, options, 7) == wanted
    # It does not write over what it does not know.
    assert converters.main([str(tiny_bundle), "--ctranslate2", str(tmp_path / "ct2")]) == 2


def test_a_classifier_has_nothing_to_convert(classifier_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BundleError, match="an encoder classifier"):
        converters.canonical_model(open_bundle(classifier_bundle))
    assert converters.main([str(classifier_bundle), "--ctranslate2", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    "arguments",
    [[], ["--optimum", "there"], ["--optimum", "there", "--hugging-face", "hf"], ["--optimum-python", "python"]],
)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        converters.parse(["bundle", *arguments])
    assert "error:" in capsys.readouterr().err


def interpreter(tmp_path: Path, script: str) -> Path:
    """A stand-in for Optimum's interpreter, called as `python -c CODE SOURCE TARGET`."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_cost_of_an_export_is_that_of_its_process(tmp_path: Path) -> None:
    (tmp_path / "hf").write_text(json.dumps({"vocab_size": 41, "decoder_vocab_size": 37}))
    held = bytearray(2**28)
    held[::4096] = bytes(len(held[::4096]))  # a parent with much memory, which is not counted
    copy = 'cp "$3" "$4/config.json"'
    small = converters.export_optimum(tmp_path / "hf", tmp_path / "one", interpreter(tmp_path, copy))
    hungry = f"{sys.executable} -S -c 'held = bytearray(2**27); held[::4096] = bytes(len(held[::4096]))'"
    large = converters.export_optimum(tmp_path / "hf", tmp_path / "two", interpreter(tmp_path, f"{hungry}\n{copy}"))
    assert small.seconds > 0
    assert 0 < small.memory < 2**27 < large.memory < 2**28
    # Beam search counts logits by it.
    assert json.loads((tmp_path / "one" / "config.json").read_text())["vocab_size"] == 37


def test_an_export_that_fails_says_its_last_line_and_leaves_nothing(tmp_path: Path) -> None:
    python = interpreter(tmp_path, 'touch "$4/half"; echo first; echo "No module named optimum" >&2; exit 3')
    with pytest.raises(TfexportError, match=r"exit code 3: No module named optimum Check that .*optimum.txt"):
        converters.export_optimum(tmp_path / "hf", tmp_path / "onnx", python)
    with pytest.raises(TfexportError, match=r"cannot be run\..*optimum.txt and give its interpreter"):
        converters.export_optimum(tmp_path / "hf", tmp_path / "onnx", tmp_path / "nothing")
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


@pytest.mark.skipif(
    OPTIMUM_PYTHON is None,
    reason="TFEXPORT_OPTIMUM_PYTHON names no interpreter with the packages of benchmarks/peers/optimum.txt",
)
@pytest.mark.parametrize(
    "name", ["larger source vocabulary, shorter source", "learned positions", "pre-norm, one matrix"]
)
def test_optimum_decodes_what_the_model_does(tmp_path: Path, name: str) -> None:
    assert OPTIMUM_PYTHON is not None
    model = random_model(BOTH_READ[name])
    converters.write_hugging_face(model, tmp_path / "hf")
    converters.export_optimum(tmp_path / "hf", tmp_path / "onnx", Path(OPTIMUM_PYTHON))
    sources = sources_of(model.config)
    script = """
import json, sys
from pathlib import Path
from tfexport.bench.peers import OptimumPeer
from tfexport.search.search import SearchOptions
peer = OptimumPeer(Path(sys.argv[1]))
options = [{"beam": 1}, {"beam": 3, "length_penalty": 0.0}, {"beam": 3, "min_length": 9, "max_length": 10}]
print(json.dumps([peer.decode(json.loads(sys.argv[2]), SearchOptions(**each), 4) for each in options]))
"""
    command = [OPTIMUM_PYTHON, "-c", script, str(tmp_path / "onnx"), json.dumps(sources)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *found, forced = json.loads(done.stdout.splitlines()[-1])
    own = RuntimePeer(TorchRuntime(model))
    for beam, outputs in zip((1, 3), found, strict=True):
        wanted = own.decode(sources, SearchOptions(beam=beam, length_penalty=0.0), 4)
        assert [tuple(output) for output in outputs] == wanted
    assert {len(output) for output in forced} == {10}
