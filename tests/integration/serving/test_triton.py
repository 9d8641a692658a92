"""A Triton model repository: what the server reads agrees with the graphs, and its models decode as tfexport does."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from makers.tiny import BOS, EOS, SRC_VOCAB
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.translate import Writer, translate
from tfexport.errors import BundleError, RuntimeUnavailable, TfexportError
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, pad, search
from tfexport.serving.triton import write_repository

RANDOM = np.random.default_rng(0)
SOURCES = [RANDOM.integers(4, SRC_VOCAB, length).tolist() for length in (7, 1, 20, 3)]
LINES = [b"de5 de9 de21", b"", b"de7 \xff", b"de4 " * 40, b"de11 de12", b"de30"]


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return open_bundle(tiny_bundle)


@pytest.fixture(scope="module")
def repository(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `tiny_bundle`. Not to be changed."""
    return write_repository(bundle, tmp_path_factory.mktemp("triton") / "models", beam=2).directory


@pytest.fixture(scope="module")
def all_precisions(half_bundle: Path) -> Bundle:
    return open_bundle(half_bundle)


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def session(repository: Path, model: str) -> onnxruntime.InferenceSession:
    """As the server opens it: by its path, beside which the weights must lie."""
    return onnxruntime.InferenceSession(repository / model / "1" / "model.onnx", providers=["CPUExecutionProvider"])


