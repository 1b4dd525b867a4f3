"""Settings of the plugins, and what can be wrong with them before anything is built. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from osora_cli.errors import ConfigError

MILLION = 1_000_000


@dataclass(frozen=True)
class PluginSettings:
    """How a plugin is set up.

    Attributes:
        bucket_elements: gradient elements that are reduced at a time.
        overlap_allgather: gather parameters while the next step starts (ColossalAI only).
        replicate: groups of ranks that hold the whole state each, for zero2 and zero3; 1: all ranks share one.
        cpu_offload: keep parameters and optimizer in the host's memory (zero2 and zero3).
        sp_size: of hybrid: ranks that share one sample's tokens.
        zero_stage: of hybrid: what is sharded, 0 for nothing.
    """

    bucket_elements: int = 128 * MILLION
    overlap_allgather: bool = False
    replicate: int = 1
    cpu_offload: bool = False
    sp_size: int = 1
    zero_stage: int = 2

    @property
    def bucket_mib(self) -> int:
        """Size of a bucket of fp32 gradients, MiB."""
        return max(1, self.bucket_elements * 4 // (1 << 20))


def sharing(plugin: str, settings: PluginSettings) -> str:
    """How the state is shared out: `plugin`, or what a hybrid's stage names."""
    return ("ddp", "zero1", "zero2", "zero3")[settings.zero_stage] if plugin == "hybrid" else plugin


def check_plugin(plugin: str, settings: PluginSettings, world_size: int) -> None:
    """Whether `plugin` can run so over `world_size` ranks.

    Raises:
        ConfigError: it cannot.
    """
    if world_size == 1:
        return
    if plugin == "none":
        raise ConfigError(
            f"`plugin: none` trains in one process, and {world_size} were started",
            where="plugin",
            allowed="ddp, zero1, zero2, zero3",
        )
    sharded = sharing(plugin, settings) in ("zero2", "zero3")
    for name, used in (("replicate", settings.replicate > 1), ("cpu_offload", settings.cpu_offload)):
        if used and not sharded:
            raise ConfigError(
                f"`{name}` goes with parameters that are sharded, and `plugin` is `{plugin}`",
                where=f"plugin_config.{name}",
                allowed="zero2, zero3",
            )
    if world_size % settings.replicate:
        raise ConfigError(
            f"{world_size} ranks cannot be split into `{settings.replicate}` equal groups",
            where="plugin_config.replicate",
            allowed=f"divisors of {world_size}",
        )
