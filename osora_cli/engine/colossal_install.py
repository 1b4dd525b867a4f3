"""Whether ColossalAI can be used here. Imports neither it nor torch."""

from __future__ import annotations

from importlib.util import find_spec

from osora_cli.engine.settings import PluginSettings
from osora_cli.errors import ConfigError, SetupError

PLUGINS = ("ddp", "zero1", "zero2")
# Its own pins (torch <= 2.5.1) and ours (torch >= 2.6) cannot both be met, so it goes in without them.
INSTALL = "pip install 'osora[colossalai]' && pip install --no-deps colossalai==0.5.0"


def is_installed() -> bool:
    return find_spec("colossalai") is not None


def check_colossal(plugin: str, settings: PluginSettings, device_type: str) -> None:
    """Raises where `engine: colossalai` cannot run `plugin` on a device of this type.

    Raises:
        SetupError: it is not installed, or ZeRO has no GPU.
        ConfigError: it has no such plugin or setting.
    """
    if plugin not in PLUGINS:
        raise ConfigError(
            f"colossalai has no `plugin: {plugin}`",
            where="plugin",
            allowed=", ".join(PLUGINS),
            hint="`--engine native` runs it",
        )
    if settings.replicate > 1:
        raise ConfigError(
            "`replicate` is of the native engine's zero2 and zero3",
            where="plugin_config.replicate",
            allowed="1",
            hint="`--engine native`",
        )
    if not is_installed():
        raise SetupError("colossalai is not installed", where="engine: colossalai", hint=f"{INSTALL}")
    if plugin != "ddp" and device_type != "cuda":
        raise SetupError(
            f"colossalai's ZeRO needs CUDA, and this runs on the {device_type.upper()}",
            where="engine: colossalai",
            hint="use `--engine native`, or `--plugin ddp`",
        )
