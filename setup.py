"""Where packages go when they are installed: all but `specdec` go inside it, to `specdec/_parts`, which it puts on the
path. Beside it `server` or `bench` would be in the way of other people's packages of these names."""

from setuptools import find_packages, setup

PARTS = ("bench", "cluster", "draft", "server", "verify_kernels")
INSIDE = "specdec._parts."

setup(
    packages=find_packages(include=["specdec", "specdec.*"])
    + [INSIDE + name for part in PARTS for name in find_packages(include=[part, f"{part}.*"])],
    package_dir={INSIDE + part: part for part in PARTS},
    package_data={
        "specdec": ["py.typed", "api/v1/*.proto", "models/token_frequencies/*.bin"],
        INSIDE + "draft": ["csrc/*"],
        INSIDE + "verify_kernels": ["cpu/csrc/*"],
        INSIDE + "server.playground": ["static/*"],
        INSIDE + "server.experiment.report": ["*.j2"],
    },
)
