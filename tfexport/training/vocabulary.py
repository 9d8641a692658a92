"""Vocabularies learnt from text: words, or byte-level BPE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tfexport.text.tokenizers import TextTokenizer, word_tokenizer

BPE_SPECIALS = ("<unk>", "<pad>", "<s>", "</s>")
"""Ids 0 to 3 of a trained vocabulary."""


def train_words(
    texts: Iterable[str], *, min_frequency: int = 2, vocab_size: int = 50_000, lowercase: bool = False
) -> TextTokenizer:
    """A vocabulary of the words that occur at least `min_frequency` times in `texts`, split at whitespace."""
    lower = normalizers.Lowercase().normalize_str if lowercase else str  # as the tokenizer does it
    counts = Counter(word for text in texts for word in lower(text).split())
    frequent = [word for word, count in counts.items() if count >= min_frequency and word not in BPE_SPECIALS]
    frequent.sort(key=lambda word: (-counts[word], word))
    words = [*BPE_SPECIALS, *frequent][:vocab_size]
    return word_tokenizer({word: index for index, word in enumerate(words)}, lowercase=lowercase, joins=False)


def train_bpe(texts: Iterable[str], *, vocab_size: int, lowercase: bool = False) -> TextTokenizer:
    """A byte-level BPE vocabulary (Sennrich et al. 2016). It has no unknown text and restores the exact input."""
    inner = Tokenizer(models.BPE())
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
    inner.normalizer = normalizers.Sequence(steps)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(BPE_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return TextTokenizer.from_inner(inner, skips_special=False)
