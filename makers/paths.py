"""Where things lie in this repository, and beside it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared"
"""Real checkpoints and real text. Tests that need them are skipped where they are not."""
