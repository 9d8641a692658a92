"""What pyproject.toml cannot say: the kernels, which are left out where there is no compiler for them."""

from pathlib import Path

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tfexport.kernels._library",
            ["tfexport/kernels/kernels.cpp"],
            depends=sorted(map(str, Path("tfexport/kernels").glob("*.h"))),
            # Not -ffast-math, which changes how all of the process treats the least floats. -Wno-psabi: vectors as arguments
            # of functions that are always inlined have no calling convention to warn of.
            extra_compile_args=[
                *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden"),
                *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
            ],
            optional=True,
            language="c++",
        )
    ]
)
