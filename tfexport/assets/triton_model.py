"""Triton's Python backend over a bundle: text in, text out, decoded by tfexport's own loop."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # Triton brings it

from tfexport.bundle.reader import open_bundle
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.translate import Writer, translate
from tfexport.errors import TfexportError
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions

Row = tuple[bytes, bytes, float]
"""Translation, status and score of a line."""


class TritonPythonModel:
    """What the backend looks for in this file, under this name."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the bundle beside this file and load the runtime that config.pbtxt names.

        Raises:
            TfexportError: the bundle has been changed, or the runtime cannot run here.
        """
        parameters = json.loads(args["model_config"])["parameters"]
        given = {name: parameter["string_value"] for name, parameter in parameters.items()}
        bundle = open_bundle(Path(args["model_repository"]) / args["model_version"] / "bundle")
        self._runtime = load_runtime(given["runtime"], bundle, precision=given["precision"])  # type: ignore[arg-type]
        self._reader, self._writer = Reader.of(bundle, None), Writer.of(bundle, None)
        self._batch_size = int(given["batch_size"])
        self._options = SearchOptions(
            beam=int(given["beam"]),
            length_penalty=float(given["length_penalty"]),
            max_length=int(given["max_length"]),
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Decode the lines of all requests together; a response for each, in the shape of its TEXT."""
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy() for request in requests]
        rows = iter(self._rows([line for text in texts for line in text.ravel()]))
        return [_response(list(islice(rows, text.size)), text.shape) for text in texts]

    def _rows(self, lines: list[bytes]) -> list[Row]:
        try:
            results = list(translate(self._runtime, self._reader, lines, self._options, batch_size=self._batch_size))
        except TfexportError as error:
            if len(lines) > 1:  # alone, so that what one line runs into costs no other its translation
                return [row for line in lines for row in self._rows([line])]
            pb_utils.Logger.log_error(f"translate: {error}")
            return [(b"", b"failed", 0.0)]
        return [
            (
                self._writer.line(result).encode(),
                result.status.encode(),
                result.hypotheses[0].score if result.hypotheses else 0.0,  # not NaN, which JSON does not have
            )
            for result in results
        ]


def _response(rows: list[Row], shape: tuple[int, ...]) -> Any:
    translations, statuses, scores = ([row[column] for row in rows] for column in range(3))
    return pb_utils.InferenceResponse(
        output_tensors=[
            pb_utils.Tensor("TRANSLATION", np.array(translations, dtype=object).reshape(shape)),
            pb_utils.Tensor("STATUS", np.array(statuses, dtype=object).reshape(shape)),
            pb_utils.Tensor("SCORE", np.array(scores, dtype=np.float32).reshape(shape)),
        ]
    )
