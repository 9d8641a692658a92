"""The errors that tfexport raises. Every message is one line and ends with what to do next."""

from __future__ import annotations


class TfexportError(Exception):
    """Base of all errors that tfexport raises on purpose. The CLI prints the message as one line and exits with 2."""

    example: str = ""
    """Code to show below the message, in lines of its own."""


class ConfigError(TfexportError):
    """A model configuration that is incomplete or contradicts itself."""


class CheckpointError(TfexportError):
    """A checkpoint that cannot be read, recognised or loaded completely."""


class BundleError(TfexportError):
    """A bundle that is missing, incomplete, altered or of a newer format."""


class EngineError(TfexportError):
    """A TensorRT engine that cannot be built, or that does not fit the GPU, library or sizes at hand."""


class TokenizerError(TfexportError):
    """A vocabulary or tokenizer file that cannot be used."""


class DeviceMemoryError(TfexportError):
    """A GPU whose memory is full."""


class RuntimeUnavailable(TfexportError):
    """A runtime whose library is not installed, or that does not exist."""


class QueueFullError(TfexportError):
    """A queue of requests that is full."""

    def __init__(self, message: str, retry_after: float, *, bulk: bool = False):
        super().__init__(message, retry_after)
        self.retry_after = retry_after
        """Seconds after which the queue probably has room."""
        self.bulk = bulk
        """Whether only bulk requests are refused; others may still be accepted."""

    def __str__(self) -> str:
        return str(self.args[0])


class DeadlineError(TfexportError):
    """A request that was not answered by its deadline."""


class UnavailableError(TfexportError):
    """A model that was closed, or whose workers ended, before it answered a request."""


class ReplacedBundleError(BundleError, UnavailableError):
    """A bundle whose files were removed or replaced after it was loaded."""


def words_of(error: BaseException) -> str:
    """The message of an error, in one line. Empty if the message cannot be printed: libraries quote the content of a file,
    which may be nested too deeply."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""
