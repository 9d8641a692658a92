"""Options of a run over a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfexport.decoding.request_options import BatchLimits
from tfexport.errors import TfexportError
from tfexport.option import MOST_AT_ONCE, Options, option

_CORPUS, _CLUSTER = "Corpus", "Cluster"
_SCORES, _CLASSES = "Scores", "Classes"

CorpusFormat = Literal["parquet", "jsonl", "text"]


@dataclass(frozen=True, kw_only=True)
class TextColumn(Options):
    """The column that a function of one text reads."""

    text_column: str = option(
        "text", metavar="NAME", help="The column with the text; in text files its name is `text`.", panel=_CORPUS
    )


@dataclass(frozen=True, kw_only=True)
class PairColumns(Options):
    """The columns that a function of sentence pairs reads."""

    source_column: str = option("source", metavar="NAME", help="The column with the sources.", panel=_CORPUS)
    target_column: str = option(
        "target",
        metavar="NAME",
        help="The column with the translations. Lines of text are source<TAB>target.",
        panel=_CORPUS,
    )

    def conflicts(self) -> list[str]:
        """The problems of these options, in words."""
        return ["source_column and target_column are the same"] if self.source_column == self.target_column else []


@dataclass(frozen=True, kw_only=True)
class CorpusOptions(Options):
    """The format and size of output files."""

    output_format: CorpusFormat | None = option(
        None, help="Format of the output files.", default_text="that of the input", panel=_CORPUS
    )
    rows_per_shard: int = option(
        16_384,
        minimum=1,
        maximum=1 << 24,
        help="Largest number of rows in an output file. An interrupted run loses at most this many rows of each actor.",
        panel=_CORPUS,
    )


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(Options):
    """The scores of sentence pairs."""

    reverse: Path | None = option(
        None,
        metavar="DIR",
        help="The bundle of a model from targets to sources: adds dual cross-entropy and noisy-channel scores.",
        panel=_SCORES,
    )
    channel_weight: float = option(
        1.0, minimum=0, maximum=1000, help="Weight of the reverse model in noisy_channel.", panel=_SCORES
    )


@dataclass(frozen=True, kw_only=True)
class ClassOptions(Options):
    """The number and names of classes."""

    top: int = option(1, minimum=1, maximum=MOST_AT_ONCE, help="Number of classes for each row.", panel=_CLASSES)
    labels: Path | None = option(
        None, metavar="FILE", help="Names of the classes, one per line, class 0 first.", panel=_CLASSES
    )


@dataclass(frozen=True, kw_only=True)
class ActorOptions(Options):
    """The batches and threads of an actor."""

    # Larger than the batches of `decode`: nobody waits for a row, and lengths within a shard are close. With 128, the larger
    # cache costs more time than fewer calls save.
    batch_size: int = option(64, minimum=1, maximum=MOST_AT_ONCE, help="Sentences in a batch.", panel=_CLUSTER)
    threads: int = option(
        1, minimum=1, maximum=256, help="CPU threads of each actor; Ray reserves as many CPUs.", panel=_CLUSTER
    )


@dataclass(frozen=True, kw_only=True)
class ActorBatches(BatchLimits, ActorOptions):
    """The batches and threads of an actor that decodes."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Options):
    """The cluster of a run, and its actors."""

    address: str | None = option(
        None,
        metavar="ADDRESS",
        help="The Ray cluster of this machine, as in auto or head:6379.",
        default_text="a new one on this machine",
        panel=_CLUSTER,
    )
    actors: int | None = option(
        None,
        minimum=1,
        maximum=MOST_AT_ONCE,
        help="Actors, each with the bundle.",
        default_text="as many as the CPUs, or GPUs, have room for",
        panel=_CLUSTER,
    )
    gpus: float = option(
        0.0, minimum=0, maximum=8, help="GPUs of each actor; 0.5 for two actors on each.", panel=_CLUSTER
    )
    buffer_mib: int = option(
        512,
        minimum=1,
        help="Input that may wait for actors in Ray's object store, in MiB.",
        panel=_CLUSTER,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and not self.address.strip():
            raise TfexportError("--address is empty. Give the address of a cluster, or leave it out.")
