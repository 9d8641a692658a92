"""Word alignments from attention: pairs in the format of Pharaoh, and the replacement of unknown tokens.

Positions count the tokens of the text. Special tokens around them (bos, eos, a language) are not part of an alignment, as
in fairseq. Marian also aligns the end of sentences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tfexport.errors import TfexportError
from tfexport.system.regular_files import read_text

if TYPE_CHECKING:
    from tfexport.config import ModelConfig
    from tfexport.search.hypothesis import Hypothesis, Source, SourceTokens


@dataclass(frozen=True)
class AlignmentFormat:
    """The format of the alignment of an output, as in Marian's --alignment."""

    threshold: float
    """Write the pairs whose attention is above this threshold. 1 writes only the best source token of each target token."""
    soft: bool = False
    """Write all attention weights instead of pairs."""

    @classmethod
    def parse(cls, text: str) -> AlignmentFormat:
        """Parse `hard`, `soft` or a threshold from 0 to 1.

        Raises:
            TfexportError: the text is something else.
        """
        if text in ("hard", "soft"):
            return cls(1.0, text == "soft")
        try:
            threshold = float(text)
        except ValueError:
            threshold = math.nan
        if not 0 <= threshold <= 1:
            raise TfexportError(
                f"--alignments is {text!r}. Give hard, soft, or a threshold between 0 and 1, as in 0.3."
            )
        return cls(threshold)

    def pairs(self, attention: NDArray[Any], source: SourceTokens) -> list[tuple[int, int]]:
        """Sorted pairs of (source, target) positions, counted from 0, for `attention` [target tokens, source ids]."""
        own = attention[:, source.start : source.end]
        if not own.size:
            return []
        if self.threshold < 1:
            return sorted((int(s), int(t)) for t, s in np.argwhere(own > self.threshold))
        return sorted((int(s), t) for t, s in enumerate(own.argmax(axis=1)))

    def text(self, attention: NDArray[Any], source: SourceTokens) -> str:
        """Text such as `0-0 1-2`. With `soft`, commas separate the weights of a target token, and spaces target tokens."""
        if self.soft:
            rows = attention[:, source.start : source.end].tolist()
            return " ".join(",".join(f"{weight:.4f}" for weight in row) for row in rows)
        return " ".join(f"{s}-{t}" for s, t in self.pairs(attention, source))


@dataclass(frozen=True)
class Replacement:
    """Replaces each unknown token by the source token that it attended to most (Luong et al. 2015, section 3; as
    `replace_unknowns` of CTranslate2 and `--replace-unk` of fairseq)."""

    unknown: int
    """The id of the unknown token."""
    dictionary: Mapping[str, str] = field(default_factory=dict)
    """Translations of source tokens, to write instead of the source token itself."""

    @classmethod
    def of(cls, config: ModelConfig, dictionary: Path | None) -> Replacement:
        """The replacement for a model, with an optional dictionary file.

        Raises:
            TfexportError: the model has no unknown token, or the file is not a dictionary.
        """
        if not 0 <= config.unk_id < config.tgt_vocab_size:
            raise TfexportError("the target vocabulary has no unknown token to replace. Leave --replace-unk out.")
        return cls(config.unk_id, read_dictionary(dictionary) if dictionary else {})

    def words(self, ids: Sequence[int], attention: NDArray[Any], source: SourceTokens) -> dict[int, str]:
        """The words to write at positions of the output `ids`; `attention` [tokens, source ids] is of its first tokens."""
        if source.start == source.end:
            return {}
        words = {}
        for place in (place for place, index in enumerate(ids[: len(attention)]) if index == self.unknown):
            best = int(attention[place, source.start : source.end].argmax())
            word = source.words[source.start + best]
            words[place] = self.dictionary.get(word, word)
        return words


@dataclass(frozen=True)
class Aligner:
    """Writes alignments of outputs; by default nothing."""

    eos_id: int = -1
    format: AlignmentFormat | None = None
    replacement: Replacement | None = None

    def words(self, hypothesis: Hypothesis, source: Source | None) -> dict[int, str]:
        """The words to write at positions of an output instead of its tokens."""
        return self.replacement.words(hypothesis.ids, *self._aligned(hypothesis, source)) if self.replacement else {}

    def after(self, hypothesis: Hypothesis, source: Source | None) -> str:
        """The text after an output on its line, in the format of Marian."""
        return f" ||| {self.format.text(*self._aligned(hypothesis, source))}" if self.format else ""

    def source_record(self, source: Source | None) -> dict[str, Any]:
        """The fields of a JSON record for a source: all its tokens, and the range of the text's own tokens."""
        tokens = source.tokens if source else None
        if self.format is None or tokens is None:
            return {}
        return {"source_tokens": list(tokens.words), "source_text": [tokens.start, tokens.end]}

    def record(self, hypothesis: Hypothesis, source: Source | None) -> dict[str, Any]:
        """The fields of a JSON record for an output: the pairs, and the attention [tokens with eos, source ids]."""
        if self.format is None:
            return {}
        assert hypothesis.attention is not None
        rows = [[round(weight, 4) for weight in row] for row in hypothesis.attention.tolist()]
        return {"alignment": self.pairs(hypothesis, source), "attention": rows}

    def pairs(self, hypothesis: Hypothesis, source: Source | None) -> list[tuple[int, int]]:
        """Pairs of (source, target) positions of an output; empty if no alignments are written."""
        return self.format.pairs(*self._aligned(hypothesis, source)) if self.format else []

    def _aligned(self, hypothesis: Hypothesis, source: Source | None) -> tuple[NDArray[Any], SourceTokens]:
        """The attention of the tokens of an output, without eos, and the tokens of its source."""
        assert hypothesis.attention is not None
        assert source is not None
        assert source.tokens is not None
        length = len(hypothesis.ids) - (hypothesis.ids[-1] == self.eos_id)
        return hypothesis.attention[:length], source.tokens


NO_ALIGNER = Aligner()


def read_dictionary(path: Path) -> dict[str, str]:
    """Read a file of lines with a source word, a tab and its translation.

    Raises:
        TfexportError: the file cannot be read, or a line has another form.
    """
    try:
        lines = read_text(path, "utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TfexportError(f"cannot read the dictionary {path}: {error}. Give a UTF-8 text file.") from error
    dictionary: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        word, _, translation = (part.strip() for part in line.partition("\t"))
        if not (word and line.count("\t") == 1 and translation):
            raise TfexportError(f"line {number} of {path} is not a source word, a tab and a translation. Correct it.")
        if dictionary.setdefault(word, translation) != translation:
            raise TfexportError(f"line {number} of {path} gives {word!r} a second translation. Leave one of them out.")
    return dictionary
