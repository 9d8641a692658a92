"""The part of the build that pyproject.toml cannot say: the kernels, which are left out where there is no compiler for them."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tfexport.kernels._library",
            ["tfexport/kernels/kernels.cpp"],
            depends=["tfexport/kernels/attention.h", "tfexport/kernels/floats.h", "tfexport/kernels/rows.h", "tfexport/kernels/runtime.h"],
            # Vectors in arguments of functions that are always inlined have no calling convention to warn of.
            extra_compile_args=[
                *("-std=c++17", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
            ],
            optional=True,
            language="c++",
        )
    ]
)
