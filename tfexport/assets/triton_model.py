"""Triton's Python backend over a bundle: text in, text out, decoded by tfexport's own loop."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # Triton brings it

from tfexport.bundle.reader import open_bundle
from tfexport.decoding.job import Job, Request, Setup
from tfexport.errors import TfexportError
from tfexport.option import Given
from tfexport.runtimes import load_runtime

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
        settings = {name: parameter["string_value"] for name, parameter in parameters.items()}
        bundle = open_bundle(Path(args["model_repository"]) / args["model_version"] / "bundle")
        search = {
            "beam": int(settings["beam"]),
            "length_penalty": float(settings["length_penalty"]),
            "max_length": int(settings["max_length"]),
        }
        self._job = Job(
            setup=Setup.of(bundle, Request(search=Given(search))),
            runtime=load_runtime(settings["runtime"], bundle, precision=settings["precision"]),  # type: ignore[arg-type]
            batch_size=int(settings["batch_size"]),
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Decode the lines of all requests together; a response for each, in the shape of its TEXT."""
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy() for request in requests]
        rows = iter(self._rows([line for text in texts for line in text.ravel()]))
        return [_response(list(islice(rows, text.size)), text.shape) for text in texts]

    def _rows(self, lines: list[bytes]) -> list[Row]:
        try:
            results = list(self._job.lines(lines))
        except TfexportError as error:
            if len(lines) > 1:  # alone, so that the error of one line costs no other its translation
                return [row for line in lines for row in self._rows([line])]
            pb_utils.Logger.log_error(f"translate: {error}")
            return [(b"", b"failed", 0.0)]
        return [
            (
                self._job.setup.writer.line(result).encode(),
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
