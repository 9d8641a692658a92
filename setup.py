"""Builds the kernels. They are optional: an installation without a C++ compiler succeeds, and records why it has none.

`tfexport version` prints what this writes to `tfexport/kernels/build.json`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

RECORD = "build.json"
LIBRARY = "_library.dll" if sys.platform == "win32" else "_library.so"
"""Without a version of Python in its name: ONNX Runtime loads it, and it has no symbols of Python."""
OLDEST_GCC = 12
"""With it, assemblers know `{vex} vpdpbusd`; see tfexport/kernels/registers.h."""
MOST_LINES = 8
"""Of a compiler's messages."""


class BuildKernels(build_ext):
    """`build_ext` that records whether the kernels were built, by which compiler, and why not otherwise."""

    has_failed = False

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def run(self) -> None:
        super().run()
        if self.inplace:  # setuptools builds elsewhere, and copies only libraries
            folder = Path(self.get_finalized_command("build_py").get_package_dir("tfexport.kernels"))
            for extension in self.extensions:
                self.copy_file(str(self._record_of(extension)), str(folder / RECORD))

    def build_extension(self, extension: Extension) -> None:
        record = self._record_of(extension)
        record.parent.mkdir(parents=True, exist_ok=True)
        command = self._compiler_command()
        with captured_stderr() as messages:
            try:
                super().build_extension(extension)
            except Exception as error:
                record.write_text(json.dumps(failure(command, error, messages()), indent=1) + "\n", encoding="utf-8")
                self.has_failed = True
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)  # an earlier one, for another wheel
                raise  # setuptools reports it and goes on, as the extension is optional
        found = {"built": True, "compiler": described(macros_of(command))}
        record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def _record_of(self, extension: Extension) -> Path:
        """Beside the library. To be called while `inplace` is off, or after the build."""
        inplace, self.inplace = self.inplace, False
        path = Path(self.get_ext_fullpath(extension.name)).with_name(RECORD)
        self.inplace = inplace
        return path

    def _compiler_command(self) -> list[str]:
        """Compiles C++; empty for MSVC, whose command is not known before it is used."""
        for name in ("compiler_so_cxx", "compiler_so"):  # the first since setuptools 72
            if command := getattr(self.compiler, name, None):
                return list(command)
        return []


class OneWheel(bdist_wheel):
    """One wheel for all versions of Python; without kernels, for all systems.

    On Windows, where there are no kernels yet, a wheel keeps the name of its system. A release with a wheel for all systems
    would keep pip from building the kernels where no wheel has them.
    """

    def get_tag(self) -> tuple[str, str, str]:
        _, _, system = super().get_tag()
        is_for_all = self.get_finalized_command("build_ext").has_failed and not system.startswith("win")
        return "py3", "none", "any" if is_for_all else system


def failure(command: list[str], error: Exception, messages: str) -> dict[str, object]:
    """What to record of a build that failed. `reason` is a word for programs, `message` a clause for people."""
    macros = macros_of(command)
    lines = [line for line in messages.splitlines() if line.strip()] or [str(error)]
    # A compiler says first where the line was included from, and then the error.
    first = next((number for number, line in enumerate(lines) if "error" in line.lower()), 0)
    details = lines[first : first + MOST_LINES]
    if command and shutil.which(command[0]) is None:
        reason, message = "no-compiler", f"there was no C++ compiler ({command[0]} was not found)"
    elif not command:
        reason, message = "other-compiler", "they are for GCC and Clang, and the compiler was another"
    elif not macros.get("__clang__") and 0 < int(macros.get("__GNUC__", 0)) < OLDEST_GCC:
        reason = "compiler-too-old"
        message = f"the compiler, {described(macros)}, is older than GCC {OLDEST_GCC}"
    else:
        reason, message = "compile-error", f"the compiler failed: {details[0].strip()}"
    return {
        **{"built": False, "reason": reason, "message": message, "details": details},
        **{"compiler": described(macros), "command": command},
    }


def macros_of(command: list[str]) -> dict[str, str]:
    """What a compiler says of itself; empty where it does not run, or takes no such flags."""
    if not command:
        return {}
    try:
        asked = [*command, "-dM", "-E", "-x", "c++", os.devnull]
        done = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.SubprocessError):
        return {}
    fields = (line.split(maxsplit=2) for line in done.stdout.splitlines())
    return {field[1]: field[2] for field in fields if len(field) == 3}


def described(macros: dict[str, str]) -> str:
    """`GCC 12.2.0`; empty where the compiler is not known."""
    version = macros.get("__VERSION__", "").strip('"')
    return version if "clang" in version.lower() or not version else f"GCC {version}"


@contextmanager
def captured_stderr() -> Iterator[Callable[[], str]]:
    """Let compilers write stderr to a file, and show it afterwards. Yields a function that returns what there is so far."""
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as file:

        def messages() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        os.dup2(file.fileno(), 2)
        try:
            yield messages
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            sys.stderr.write(messages())


setup(
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": OneWheel},
    ext_modules=[
        Extension(
            "tfexport.kernels._library",
            ["tfexport/kernels/kernels.cpp"],
            depends=sorted(map(str, Path("tfexport/kernels").glob("*.h"))),
            # No fused operations (see tfexport/kernels/floats.h). Not -ffast-math, which changes how all of the process
            # treats the least floats. -Wno-psabi: vectors as arguments of functions that are always inlined have no calling
            # convention to warn of.
            extra_compile_args=[
                *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden"),
                *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
            ],
            optional=True,
            language="c++",
        )
    ],
)