def text_of(repository: Path, model: str) -> str:
    return (repository / model / "config.pbtxt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def protocol() -> ModuleType:
    """Triton's own description of config.pbtxt. (`import tritonclient.grpc` would need grpcio, which it does not.)"""
    found = importlib.util.find_spec("tritonclient")
    if found is None or not found.submodule_search_locations:
        pytest.skip("Triton's ModelConfig message is not here: pip install tritonclient")
    path = Path(found.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    return load_module(path, "model_config_pb2")


def load_module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(protocol: ModuleType) -> Callable[[Path, str], Any]:
    """Read a model's config as the server does: an unknown field or value is an error."""
    from google.protobuf import text_format

    return lambda repository, model: text_format.Parse(text_of(repository, model), protocol.ModelConfig())


# --- what is in it


def test_layout(repository: Path, bundle: Bundle) -> None:
    copied = {f"translate/1/bundle/{name}" for name in (*bundle.files, "manifest.json")}
    graphs = {
        f"{model}/1/{name}" for model in ("encoder", "decoder_step") for name in ("model.onnx", "weights.safetensors")
    }
    configs = {f"{model}/config.pbtxt" for model in ("encoder", "decoder_step", "translate")}
    assert files_of(repository) == {*copied, *graphs, *configs, "translate/1/model.py"}


def test_files_are_copies_so_that_onnx_reads_them_and_the_bundle_s(repository: Path, bundle: Bundle) -> None:
    """It refuses weights whose file has a second hard link."""
    for model in ("encoder", "decoder_step"):
        onnx.load(repository / model / "1" / "model.onnx")
    for graph in bundle.graphs:
        onnx.load(bundle.directory / graph.file)
    assert all(path.stat().st_nlink == 1 for path in repository.rglob("*") if path.is_file())


def test_comments_tell_what_names_and_dims_do_not(repository: Path) -> None:
    step = text_of(repository, "decoder_step")
    for told in (f"tokens {BOS} (bos) at position 0", f"until {EOS} (eos)", "[rows, 3, cache, 8]: at first zeros"):
        assert told in step
    encoder = text_of(repository, "encoder")
    assert f"begins with {BOS} (bos)" in encoder
    assert f"ends with {EOS} (eos)" in encoder


# --- what the server reads


TYPES = {"tensor(int64)": "TYPE_INT64", "tensor(float)": "TYPE_FP32", "tensor(float16)": "TYPE_FP16"}


def require_same_tensors(config: Any, graph: onnxruntime.InferenceSession, protocol: ModuleType) -> None:
    for configured, own in ((config.input, graph.get_inputs()), (config.output, graph.get_outputs())):
        wanted = {node.name: (TYPES[node.type], [d if isinstance(d, int) else -1 for d in node.shape]) for node in own}
        found = {tensor.name: (protocol.DataType.Name(tensor.data_type), list(tensor.dims)) for tensor in configured}
        assert found == wanted


def test_configs_of_the_graphs_say_what_the_graphs_say(
    repository: Path, config: Callable[[Path, str], Any], protocol: ModuleType
) -> None:
    for model in ("encoder", "decoder_step"):
        read = config(repository, model)
        assert (read.name, read.backend, read.max_batch_size) == (model, "onnxruntime", 0)
        assert [(group.count, group.kind) for group in read.instance_group] == [
            (1, protocol.ModelInstanceGroup.KIND_CPU)
        ]
        require_same_tensors(read, session(repository, model), protocol)


def test_config_of_translate(repository: Path, config: Callable[[Path, str], Any], protocol: ModuleType) -> None:
    read = config(repository, "translate")
    assert (read.name, read.backend, read.max_batch_size) == ("translate", "python", 32)
    assert read.HasField("dynamic_batching")
    assert [(t.name, t.data_type, list(t.dims), t.allow_ragged_batch) for t in read.input] == [
        ("TEXT", protocol.TYPE_STRING, [-1], True)
    ]
    assert [(t.name, t.data_type, list(t.dims)) for t in read.output] == [
        ("TRANSLATION", protocol.TYPE_STRING, [-1]),
        ("STATUS", protocol.TYPE_STRING, [-1]),
        ("SCORE", protocol.TYPE_FP32, [-1]),
    ]
    assert {name: parameter.string_value for name, parameter in read.parameters.items()} == {
        "runtime": "ort-cpu",
        "precision": "float32",
        "beam": "2",
        "length_penalty": "0.6",
        "max_length": "256",
        "batch_size": "32",
    }


def test_half_precision(
    all_precisions: Bundle, tmp_path: Path, config: Callable[[Path, str], Any], protocol: ModuleType
) -> None:
    written = write_repository(all_precisions, tmp_path / "models", precision="float16").directory
    for model in ("encoder", "decoder_step"):
        assert (written / model / "1" / "weights.fp16.safetensors").exists()
        require_same_tensors(config(written, model), session(written, model), protocol)
    assert [t.data_type for t in config(written, "encoder").output] == [protocol.TYPE_FP16] * 2
    assert config(written, "translate").parameters["precision"].string_value == "float16"


def test_a_gpu_gets_the_portable_graphs(
    bundle: Bundle, tmp_path: Path, config: Callable[[Path, str], Any], protocol: ModuleType
) -> None:
    written = write_repository(bundle, tmp_path / "models", runtime="ort-cuda").directory
    for model in ("encoder", "decoder_step"):
        graph = bundle.graph(model)  # type: ignore[arg-type]
        assert (written / model / "1/model.onnx").read_bytes() == graph.read_bytes()
        require_same_tensors(config(written, model), session(written, model), protocol)
    groups = [config(written, model).instance_group[0] for model in ("encoder", "decoder_step", "translate")]
    assert [group.kind for group in groups] == [protocol.ModelInstanceGroup.KIND_GPU] * 3
    assert list(groups[2].gpus) == [0]


def test_what_the_server_cannot_load_is_left_out_and_told(all_precisions: Bundle, tmp_path: Path) -> None:
    written = write_repository(all_precisions, tmp_path / "models", precision="bfloat16", runtime="ort-cuda")
    assert written.models == ("translate",)
    assert [path.name for path in written.directory.iterdir()] == ["translate"]
    assert [note.split(" is left out")[0] for note in written.notes] == ["encoder", "decoder_step"]


def test_a_classifier_is_one_model(
    classifier_bundle: Path, tmp_path: Path, config: Callable[[Path, str], Any], protocol: ModuleType
) -> None:
    written = write_repository(open_bundle(classifier_bundle), tmp_path / "models")
    assert written.models == ("encoder_classifier",)
    assert {path.name for path in written.directory.iterdir()} == {"encoder_classifier"}
    require_same_tensors(
        config(written.directory, "encoder_classifier"), session(written.directory, "encoder_classifier"), protocol
    )
    assert "translate" not in text_of(written.directory, "encoder_classifier")


# --- what its models compute


def test_greedy_decoding_with_the_graphs_as_their_comments_say(repository: Path, bundle: Bundle) -> None:
    encoder, step = session(repository, "encoder"), session(repository, "decoder_step")
    src_ids, src_len = pad(SOURCES, bundle.config.pad_id)
    cross = dict(
        zip(
            (node.name for node in encoder.get_outputs()),
            encoder.run(None, {"src_ids": src_ids, "src_len": src_len}),
            strict=True,
        )
    )
    rows, most = len(SOURCES), 12
    past = {
        node.name: np.zeros((rows, node.shape[1], most, node.shape[3]), dtype=np.float32)
        for node in step.get_inputs()
        if node.name.startswith("past.")
    }
    names = [node.name for node in step.get_outputs()]
    tokens = np.full(rows, BOS)
    columns = []
    for position in range(most):
        given = {"tokens": tokens, "position": np.full(rows, position), "src_len": src_len, **cross, **past}
        found = dict(zip(names, step.run(None, given), strict=True))
        past = {name.replace("present.", "past."): found[name] for name in names if name.startswith("present.")}
        tokens = found["logits"].argmax(axis=1)
        columns.append(tokens)
    wanted = search(load_runtime("ort-cpu", bundle, threads=1), SOURCES, SearchOptions(max_length=most))
    for row, hypotheses in zip(np.stack(columns, axis=1).tolist(), wanted, strict=True):
        assert tuple(row[: len(hypotheses[0].ids)]) == hypotheses[0].ids
    assert any(hypotheses[0].finished for hypotheses in wanted)


@dataclass
class FakeTensor:
    """Of Triton's `triton_python_backend_utils`."""

    name: str
    array: np.ndarray

    def as_numpy(self) -> np.ndarray:
        return self.array


@dataclass
class FakeResponse:
    output_tensors: list[FakeTensor]

    def rows(self) -> list[tuple[bytes, bytes, float]]:
        assert [tensor.name for tensor in self.output_tensors] == ["TRANSLATION", "STATUS", "SCORE"]
        return list(zip(*(tensor.array.ravel().tolist() for tensor in self.output_tensors), strict=True))


def request(lines: list[bytes], *shape: int) -> list[FakeTensor]:
    return [FakeTensor("TEXT", np.array(lines, dtype=object).reshape(shape or (1, len(lines))))]


@dataclass
class Server:
    """What Triton's Python backend does with translate/1/model.py."""

    model: Any
    logged: list[str]

    def execute(self, *requests: list[FakeTensor]) -> list[FakeResponse]:
        return self.model.execute(list(requests))


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, dict[str, str]], Server]:
    logged: list[str] = []
    utils = SimpleNamespace(
        get_input_tensor_by_name=lambda given, name: next(tensor for tensor in given if tensor.name == name),
        Tensor=FakeTensor,
        InferenceResponse=FakeResponse,
        Logger=SimpleNamespace(log_error=logged.append),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)

    def start(repository: Path, parameters: dict[str, str]) -> Server:
        module = load_module(repository / "translate" / "1" / "model.py", "triton_model_under_test")
        model = module.TritonPythonModel()
        given = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
        folder = str(repository / "translate")
        model.initialize({"model_config": json.dumps(given), "model_repository": folder, "model_version": "1"})
        return Server(model, logged)

    return start


