"""The gate of an export that also decodes: `GraphGate` compares values, and here whole searches are compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tfexport import contract
from tfexport.bundle.reader import open_bundle
from tfexport.contract import Precision
from tfexport.errors import TfexportError
from tfexport.graph_checks.gate import Agreement, GraphGate
from tfexport.models.model import Model
from tfexport.models.transformer import Transformer
from tfexport.runtimes import load_runtime
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions
from tfexport.verification.compare import compare_all, random_sources
from tfexport.verification.reference_outputs import Memories
from tfexport.verification.report import ParityReport

SENTENCES, SOURCE, TARGET = 8, 24, 12
"""The number of sentences of random ids, and the largest lengths of sources and outputs: it takes a second or two. The cases
of `check_graph` have longer sources and pasts."""


class DecodingGate(GraphGate):
    """The gate of `tfexport export`: it compares the graphs, and then their greedy and beam search."""

    def check_bundle(self, folder: Path, model: Model) -> Mapping[Precision, Agreement]:
        """Compare all precisions of a bundle with PyTorch, on ONNX Runtime's CPU provider.

        Graphs of a lower precision are compared value by value with the same rounded arithmetic. So they pass also where
        that precision does not suit the model. The agreement tells how often it changes a choice.

        Raises:
            TfexportError: a number is outside its limit.
        """
        bundle = open_bundle(folder)
        if not isinstance(model, Transformer):  # a classifier has nothing to decode
            return {}
        reference = TorchRuntime(model)
        sources = random_sources(bundle.config, SENTENCES, longest=SOURCE)
        memories = Memories(reference)

        def reports(beam: int) -> list[ParityReport]:
            runtimes = [load_runtime("ort-cpu", bundle, precision=p) for p in bundle.precisions]
            searches, own = [SearchOptions(beam=beam, max_length=TARGET)], self.tolerance
            return compare_all(reference, runtimes, sources, searches, random=True, tolerance=own, memories=memories)

        # Load the graphs again for each search, so that those of both are not in memory at once.
        agreements: dict[Precision, Agreement] = {}
        for report in (report for beam in (1, 4) for report in reports(beam)):
            if not report.passed:
                raise _rejected(report)
            before = agreements.get(report.precision, Agreement(0, 0))
            agreements[report.precision] = Agreement(before.same + report.same_best, before.steps + report.steps)
        return agreements


def _rejected(report: ParityReport) -> TfexportError:
    short = contract.short_name(report.precision)
    others = " Report this with the config, allow more with --tolerance N,"
    if report.precision != "float32":
        others = f" Leave {short} out of --precision,"
    return TfexportError(
        f"the exported graphs in {short} do not decode as PyTorch does with beam {report.beam}: "
        f"{'; '.join(report.failures)}. Nothing was exported.{others} or export with "
        "--no-parity and find the cause with tfexport parity --bisect."
    )
