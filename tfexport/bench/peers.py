"""A common interface to other engines, each with a folder in its own format, and to tfexport's runtimes.

A peer takes any number of sentences and decodes at most `batch_size` of them together. Batches have sentences of similar
lengths, so that they have little padding. benchmarks/peers/converters.py writes the folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from tfexport.contract import Precision
from tfexport.decoding.batches import decode_windows
from tfexport.decoding.workers import WorkerPool
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.runtimes.base import Runtime
from tfexport.search.search import SearchOptions

TARGET_LIMIT = "max_target_length"
"""The field of a folder's config.json with the largest number of output tokens that the model's positions allow."""

Sources = Sequence[Sequence[int]]
Ids = tuple[int, ...]


class Peer(Protocol):
    """An engine that decodes."""

    @property
    def name(self) -> str: ...

    def decode(self, sources: Sources, options: SearchOptions, batch_size: int) -> list[Ids]:
        """The best hypothesis of each source, in order: ids without bos, including eos if it was generated.

        Args:
            sources: encoder ids, of any number of sentences.
            batch_size: the largest number of sentences that each worker decodes together.

        Raises:
            TfexportError: this engine does not support an option.
        """
        ...


class RuntimePeer:
    """A runtime of tfexport with `workers` that share it and are kept between calls of `decode`."""

    def __init__(self, runtime: Runtime, workers: int = 1):
        self.name, self.runtime, self.workers = runtime.name, runtime, workers
        self._pool: WorkerPool | None = None
        self._loaded_for: tuple[int, bool] | None = None

    def decode(self, sources: Sources, options: SearchOptions, batch_size: int) -> list[Ids]:
        graphs = (options.beam, options.best_only)
        if self._pool is None or self._loaded_for != graphs:
            if self._pool is not None:
                self._pool.close()
            self._pool, self._loaded_for = WorkerPool(self.runtime, self.workers, options), graphs
        return self._decode(self._pool, sources, options, batch_size)

    def decode_here(self, sources: Sources, options: SearchOptions, batch_size: int) -> list[Ids]:
        """`decode` with threads of this process, so that it can be profiled."""
        with WorkerPool(self.runtime, self.workers, options, forks=False) as pool:
            return self._decode(pool, sources, options, batch_size)

    def _decode(self, pool: WorkerPool, sources: Sources, options: SearchOptions, batch_size: int) -> list[Ids]:
        (decoded,) = decode_windows(pool, [sources], options, batch_size=batch_size)
        return [hypotheses[0].ids for hypotheses in decoded]


class CTranslate2Peer:
    """CTranslate2's `Translator`, on the CPU or on a GPU.

    Its length penalty divides by length ** A, see `_plain_power`. Its beam search ends with the first `beam` finished
    hypotheses, while that of tfexport continues as long as a live one would beat the worst of them. The probability of an
    eos that is not allowed yet is distributed over the other tokens. The profile `opennmt` of tfexport does the same.

    Args:
        compute_type: float32, or another type, to which it converts the weights when it loads the model.
        intra_threads: the number of threads of each worker.
        inter_threads: the number of workers, each of which decodes its own batches.
        device: the device; float16 and bfloat16 are for GPUs.
    """

    def __init__(
        self,
        folder: Path,
        compute_type: Literal["float32", "float16", "bfloat16", "int8"] = "float32",
        intra_threads: int = 1,
        inter_threads: int = 1,
        device: Literal["cpu", "cuda"] = "cpu",
    ):
        with _installed("CTranslate2", "ctranslate2"):
            import ctranslate2  # type: ignore[import-not-found,import-untyped]

        self.name = f"ctranslate2-{compute_type}"
        self._limit = _target_limit(folder)
        self._translator = ctranslate2.Translator(
            str(folder),
            device=device,
            compute_type=compute_type,
            inter_threads=inter_threads,
            intra_threads=intra_threads,
        )

    def decode(self, sources: Sources, options: SearchOptions, batch_size: int) -> list[Ids]:
        _without_ratio(options, "CTranslate2")
        results = self._translator.translate_batch(
            [[str(token) for token in source] for source in sources],
            max_batch_size=batch_size,  # also sorts by length
            batch_type="examples",
            beam_size=options.beam,
            length_penalty=_plain_power(options, sources),
            min_decoding_length=options.min_length,
            max_decoding_length=min(options.max_length, self._limit),
            max_input_length=0,  # by default longer sources are cut
            return_end_token=True,
            return_scores=False,
        )
        return [tuple(int(token) for token in result.hypotheses[0]) for result in results]


class HuggingFacePeer:
    """`generate` of Transformers in eager PyTorch on the CPU: its default cache, no compilation.

    Args:
        precision: the precision of all weights, including the output projection.
    """

    def __init__(self, folder: Path, threads: int = 1, precision: Precision = "float32"):
        with _installed("Hugging Face", "torch transformers"):
            import torch
            from transformers import AutoModelForSeq2SeqLM  # type: ignore[import-not-found,import-untyped]

        self.name = "hugging-face"
        torch.set_num_threads(threads)
        limit = _target_limit(folder)
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=getattr(torch, precision), local_files_only=True)
        self._generator = _Generator(model.eval(), limit)

    def decode(self, sources: Sources, options: SearchOptions, batch_size: int) -> list[Ids]:
        return self._generator.decode(sources, options, batch_size)


class OptimumPeer:
    """Optimum's ONNX export with key/value cache on ONNX Runtime's CPU provider, under `generate` of Transformers.

    Args:
        threads: the number of threads of ONNX Runtime, and of PyTorch, in which `generate` ranks tokens.
    """

    def __init__(self, folder: Path, threads: int = 1):
        with _installed("Optimum", "optimum-onnx onnxruntime"):
            import onnxruntime
            import torch
            from optimum.onnxruntime import ORTModelForSeq2SeqLM  # type: ignore[import-not-found,import-untyped]

        self.name = "optimum"
        torch.set_num_threads(threads)
        limit = _target_limit(folder)
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        model = ORTModelForSeq2SeqLM.from_pretrained(
            folder, session_options=settings, provider="CPUExecutionProvider", use_cache=True, local_files_only=True
        )
        self._generator = _Generator(model, limit)

    def decode(self, sources: Sources, options: SearchOptions, batch_size: int) -> list[Ids]:
        return self._generator.decode(sources, options, batch_size)


class _Generator:
    """`generate` of Transformers over any engine that computes the steps."""

    def __init__(self, model: Any, limit: int):
        self._model, self._limit = model, limit
        self._pad, self._eos = int(model.config.pad_token_id), int(model.config.eos_token_id)

    def decode(self, sources: Sources, options: SearchOptions, batch_size: int) -> list[Ids]:
        import torch

        _without_ratio(options, "Hugging Face")
        settings: dict[str, Any] = {"num_beams": options.beam, "do_sample": False}
        settings["max_new_tokens"] = min(options.max_length, self._limit)
        if options.min_length:
            settings["min_new_tokens"] = options.min_length
        if options.beam > 1:  # greedy search would warn about it
            settings["length_penalty"] = _plain_power(options, sources)

        def together(batch: Sources) -> list[Ids]:
            longest = max(map(len, batch))
            ids = [[*source, *[self._pad] * (longest - len(source))] for source in batch]
            mask = [[1] * len(source) + [0] * (longest - len(source)) for source in batch]
            with torch.inference_mode():
                generated = self._model.generate(
                    input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), **settings
                )
            return [self._until_eos(row) for row in generated[:, 1:].tolist()]  # the first token is bos

        return _by_length(sources, batch_size, together)

    def _until_eos(self, row: list[int]) -> Ids:
        return tuple(row[: row.index(self._eos) + 1] if self._eos in row else row)


def _by_length(sources: Sources, batch_size: int, together: Callable[[Sources], list[Ids]]) -> list[Ids]:
    """Decode `sources` in batches of similar lengths, longest first, and return the results in the original order."""
    order = sorted(range(len(sources)), key=lambda index: -len(sources[index]))
    results: list[Ids] = [()] * len(sources)
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        for index, ids in zip(part, together([sources[index] for index in part]), strict=True):
            results[index] = ids
    return results


def _plain_power(options: SearchOptions, sources: Sources) -> float:
    """The exponent a with which length ** a is closest to tfexport's ((5 + length) / 6) ** A.

    Their logarithms have the same slope at the mean length of the sources, which is close to that of the outputs.
    """
    if not sources or not options.search_profile.google_length:
        return options.length_penalty
    length = sum(map(len, sources)) / len(sources)
    return options.length_penalty * length / (5 + length)


def _without_ratio(options: SearchOptions, engine: str) -> None:
    if options.max_length_ratio is not None:
        raise TfexportError(f"{engine} has one length limit for a batch. Leave out max_length_ratio, give max_length.")


def _target_limit(folder: Path) -> int:
    """The largest number of tokens that the model in `folder` can generate."""
    try:
        return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))[TARGET_LIMIT])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TfexportError(
            f"{folder} has no model of benchmarks/peers/converters.py ({error!r}). Write one there with it."
        ) from error


@contextmanager
def _installed(engine: str, packages: str) -> Iterator[None]:
    """A context that adds the packages to install to an import error."""
    try:
        yield
    except ImportError as error:
        raise RuntimeUnavailable(
            f"{engine} is not installed ({error.name} is missing). Add it with: pip install {packages}."
        ) from error
