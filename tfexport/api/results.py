"""What the Python API gives: results of lines as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from tfexport.decoding.line_reader import Status
from tfexport.decoding.search import Hypothesis
from tfexport.decoding.translate import Result, Writer
from tfexport.errors import TfexportError
from tfexport.runtimes.base import FloatArray


@dataclass(frozen=True)
class Output:
    """One output of a source sentence."""

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
    attention: FloatArray | None = field(default=None, compare=False)
    """What each token attended to, [tokens, source ids], where `attention=True` asked for it: cross-attention of the layer
    `alignment_layer`, the mean of its heads. The bundle has to be exported with `--alignments`."""


@dataclass(frozen=True)
class Translation:
    """What became of one source sentence; `str()` of it is its best text."""

    status: Status
    """`ok`, or what is wrong with the sentence or its output; see docs/guides/decode.md."""
    message: str
    """What is wrong, in words; empty where nothing is."""
    outputs: tuple[Output, ...]
    """Best first, or in the order in which they were drawn; none where the sentence cannot be read."""

    @property
    def text(self) -> str:
        """The text of the first output; empty where there is none."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def score(self) -> float:
        """The score of the first output.

        Raises:
            TfexportError: there is none.
        """
        if not self.outputs:
            raise TfexportError(
                f"this sentence has no output: {self.message or self.status}. Look at its status first."
            )
        return self.outputs[0].score

    def __str__(self) -> str:
        return self.text


def translation_of(result: Result, writer: Writer) -> Translation:
    return Translation(result.status, result.message, tuple(_output(found, writer) for found in result.hypotheses))


def _output(found: Hypothesis, writer: Writer) -> Output:
    has_words = writer.tokenizer is not None
    return Output(
        text=writer.text(found.ids) if has_words else "",
        tokens=tuple(writer.tokenizer.tokens(found.ids)) if writer.tokenizer is not None else (),
        ids=found.ids,
        score=found.score,
        log_prob=found.log_prob,
        finished=found.finished,
        token_log_probs=found.token_log_probs,
        attention=found.attention,
    )
