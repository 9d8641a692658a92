"""The errors a person can meet. Every message is one line and ends with what to do next."""

from __future__ import annotations


class TfexportError(Exception):
    """Base of every error that tfexport raises on purpose; the CLI prints it as one line and exits with 2."""


class ConfigError(TfexportError):
    """A model configuration that is incomplete or contradicts itself."""


class CheckpointError(TfexportError):
    """A checkpoint that cannot be read, recognised or loaded completely."""


class BundleError(TfexportError):
    """A bundle that is missing, incomplete, altered or of a newer format."""


class EngineError(TfexportError):
    """A TensorRT engine that cannot be built, or that was built for something else than what it meets."""


class TokenizerError(TfexportError):
    """A vocabulary or tokenizer file that cannot be used."""


class DeviceMemoryError(TfexportError):
    """A GPU whose memory is full."""


class RuntimeUnavailable(TfexportError):
    """A runtime whose library is not installed, or that does not exist."""


class QueueFullError(TfexportError):
    """A queue of requests that takes no more."""

    def __init__(self, message: str, retry_after: float, *, bulk: bool = False):
        super().__init__(message, retry_after)
        self.retry_after = retry_after
        """Seconds after which there is probably room."""
        self.bulk = bulk
        """Others that are not bulk may still be taken."""

    def __str__(self) -> str:
        return str(self.args[0])


class DeadlineError(TfexportError):
    """A request that was not answered by its deadline."""


class UnavailableError(TfexportError):
    """A model that was closed, or whose workers ended, before it answered a request."""


class ReplacedBundleError(BundleError, UnavailableError):
    """A bundle whose files are gone or others since it was loaded."""


def words_of(error: BaseException) -> str:
    """What an error says, in one line. Nothing where it cannot be written: libraries quote what a file holds, and that
    may be nested too deeply to be printed."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""
