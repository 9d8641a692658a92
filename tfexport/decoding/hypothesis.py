"""What a search decodes, `Source`, and what it finds, `Hypothesis`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tfexport.decoding.attention_trace import coverage
from tfexport.runtimes.base import FloatArray, IntArray
from tfexport.text.word_parts import WordParts

if TYPE_CHECKING:
    from tfexport.config import ModelConfig
    from tfexport.decoding.options import SearchOptions
    from tfexport.text.tokenizers import TextTokenizer


Ids = tuple[int, ...]


class Phrase(NamedTuple):
    """A phrase that outputs have to have, or may not have."""

    ids: Ids
    """At least one."""
    text: str = ""
    """As a person reads it."""
    is_whole: bool = False
    """It may be no part of a longer word, where `Source.word_parts` tells which tokens are parts."""


@dataclass(frozen=True, slots=True)
class SourceTokens:
    """The encoder's input as a person reads it."""

    words: tuple[str, ...]
    """Of each id: as the text has it, where it is one of the text's own; else as the vocabulary writes it."""
    start: int
    """Ids before the text's own."""
    end: int
    """Ids up to where the text's own end."""

    @classmethod
    def of(
        cls, ids: Sequence[int], config: ModelConfig, tokenizer: TextTokenizer | None, text: Sequence[str] | None = None
    ) -> SourceTokens:
        """The tokens of the encoder's `ids`.

        Args:
            text: the own tokens as the text has them, where that is known.
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
    """A source sentence, with what is particular to its outputs.

    Neither this nor `Hypothesis` is frozen: a batch makes hundreds, and a frozen dataclass takes five times as long to make.
    """

    ids: Sequence[int]
    """The input of the encoder, at least one id."""
    prefix: tuple[int, ...] = ()
    """Ids that every output begins with. Their log-probabilities count in its score."""
    most: int | None = None
    """The largest number of tokens of its outputs, besides the limits of the search."""
    least: int = 0
    """The smallest number of tokens before eos, besides that of the search."""
    candidates: IntArray | None = field(default=None, compare=False)
    """The target ids that its outputs may have, besides eos and `given_ids`; None for all."""
    required: tuple[Phrase, ...] = ()
    """Phrases that its outputs have to have."""
    forbidden: tuple[Phrase, ...] = ()
    """Phrases that they may not have."""
    word_parts: WordParts | None = field(default=None, compare=False)
    """The tokens of the target vocabulary that are parts of words; None where that is not known."""
    line: int = 0
    """The number of its line. With the seed it decides what sampling draws."""
    tokens: SourceTokens | None = None
    """The words of its ids, where the writer of the outputs needs them."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def given_ids(self) -> list[int]:
        """The ids of what its outputs begin with and have to have."""
        return [*self.prefix, *(index for phrase in self.required for index in phrase.ids)]


@dataclass(slots=True)
class Hypothesis:
    """One output of a search."""

    ids: tuple[int, ...]
    """Without bos, with eos when it came."""
    score: float
    """The log-probability after length normalisation; n-best lists are sorted by it. NaN, as `log_prob`, if the search
    computes no scores."""
    log_prob: float
    """Sum of the tokens' log-probabilities, eos included when it came."""
    finished: bool
    """False where the length limit, not eos, ended it."""
    token_log_probs: tuple[float, ...] = ()
    """Of each token; their sum is `log_prob`. Empty if the options do not request them."""
    attention: FloatArray | None = field(default=None, compare=False)
    """The cross-attention of each token when it was chosen, [tokens, source ids]: of one layer, the mean of its heads. None
    if the options do not request it."""
    missing: tuple[Phrase, ...] = ()
    """Required phrases that it lacks."""

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
        """A hypothesis with its score, and without what the options do not request.

        Args:
            attention: needed if the score has a coverage penalty.
        """
        steps = tuple(float(step) for step in token_log_probs) if options.token_scores else ()
        score = options.normalise(log_prob, len(ids))
        if options.coverage_penalty:
            assert attention is not None
            score += options.coverage_penalty * coverage(attention)
        return cls(ids, score, log_prob, finished, steps, attention if options.attention else None)
