"""The options of a feature in an EngineConfig."""

from __future__ import annotations

from fastgen.option import Options


class FeatureOptions(Options):
    """The options of a feature: what the value of an option that asks for it stands for; see engine/features.py."""

    @property
    def more_kv_layers(self) -> int:
        """The number of layers that the feature needs in the KV pool, in addition to the model's."""
        return 0

    @property
    def most_rows(self) -> int:
        """Maximum number of rows in its steps of decodes; 0: as without the feature."""
        return 0

    def choose(self, gpu: bool, kernels: str, max_step_tokens: int) -> FeatureOptions | None:
        """Return these options with all values filled in; None if the feature cannot run. The arguments are those of
        GeneratorOptions and EngineConfig; gpu: the device is not the CPU."""
        return self
