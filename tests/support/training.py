"""A toy corpus, and training on it in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfexport.training.data import TextPair
from tfexport.training.options import TrainOptions

SUBJECTS = {"ein Mann": "a man", "eine Frau": "a woman", "ein Hund": "a dog", "das Kind": "the child"}
VERBS = {"sieht": "sees", "ruft": "calls", "malt": "paints"}
OBJECTS = {"das Haus": "the house", "den Ball": "the ball", "einen Baum": "a tree"}
PAIRS = [
    TextPair(f"{s} {v} {o} .", f"{SUBJECTS[s]} {VERBS[v]} {OBJECTS[o]} .")
    for s in SUBJECTS
    for v in VERBS
    for o in OBJECTS
]
OPTIONS = TrainOptions(
    preset="tiny", vocabulary="word", min_frequency=1, epochs=2, max_tokens=64, max_length=16, accelerator="cpu"
)


def options(**changes: object) -> TrainOptions:
    return TrainOptions(**{**vars(OPTIONS), **changes})


def train(*arguments: Any, **named: Any) -> Path:
    """`tfexport.training.train.train`, imported when it is called.

    Every process of a run imports all tests to collect them, and Lightning takes seconds.
    """
    from tfexport.training.train import train as run_training

    return run_training(*arguments, **named)
