"""The results of the Python API: plain values, under the names of JSON lines."""

from __future__ import annotations

from dataclasses import dataclass, field

from tfexport.decoding.line_reader import Status
from tfexport.decoding.translate import Result, Writer, scored
from tfexport.errors import TfexportError
from tfexport.runtimes.outputs import FloatArray
from tfexport.search.hypothesis import Hypothesis, SourceTokens


@dataclass(frozen=True)
class Output:
    """One output of a source sentence; `str()` of it is its text."""

    text: str
    """The text; empty without a target vocabulary in the bundle."""
    tokens: tuple[str, ...]
    """The tokens of the vocabulary, with eos last if it was generated; empty without a target vocabulary in the bundle."""
    ids: tuple[int, ...]
    """The ids without bos, including eos if it was generated."""
    score: float
    """The score that ranks the outputs of a sentence: the log-probability after length normalisation. With `scores=False`
    the score and `log_prob` are NaN."""
    log_prob: float
    """Natural logarithm of the joint probability of all tokens."""
    finished: bool
    """False if the length limit ended the output, not eos."""
    token_log_probs: tuple[float, ...] = ()
    """The log-probability of each token, with `token_scores=True`."""
    source_tokens: tuple[str, ...] = ()
    """The encoder's input, a token for each column of `attention`, if attention or alignments were requested."""
    source_text: tuple[int, int] = (0, 0)
    """The range `[from, to)` of the text's own tokens in `source_tokens`."""
    alignment: tuple[tuple[int, int], ...] = ()
    """Pairs of positions in the text's own source tokens and in `tokens`, with `alignments`."""
    missing: tuple[str, ...] = ()
    """The required phrases that the output lacks."""
    attention: FloatArray | None = field(default=None, compare=False)
    """The cross-attention of each token, [tokens, source ids] in float32, from the layer `alignment_layer`, averaged over
    heads. It needs `attention=True` or `alignments`, and a bundle that was exported with `--alignments`."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Translation:
    """The result of one source sentence; `str()` of it is its best text."""

    status: Status
    """`ok`, or the problem of the sentence or its output; see docs/guides/decode.md."""
    message: str
    """A description of the problem; empty if there is none."""
    hypotheses: tuple[Output, ...]
    """The outputs, best first, or samples in the order in which they were drawn. Empty if the sentence cannot be read."""
    line: int = field(default=1, compare=False)
    """The number of the sentence in the input, from 1."""

    @property
    def text(self) -> str:
        """The text of the first output; empty without outputs."""
        return self.hypotheses[0].text if self.hypotheses else ""

    @property
    def score(self) -> float:
        """The score of the first output.

        Raises:
            TfexportError: there is no output.
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
    outputs = tuple(_output(hypothesis, result, writer) for hypothesis in result.hypotheses)
    return Translation(result.status, result.message, outputs, result.line)


def scored_translation_of(result: Result, writer: Writer) -> Translation:
    """The result of a line whose output was given and scored, in the types of the API."""
    return translation_of(scored(result), writer)


def _output(hypothesis: Hypothesis, result: Result, writer: Writer) -> Output:
    has_words = writer.tokenizer is not None
    words = writer.aligner.words(hypothesis, result.source)
    source = result.source.tokens if result.source and result.source.tokens else SourceTokens((), 0, 0)
    return Output(
        text=writer.text(hypothesis.ids, words) if has_words else "",
        tokens=tuple(writer.tokens(hypothesis.ids, words)) if has_words else (),
        ids=hypothesis.ids,
        score=hypothesis.score,
        log_prob=hypothesis.log_prob,
        finished=hypothesis.finished,
        token_log_probs=hypothesis.token_log_probs,
        source_tokens=source.words,
        source_text=(source.start, source.end),
        alignment=tuple(writer.aligner.pairs(hypothesis, result.source)),
        missing=tuple(phrase.text for phrase in hypothesis.missing),
        attention=hypothesis.attention,
    )
