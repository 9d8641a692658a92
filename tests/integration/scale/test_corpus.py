"""`tfexport corpus` with Ray on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tfexport
from makers.paths import ROOT
from makers.tiny import SRC_VOCAB

pytest.importorskip("ray.data", reason="Ray Data is not installed: pip install 'tfexport[ray]'")
import pyarrow as pa
import ray
from pyarrow import parquet
from ray.exceptions import RayError

from tfexport.errors import TfexportError
from tfexport.scale import Scorer, cluster
from tfexport.scale.cluster import WITHOUT_METRICS, connect, quiet_ray_data
from tfexport.scale.run import _room

pytestmark = pytest.mark.thorough

LINES = [" ".join(f"de{4 + (n * 7 + place * 3) % (SRC_VOCAB - 4)}" for place in range(1 + n % 9)) for n in range(400)]
ENVIRONMENT = {
    **os.environ,
    **{"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)},
}


def corpus(bundle: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run("corpus", bundle, *arguments, "--max-length", "12")


def command_of(name: str, *arguments: object) -> list[str]:
    options = ["--actors", "2", "--rows-per-shard", "64"]
    return [sys.executable, "-m", "tfexport", name, *map(str, arguments), *options]


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = command_of(name, *arguments)
    return subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_parquet_has_the_text_of_the_model_and_a_lost_part_is_made_again(tiny_bundle: Path, tmp_path: Path) -> None:
    table = pa.table({"n": range(400), "de": LINES})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=150)
    given = (tmp_path / "in.parquet", "-o", tmp_path / "out", "--text-column", "de")
    done = corpus(tiny_bundle, *given)
    assert done.returncode == 0, done.stderr
    found = parquet.read_table(tmp_path / "out")
    wanted = [one.text for one in tfexport.load(tiny_bundle, threads=1).translate(LINES, max_length=12)]
    assert found["text"].to_pylist() == wanted
    assert found["id"].to_pylist() == [f"0:{number}" for number in range(400)]
    assert found.select(["n", "de"]).equals(table)
    parts = sorted((tmp_path / "out").glob("part-*"))
    assert len(parts) == 8
    content = parts[3].read_bytes()
    parts[3].unlink()
    times = [part.stat().st_mtime_ns for part in parts if part.exists()]
    done = corpus(tiny_bundle, *given, "--resume")
    assert done.returncode == 0, done.stderr
    assert parts[3].read_bytes() == content
    assert [part.stat().st_mtime_ns for part in parts if part != parts[3]] == times
    summary = json.loads((tmp_path / "out" / "_tfexport" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["rows"], sum(summary["statuses"].values()), summary["parts"]) == (400, 400, 8)


def test_a_resumed_run_makes_a_cut_part_again_and_refuses_an_input_that_was_rewritten(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    path, out = tmp_path / "in.txt", tmp_path / "out"
    content = "".join(f"{line}\n" for line in LINES).encode()
    path.write_bytes(content)
    given = (tiny_bundle, path, "-o", out)
    assert corpus(*given).returncode == 0
    parts = {part: part.read_bytes() for part in sorted(out.glob("part-*"))}
    cut = list(parts)[2]
    os.truncate(cut, 100)
    done = corpus(*given, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"warning: {cut} is damaged: its sha256 differs. Its rows are computed again." in done.stderr
    assert {part: part.read_bytes() for part in out.glob("part-*")} == parts
    before = path.stat()
    path.write_bytes(content.replace(b"de4", b"de5"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (out / "_tfexport" / "summary.json").unlink()
    done = corpus(*given, "--resume")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {path} has other content than the finished parts were made")
    assert not (out / "_tfexport" / "summary.json").exists()


def test_bad_rows_are_counted(tiny_bundle: Path, tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "de4"}, {"text": None}, {"text": "de5 " * 2_500_000, "more": 1}, {"text": 7}]
    content = "".join(json.dumps(row) + "\n" for row in rows) + "broken\n"
    (tmp_path / "in.jsonl").write_text(content, encoding="utf-8")
    (tmp_path / "empty.jsonl").touch()
    done = corpus(tiny_bundle, tmp_path / "*.jsonl", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    (part,) = (tmp_path / "out").glob("part-*")
    found = [json.loads(line) for line in part.read_bytes().splitlines()]
    assert [row["status"] for row in found][1:] == ["null", "too_long", "not_text", "invalid_json"]
    assert found[2]["input_text"] == rows[2]["text"]
    assert found[2]["more"] == 1


def test_what_cannot_be_written_is_one_line_and_the_run_goes_on(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    given = (tmp_path / "in.txt", "-o", tmp_path / "out", "--resume")
    part = tmp_path / "out" / "part-00000-000000000064-64.txt"
    part.mkdir(parents=True)  # a file cannot take the name
    done = corpus(tiny_bundle, *given)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: cannot write {part}: ")
    refused = corpus(tiny_bundle, *given, "--output-format", "jsonl")
    assert (
        " has another run: its output_format is 'text', not 'jsonl'. Continue that run"
        in refused.stderr.splitlines()[-1]
    )
    part.rmdir()
    assert corpus(tiny_bundle, *given).returncode == 0
    content = b"".join(part.read_bytes() for part in sorted((tmp_path / "out").glob("part-*")))
    wanted = [one.text for one in tfexport.load(tiny_bundle, threads=1).translate(LINES, max_length=12)]
    assert content.decode("utf-8").splitlines() == wanted


def test_an_error_in_a_worker_is_one_line(tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(pa.table({"text": [os.urandom(8).hex() for _ in range(5000)]}), path, use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(3000) + whole[3004:])
    done = corpus(tiny_bundle, path, "-o", tmp_path / "out")
    assert done.returncode == 2
    assert f"error: cannot read {path} as parquet" in done.stderr.splitlines()[-1]


def test_pairs_are_scored(tiny_bundle: Path, tmp_path: Path) -> None:
    targets = [f"wört{4 + n % 30} wört{4 + n % 7}" for n in range(100)]
    table = pa.table({"de": LINES[:100], "en": [*targets[:99], None], "score": range(100)})
    parquet.write_table(table, tmp_path / "in.parquet")
    given = (tiny_bundle, tmp_path / "in.parquet", "-o", tmp_path / "out", "--target-column", "en")
    done = run("corpus-score", *given)
    assert "error: " in done.stderr.splitlines()[-1]
    assert "has no column 'source'. Give --source-column: there are de, en, score" in done.stderr
    done = run("corpus-score", *given, "--source-column", "de")
    assert done.returncode == 0, done.stderr
    found = parquet.read_table(tmp_path / "out")
    assert found.column_names == ["id", "status", "message", "log_prob", "cross_entropy", "de", "en", "score"]
    assert found.select(["de", "en", "score"]).equals(table)
    wanted = [one.hypotheses[0] for one in tfexport.load(tiny_bundle, threads=1).score(LINES[:99], targets[:99])]
    assert found["log_prob"].to_pylist()[:99] == pytest.approx([one.log_prob for one in wanted], abs=1e-5)
    assert found.to_pylist()[99]["status"] == "null"
    other = run("corpus-score", *given, "--source-column", "de", "--reverse", tiny_bundle, "--resume")
    assert "has another run" in other.stderr.splitlines()[-1]


def test_pairs_are_scored_in_both_directions(tiny_bundle: Path, reverse_bundle: Path, tmp_path: Path) -> None:
    targets = [f"wört{4 + n % 30} wört{4 + n % 7}" for n in range(100)]
    table = pa.table({"source": LINES[:100], "target": targets})
    parquet.write_table(table, tmp_path / "in.parquet")
    given = ("--reverse", reverse_bundle, "--channel-weight", "0.5")
    done = run("corpus-score", tiny_bundle, tmp_path / "in.parquet", "-o", tmp_path / "out", *given)
    assert done.returncode == 0, done.stderr
    found = parquet.read_table(tmp_path / "out").to_pylist()
    wanted = Scorer(tiny_bundle, reverse=reverse_bundle, channel_weight=0.5)(table).to_pylist()
    for name in ("log_prob", "reverse_log_prob", "dual_cross_entropy", "noisy_channel"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in wanted], abs=1e-5)


def test_rows_are_classified(worded_classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES[:100]), encoding="utf-8")
    given = (worded_classifier, tmp_path / "in.txt", "-o", tmp_path / "out", "--top", 2)
    done = run("corpus-classify", *given, "--output-format", "jsonl")
    assert done.returncode == 0, done.stderr
    content = b"".join(part.read_bytes() for part in sorted((tmp_path / "out").glob("part-*")))
    rows = [json.loads(line) for line in content.splitlines()]
    wanted = tfexport.load_classifier(worded_classifier, threads=1).classify(LINES[:100], top=2)
    assert [row["text"] for row in rows] == LINES[:100]
    assert [row["class"] for row in rows] == [one.classes[0].class_ for one in wanted]
    assert [[one["class"] for one in row["classes"]] for row in rows] == [[c.class_ for c in o.classes] for o in wanted]


def test_a_second_driver_is_refused_and_the_first_goes_on(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES * 50), encoding="utf-8")
    given = (tiny_bundle, tmp_path / "in.txt", "-o", tmp_path / "out", "--max-length", "12")
    with subprocess.Popen(command_of("corpus", *given), env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.PIPE) as first:
        until = time.monotonic() + 60
        while not (tmp_path / "out" / "_tfexport" / "run.json").exists() and time.monotonic() < until:
            time.sleep(0.05)
        second = run("corpus", *given, "--resume")
        assert second.returncode == 2
        assert f"process {first.pid} on " in second.stderr.splitlines()[-1]
        _, stderr = first.communicate(timeout=300)
    assert first.returncode == 0, stderr.decode()
    summary = json.loads((tmp_path / "out" / "_tfexport" / "summary.json").read_text(encoding="utf-8"))
    assert summary["rows"] == 20_000


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_tells_how_to_continue(
    tiny_bundle: Path, tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES * 50), encoding="utf-8")
    given = (tiny_bundle, tmp_path / "in.txt", "-o", tmp_path / "out", "--max-length", "12")
    command = command_of("corpus", *given)
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.PIPE, text=True) as first:
        until = time.monotonic() + 60
        while len(list((tmp_path / "out").glob("part-*"))) < 4 and time.monotonic() < until:
            time.sleep(0.05)
        first.send_signal(sent)
        _, stderr = first.communicate(timeout=60)
    assert first.returncode == status
    found = re.fullmatch(r"interrupted: ([\d,]+) rows are written\. Continue with --resume\.", stderr.splitlines()[-1])
    parts = (tmp_path / "out").glob("part-*")
    assert found, stderr
    assert int(found[1].replace(",", "")) == sum(int(part.stem.split("-")[-1]) for part in parts)
    assert "SIGTERM received" not in stderr
    done = run("corpus", *given, "--resume")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("20,000 rows in ")


def test_input_that_waits_for_actors_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:

    from tfexport.scale import run as runs
    from tfexport.scale.options import ClusterOptions

    class Stop(Exception): ...

    def stop(*_: Any, **__: Any) -> None:
        raise Stop

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray.data, "from_items", stop)
    task: Any = SimpleNamespace(options={"threads": 1})
    manifest: Any = SimpleNamespace(inputs=[])
    with pytest.raises(Stop):
        runs._dataset(manifest, SimpleNamespace(), task, ClusterOptions(buffer_mib=7), 2, {})  # type: ignore[arg-type]
    limits = ray.data.DataContext.get_current().execution_options.resource_limits
    assert limits.object_store_memory == 7 << 20


def test_the_cluster_ends_with_the_run(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    code = """
        import sys
        import ray
        from tfexport.__main__ import main

        try:
            main()
        finally:
            print(ray.is_initialized())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    arguments = command_of("corpus", tiny_bundle, tmp_path / "in.txt", "-o", tmp_path / "out")[3:]
    done = subprocess.run(
        [*command, *arguments], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["False"], done.stderr
    assert not [line for line in done.stderr.splitlines() if "Progress bars" in line or " INFO " in line]


@pytest.mark.parametrize("flags", [("--threads", "64"), ("--gpus", "1")])
def test_actors_without_room_are_an_error(tiny_bundle: Path, tmp_path: Path, flags: tuple[str, str]) -> None:
    (tmp_path / "in.txt").write_text("de4\n", encoding="utf-8")
    done = run("corpus", tiny_bundle, tmp_path / "in.txt", "-o", tmp_path / "out", *flags)
    assert done.returncode == 2
    assert "error: the cluster has no room for an actor: it has " in done.stderr.splitlines()[-1]


def test_actors_on_parts_of_gpus() -> None:
    assert [_room({"CPU": 64, "GPU": 2}, 1, gpus, may_grow=False) for gpus in (0.1, 0.2, 0.5, 1, 2)] == [
        20,
        10,
        4,
        2,
        1,
    ]


def test_a_cluster_that_may_grow_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    assert _room({"CPU": 2}, 4, 0, may_grow=True) == 0
    assert "it has 2 CPUs and 0 GPUs. The run waits for machines" in caplog.text


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError, ValueError, RayError])
def test_a_cluster_that_cannot_be_used_is_an_error(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself looks for a cluster that is not there for many minutes."""

    def refuse(**_: object) -> None:
        raise kind("no such\ncluster.")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(cluster, "_require_answer", lambda *_: None)
    with pytest.raises(TfexportError, match=r"cannot use the Ray cluster head:9: .*no such cluster\. Check --address"):
        connect("head:9")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999"])
def test_a_cluster_that_does_not_answer_is_an_error_before_ray_looks_for_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray looks for it for minutes"))
    with pytest.raises(TfexportError, match=rf"cannot use the Ray cluster {re.escape(address)}: .*Check --address"):
        connect(address)


def test_ray_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray Data does not run over it"))
    with pytest.raises(TfexportError, match="Start the command on a machine of the cluster, with --address auto"):
        connect("ray://head:10001")


@pytest.mark.parametrize(("code", "status"), [(15, 143), (3, 3)])
def test_a_signal_while_ray_starts_has_its_own_status(monkeypatch: pytest.MonkeyPatch, code: int, status: int) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        sys.exit(code)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(SystemExit) as ended:
        connect("auto")
    assert ended.value.code == status
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_cluster_that_answers_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(ray, "init", lambda **options: given.append(options["address"]))
    monkeypatch.setattr(cluster, "_require_answer", lambda *of: asked.append(of))
    addresses = ["127.0.0.1:10001", "[::1]:6379", "auto", "local", "k8s://head:1"]
    for one in addresses:
        connect(one)
    assert given == addresses
    assert asked == [("127.0.0.1", 10001), ("::1", 6379)]


def test_fewer_shards_than_actors_are_no_reason_to_warn() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet_ray_data()
        warnings.warn("The minimum number of concurrent actors for 'x' is set to 2, but it got 1", stacklevel=1)
        warnings.warn("other", stacklevel=1)
    assert [str(one.message) for one in seen] == ["other"]


@pytest.mark.parametrize("address", [None, "head:9"])
def test_a_cluster_of_others_keeps_its_metrics(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    for name in WITHOUT_METRICS:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_event_stats", "1")  # of the user
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options, environment=dict(os.environ)))
    monkeypatch.setattr(cluster, "_require_answer", lambda *_: None)
    connect(address)
    environment = {name: given["environment"].get(name) for name in WITHOUT_METRICS}
    own = {**WITHOUT_METRICS, "RAY_event_stats": "1"}
    assert environment == (own if address is None else {**dict.fromkeys(WITHOUT_METRICS), "RAY_event_stats": "1"})
    assert ("include_dashboard" in given) == (address is None)


def test_a_real_cluster_answers() -> None:
    code = """
        from tfexport.scale.cluster import _require_answer, connect

        connect(None)
        import ray

        host, port = ray.get_runtime_context().gcs_address.split(":")
        _require_answer(host, int(port))
        print(ray.get(ray.remote(lambda: 7).remote()))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["7"], done.stderr
