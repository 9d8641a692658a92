"""The results of the Python API: plain values, under the names of JSON lines."""

from __future__ import annotations

from dataclasses import dataclass, field

from tfexport.decoding.hypothesis import Hypothesis, SourceTokens
from tfexport.decoding.line_reader import Status
from tfexport.decoding.translate import Result, Writer
from tfexport.errors import TfexportError
from tfexport.runtimes.base import FloatArray


@dataclass(frozen=True)
class Output:
    """One output of a source sentence; `str()` of it is its text."""

    text: str
    """Empty where the bundle has no target vocabulary."""
    tokens: tuple[str, ...]
    """As the vocabulary writes them, eos last when it came; empty where the bundle has no target vocabulary."""
    ids: tuple[int, ...]
    """Without bos, with eos when it came."""
    score: float
    """What outputs of one sentence are ranked by: the log-probability after length normalisation. NaN, as `log_prob`, where
    `scores=False` asked for none."""
    log_prob: float
    """Natural logarithm of the probability of all tokens together."""
    finished: bool
    """False where the length limit ended it, not eos."""
    token_log_probs: tuple[float, ...] = ()
    """Of each token, where `token_scores=True` asked for them."""
    source_tokens: tuple[str, ...] = ()
    """The encoder's input, a token for each column of `attention`, where attention or alignments were asked for."""
    source_text: tuple[int, int] = (0, 0)
    """The range `[from, to)` of the text's own among `source_tokens`."""
    alignment: tuple[tuple[int, int], ...] = ()
    """Pairs of positions in the text's own source tokens and in `tokens`, where `alignments` asked for them."""
    missing: tuple[str, ...] = ()
    """Required phrases that it lacks."""
    attention: FloatArray | None = field(default=None, compare=False)
    """What each token attended to, [tokens, source ids] in float32, where `attention=True` or `alignments` asked for it:
    cross-attention of the layer `alignment_layer`, the mean of its heads. The bundle has to be exported with
    `--alignments`."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Translation:
    """The result of one source sentence; `str()` of it is its best text."""

    status: Status
    """`ok`, or what is wrong with the sentence or its output; see docs/guides/decode.md."""
    message: str
    """What is wrong, in words; empty where nothing is."""
    hypotheses: tuple[Output, ...]
    """Best first, or in the order in which they were drawn; none where the sentence cannot be read."""
    line: int = field(default=1, compare=False)
    """The number of the sentence among those that were given, from 1."""

    @property
    def text(self) -> str:
        """The text of the first output; empty where there is none."""
        return self.hypotheses[0].text if self.hypotheses else ""

    @property
    def score(self) -> float:
        """The score of the first output.

        Raises:
            TfexportError: there is none.
        """
        if not self.hypotheses:
            raise TfexportError(
                f"this sentence has no output: {self.message or self.status}. Look at its status first."
            )
        return self.hypotheses[0].score

    def __str__(self) -> str:
        return self.text


def translation_of(result: Result, writer: Writer) -> Translation:
    """The result of a line in the types of the API."""
    outputs = tuple(_output(found, result, writer) for found in result.hypotheses)
    return Translation(result.status, result.message, outputs, result.line)


def _output(found: Hypothesis, result: Result, writer: Writer) -> Output:
    has_words = writer.tokenizer is not None
    words = writer.aligner.words(found, result.source)
    source = result.source.tokens if result.source and result.source.tokens else SourceTokens((), 0, 0)
    return Output(
        text=writer.text(found.ids, words) if has_words else "",
        tokens=tuple(writer.tokens(found.ids, words)) if has_words else (),
        ids=found.ids,
        score=found.score,
        log_prob=found.log_prob,
        finished=found.finished,
        token_log_probs=found.token_log_probs,
        source_tokens=source.words,
        source_text=(source.start, source.end),
        alignment=tuple(writer.aligner.pairs(found, result.source)),
        missing=tuple(phrase.text for phrase in found.missing),
        attention=found.attention,
    )
