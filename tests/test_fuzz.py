"""The fuzzers find what they are there for."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tfexport.errors import TfexportError

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
import models
import mutations
import readers


def ours(path: Path) -> None:
    raise TfexportError("Give another one.")


def silent(path: Path) -> None:
    raise TfexportError(" ")


def foreign(path: Path) -> None:
    raise KeyError("x")


def leaving(path: Path) -> None:
    raise SystemExit(0)


def hanging(path: Path) -> None:
    time.sleep(60)


def writing(path: Path) -> None:
    (path.parents[1] / "escaped").write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (Path.read_bytes, None),
        (ours, readers.REFUSED),
        (silent, "an error without a message"),
        (foreign, "KeyError"),
        (leaving, "SystemExit"),
        (hanging, "TimeoutError"),
        (writing, "it wrote ['escaped'] outside"),
    ],
)
def test_what_escapes_is_told(read: Any, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SECONDS", 1)
    monkeypatch.setattr(
        readers.signal, "alarm", lambda seconds: readers.signal.setitimer(readers.signal.ITIMER_REAL, seconds / 5)
    )

    def too_long(number: int, frame: Any) -> None:
        raise TimeoutError

    before = readers.signal.signal(readers.signal.SIGALRM, too_long)
    try:
        escaped = readers.run_one(readers.Reader("x", (b"",), read), b"content", tmp_path)
    finally:
        readers.signal.signal(readers.signal.SIGALRM, before)
    assert (escaped is None) if found is None else (escaped is not None and found in escaped)


def test_mutations_differ_from_their_seeds_and_come_again_with_their_number() -> None:
    seeds = (b'{"a": [1, 2], "b": null}', b"some text\n" * 9)
    one, other = ([mutations.mutated(random.Random(seed), seeds) for seed in range(300)] for _ in range(2))
    assert one == other
    assert len(set(one)) > 250
    assert sum(data in seeds for data in one) < 15


def test_random_models_are_of_every_kind() -> None:
    configs = [models.random_config(random.Random(seed)) for seed in range(60)]
    for field in ("norm_first", "final_norm", "shared_norm", "activation", "feed_forward", "positions", "tie_output"):
        assert len({getattr(config, field) for config in configs}) == 2


def test_a_model_that_decodes_otherwise_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = models.random_config(random.Random(1))
    assert models.check(config, 1, tmp_path / "clean")["failed"] == 0
    real = models.TorchRuntime.from_bundle

    def other(bundle: Any) -> Any:
        runtime = real(bundle)
        runtime.model.decoder.layers[0].norms[0].bias.data += 0.1
        return runtime

    monkeypatch.setattr(models.TorchRuntime, "from_bundle", other)
    assert models.check(config, 1, tmp_path / "other")["failed"] > 0
