"""The input of a search, `Source`, and its output, `Hypothesis`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tfexport.runtimes.outputs import FloatArray, IntArray
from tfexport.search.attention_trace import coverage
from tfexport.text.word_parts import WordParts

if TYPE_CHECKING:
    from tfexport.config import ModelConfig
    from tfexport.search.options import SearchOptions
    from tfexport.text.tokenizers import TextTokenizer


Ids = tuple[int, ...]


class Phrase(NamedTuple):
    """A phrase that outputs must or must not contain."""

    ids: Ids
    """At least one id."""
    text: str = ""
    """The phrase as text."""
    is_whole: bool = False
    """The phrase must not be part of a longer word, as far as `Source.word_parts` is known."""
    is_attached: bool = False
    """The ids are those of the phrase directly after a punctuation mark. After a letter they belong to a longer word."""


@dataclass(frozen=True, slots=True)
class SourceTokens:
    """The encoder's input as text."""

    words: tuple[str, ...]
    """The text of each id: for the text's own tokens as in the text, for others as in the vocabulary."""
    start: int
    """The index of the text's first id."""
    end: int
    """The index after the text's last id."""

    @classmethod
    def of(
        cls, ids: Sequence[int], config: ModelConfig, tokenizer: TextTokenizer | None, text: Sequence[str] | None = None
    ) -> SourceTokens:
        """The tokens of the encoder's `ids`.

        Args:
            text: the text's own tokens as in the text, if known.
        """
        before = [config.bos_id] * config.source_bos + [*(tokenizer.before if tokenizer else ())]
        after = [*(tokenizer.after if tokenizer else ())] + [config.eos_id] * config.source_eos
        start = len(before) if list(ids[: len(before)]) == before else 0
        end = len(ids) - (len(after) if list(ids[max(start, len(ids) - len(after)) :]) == after else 0)
        words = tokenizer.tokens(ids) if tokenizer else [str(index) for index in ids]
        if text is not None and len(text) == end - start:
            words[start:end] = [new or old for new, old in zip(text, words[start:end], strict=True)]
        return cls(tuple(words), start, end)


@dataclass(slots=True)
class Source:
    """A source sentence, with requirements on its outputs.

    Neither this class nor `Hypothesis` is frozen: a batch makes hundreds of objects, and a frozen dataclass takes five times
    as long to make.
    """

    ids: Sequence[int]
    """The input of the encoder, at least one id."""
    prefix: tuple[int, ...] = ()
    """Ids that every output begins with. Their log-probabilities count in its score."""
    most: int | None = None
    """The largest number of output tokens, in addition to the limits of the search."""
    _: KW_ONLY
    least: int = 0
    """The smallest number of tokens before eos, in addition to that of the search."""
    candidates: IntArray | None = field(default=None, compare=False)
    """The target ids that outputs may contain, in addition to eos and `given_ids`; None for all."""
    required: tuple[Phrase, ...] = ()
    """Phrases that outputs must contain."""
    forbidden: tuple[Phrase, ...] = ()
    """Phrases that outputs must not contain."""
    word_parts: WordParts | None = field(default=None, compare=False)
    """The tokens of the target vocabulary that are parts of words; None if unknown."""
    line: int = 0
    """The line number. Together with the seed it determines the samples."""
    tokens: SourceTokens | None = None
    """The words of the ids, if the writer of the outputs needs them."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def given_ids(self) -> list[int]:
        """The ids of the prefix and of the required phrases."""
        return [*self.prefix, *(index for phrase in self.required for index in phrase.ids)]


@dataclass(slots=True)
class Hypothesis:
    """One output of a search."""

    ids: tuple[int, ...]
    """The output ids without bos, including eos if it was generated."""
    score: float
    """The log-probability after length normalisation; n-best lists are sorted by it. NaN, as `log_prob`, if the search
    computes no scores."""
    log_prob: float
    """The sum of the tokens' log-probabilities, including eos if it was generated."""
    finished: bool
    """False if the length limit ended the output, not eos."""
    token_log_probs: tuple[float, ...] = ()
    """The log-probability of each token; their sum is `log_prob`. Empty if the options do not request them."""
    attention: FloatArray | None = field(default=None, compare=False)
    """The cross-attention of each token when it was chosen, [tokens, source ids], from one layer, averaged over heads. None
    if the options do not request it."""
    missing: tuple[Phrase, ...] = ()
    """The required phrases that the output lacks."""

    @classmethod
    def scored(
        cls,
        ids: tuple[int, ...],
        log_prob: float,
        options: SearchOptions,
        *,
        finished: bool,
        token_log_probs: Iterable[float],
        attention: FloatArray | None = None,
    ) -> Hypothesis:
        """A hypothesis with its score, without the fields that the options do not request.

        Args:
            attention: needed if the score has a coverage penalty.
        """
        steps = tuple(float(step) for step in token_log_probs) if options.token_scores else ()
        score = options.normalise(log_prob, len(ids))
        if options.coverage_penalty:
            assert attention is not None
            score += options.coverage_penalty * coverage(attention)
        return cls(ids, score, log_prob, finished, steps, attention if options.attention else None)
