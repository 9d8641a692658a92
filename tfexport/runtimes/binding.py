"""ONNX Runtime over arrays of this process."""

from __future__ import annotations

from typing import Any

import onnxruntime
from numpy.typing import NDArray

from tfexport.errors import BundleError


class Binding:
    """A session bound to arrays, which are read and written where they lie."""

    def __init__(self, session: onnxruntime.InferenceSession):
        self._session, self._binding = session, session.io_binding()
        self._values: dict[str, Any] = {}  # kept alive, and with them their arrays

    def input(self, name: str, array: NDArray[Any]) -> None:
        self._values[name] = value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        self._binding.bind_ortvalue_input(name, value)

    def output(self, name: str, array: NDArray[Any]) -> None:
        self._values[name] = value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        self._binding.bind_ortvalue_output(name, value)

    def in_place(self, past: str, present: str, array: NDArray[Any]) -> None:
        """Let an input and an output be one array."""
        self.input(past, array)
        self._binding.bind_ortvalue_output(present, self._values[past])

    def run(self) -> None:
        """Raises BundleError where ONNX Runtime cannot compute the graph."""
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # the library's errors have no common base
            raise BundleError(
                f"ONNX Runtime cannot run this graph: {str(error).splitlines()[0]} If memory is short, use a smaller "
                "--batch-size or --beam; if not, export again."
            ) from error
