"""Where results are written, and the text that benchmarks decode where none is given."""

from makers.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
SENTENCES = ROOT / "benchmarks" / "sentences.de"