PARAMETERS = {
    "runtime": "ort-cpu",
    "precision": "float32",
    "beam": "2",
    "length_penalty": "1.5",
    "max_length": "9",
    "batch_size": "2",
}


def wanted_rows(bundle: Bundle, lines: list[bytes]) -> list[tuple[bytes, bytes, float]]:
    options = SearchOptions(beam=2, length_penalty=1.5, max_length=9)
    writer = Writer.of(bundle, None)
    results = translate(load_runtime("ort-cpu", bundle, threads=1), Reader.of(bundle, None), lines, options)
    return [
        (writer.line(r).encode(), r.status.encode(), pytest.approx(r.hypotheses[0].score if r.hypotheses else 0.0))
        for r in results
    ]


def test_translate_decodes_good_lines_and_marks_bad_ones(
    repository: Path, bundle: Bundle, serve: Callable[..., Server]
) -> None:
    wanted = wanted_rows(bundle, LINES)
    assert [status for _, status, _ in wanted[1:4]] == [b"empty", b"invalid_utf8", b"too_long"]
    assert all(text and status in (b"ok", b"length_limit") for text, status, _ in (wanted[0], *wanted[4:]))
    (response,) = serve(repository, PARAMETERS).execute(request(LINES))
    assert response.rows() == wanted
    assert [tensor.array.shape for tensor in response.output_tensors] == [(1, len(LINES))] * 3
    assert response.output_tensors[2].array.dtype == np.float32


