"""The mask of a cache that the hypotheses of a sentence share.

    slots   0   1   2   3   4   5   6   7   8   9  10  11        beam 3, three steps done
          [a0][b0][c0][a1][b1][c1][a2][b2][c2][  ][  ][  ]       each step appends a slot for each hypothesis
    mask   x           x                   x                     hypothesis 0: a0, a1, then c2

A reorder of beams moves rows of the mask, and no keys or values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.outputs import IntArray


def see_new_slots(mask: NDArray[np.bool_], places: IntArray, first: IntArray) -> None:
    """Let each hypothesis see the slot that the next step appends for it. Changes `mask` in place.

    Args:
        mask: [places, 1, beam, slots].
        places: the places of the sentences, [sentences].
        first: the next free slot of each of these sentences, [sentences].
    """
    hypotheses = np.arange(mask.shape[2])
    mask[places[:, None], 0, hypotheses, first[:, None] + hypotheses] = True
