"""Maps the top-level folders to the namespace specserve.*; everything else is in pyproject.toml."""

from setuptools import Extension, find_packages, setup

ROOTS = ("proto", "server", "models", "speculators", "router_client")

packages, package_dir = [], {}
for root in ROOTS:
    package_dir[f"specserve.{root}"] = root
    packages.append(f"specserve.{root}")
    packages.extend(f"specserve.{root}.{name}" for name in find_packages(root))

setup(
    packages=packages,
    package_dir=package_dir,
    ext_modules=[
        # Plain C behind ctypes: it needs no Python or torch headers, so it builds in a second.
        Extension(
            "specserve.models.cpu_kernels._kernels",
            sources=[
                f"models/cpu_kernels/{name}.c" for name in ("kernels", "linear", "sampling", "collective", "tape")
            ],
            depends=[f"models/cpu_kernels/{name}.h" for name in ("common", "linear_levels", "linear_tile")],
            extra_compile_args=[
                *("-O3", "-std=c11", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
            ],
            extra_link_args=["-fopenmp", "-lm"],
        )
    ],
)
