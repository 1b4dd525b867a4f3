"""Whether the processes of a run can share its work as `plugin: hybrid` says."""

from __future__ import annotations

from osora_cli.config.schema import TrainConfig
from osora_cli.errors import ConfigError


def check_parallel_kinds(config: TrainConfig) -> None:
    """Raises ConfigError where `plugin: hybrid` asks for tensor or pipeline parallelism: there is neither."""
    if config.plugin != "hybrid":
        return
    for name, what in (("tp_size", "tensor"), ("pp_size", "pipeline")):
        size = getattr(config.plugin_config, name)
        if size > 1:
            raise ConfigError(
                f"`plugin_config.{name}` is `{size}`, and there is no {what} parallelism",
                where=f"plugin_config.{name}",
                allowed="1",
                hint=f"--plugin-config.{name.replace('_', '-')} 1; zero_stage splits the state, sp_size the tokens",
            )


def refuse_sequence_parallel(config: TrainConfig) -> None:
    """Raises ConfigError where `plugin: hybrid` shares the tokens of a sample: an autoencoder's clip has none."""
    size = config.plugin_config.sp_size
    if config.plugin == "hybrid" and size > 1:
        raise ConfigError(
            f"`plugin_config.sp_size` is `{size}`, and an autoencoder has no token sequence that ranks could share",
            where="plugin_config.sp_size",
            allowed="1",
            hint="`--plugin zero2` gives each rank clips of its own; `--grad-checkpoint` saves memory",
        )