def test_requests_are_decoded_together_and_answered_apart(
    repository: Path, bundle: Bundle, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(repository, PARAMETERS)
    together = []

    def counted(runtime: Any, reader: Any, lines: list[bytes], *rest: Any, **options: Any) -> Any:
        together.append(len(lines))
        return translate(runtime, reader, lines, *rest, **options)

    monkeypatch.setattr("tfexport.decoding.job.translate", counted)
    responses = server.execute(request(LINES[:1]), request([]), request(LINES[1:5], 4, 1), request(LINES[5:], 1))
    assert together == [len(LINES)]
    assert [row for response in responses for row in response.rows()] == wanted_rows(bundle, LINES)
    shapes = [[tensor.array.shape for tensor in response.output_tensors] for response in responses]
    assert shapes == [[(1, 1)] * 3, [(1, 0)] * 3, [(4, 1)] * 3, [(1,)] * 3]


def test_a_line_that_fails_costs_no_other_its_translation(
    repository: Path, bundle: Bundle, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(repository, PARAMETERS)

    def fail_at_a_line(runtime: Any, reader: Any, lines: list[bytes], *rest: Any, **options: Any) -> Any:
        if LINES[4] in lines:
            raise TfexportError("a source of 99 ids is more than the 64 planned for.")
        return translate(runtime, reader, lines, *rest, **options)

    wanted = wanted_rows(bundle, LINES)
    monkeypatch.setattr("tfexport.decoding.job.translate", fail_at_a_line)
    wanted[4] = (b"", b"failed", 0.0)
    (response,) = server.execute(request(LINES))
    assert response.rows() == wanted
    assert server.logged == ["translate: a source of 99 ids is more than the 64 planned for."]


def test_translate_in_half_precision(all_precisions: Bundle, tmp_path: Path, serve: Callable[..., Server]) -> None:
    written = write_repository(all_precisions, tmp_path / "models", precision="float16").directory
    server = serve(written, {**PARAMETERS, "precision": "float16"})
    assert server.model._job.runtime.precision == "float16"
    (response,) = server.execute(request(LINES))
    assert [status for _, status, _ in response.rows()][1:4] == [b"empty", b"invalid_utf8", b"too_long"]


# --- what is refused


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"runtime": "ort-gpu"}, RuntimeUnavailable, "Use one of: ort-cpu"),
        ({"runtime": "ort-cpu", "precision": "bfloat16"}, RuntimeUnavailable, "cannot compute bf16 on the CPU"),
        ({"runtime": "tensorrt", "precision": "float16"}, BundleError, "no TensorRT fp16 engines.*tfexport build"),
        ({"precision": "float16"}, BundleError, "has no fp16 encoder graph"),
        ({"beam": 0}, TfexportError, "beam is 0, not between 1 and 65536"),
        ({"batch_size": 0}, TfexportError, "the batch size is 0, below 1"),
    ],
)
def test_what_would_not_load_is_not_written(
    bundle: Bundle, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write_repository(bundle, tmp_path / "models", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["dtype", "name", "shape"])
def test_a_bundle_with_other_tensors_than_the_contract_s_is_refused(
    own_bundle: Path, tmp_path: Path, change: str
) -> None:
    manifest = json.loads((own_bundle / "manifest.json").read_text())
    (step,) = (g for g in manifest["graphs"] if g["file"] == "decoder_step.onnx")
    step["outputs"][0][change] = {"dtype": "float16", "name": "scores", "shape": ["rows", 5]}[change]
    (own_bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"decoder_step\.onnx has other tensors"):
        write_repository(open_bundle(own_bundle), tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_a_repository_is_replaced_only_with_force(bundle: Bundle, classifier_bundle: Path, tmp_path: Path) -> None:
    directory = tmp_path / "models"
    write_repository(bundle, directory)
    before = files_of(directory)
    classifier = open_bundle(classifier_bundle)
    with pytest.raises(BundleError, match=f"{directory} exists. Replace it with --force"):
        write_repository(classifier, directory)
    assert files_of(directory) == before
    write_repository(classifier, directory, force=True)
    assert [path.name for path in directory.iterdir()] == ["encoder_classifier"]
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def put_a_model(directory: Path) -> None:
    (directory / "mine" / "1").mkdir(parents=True)
    (directory / "mine" / "config.pbtxt").write_text('backend: "python"\n')


@pytest.mark.parametrize("force", [False, True])
def test_what_others_made_is_never_replaced(own_bundle: Path, tmp_path: Path, force: bool) -> None:
    bundle = open_bundle(own_bundle)
    mixed = write_repository(bundle, tmp_path / "mixed").directory
    put_a_model(mixed)
    put_a_model(tmp_path / "theirs")
    (tmp_path / "file").write_text("mine")
    before = files_of(tmp_path)
    for name in ("mixed", "theirs", "file", "own"):
        with pytest.raises(BundleError, match="so it is not replaced"):
            write_repository(bundle, tmp_path / name, force=force)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("existing", [False, True])
def test_an_interruption_leaves_what_there_was(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    directory = tmp_path / "models"
    if existing:
        write_repository(bundle, directory)
    before = files_of(tmp_path)
    for error, told in (
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), BundleError),
    ):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(told):
            write_repository(bundle, directory, force=True)
        assert files_of(tmp_path) == before
        assert [path.name for path in tmp_path.iterdir()] == ["models"] * existing
