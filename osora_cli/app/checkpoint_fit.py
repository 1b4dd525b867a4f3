"""Whether a checkpoint that a training is to go on from is of the networks that its config describes."""

from __future__ import annotations

from torch import nn

from osora_cli.checkpoint.layout import parse_state_key
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.engine.base import named_trainable
from osora_cli.errors import CheckpointError

_SHOWN = 4


def check_fits(reader: CheckpointReader, group: str, optimizer: str, network: nn.Module) -> None:
    """Compare names, shapes and the number of trained parameters; nothing is read but headers.

    Args:
        group, optimizer: names of the network's parts in the checkpoint.
        network: on any device, what is frozen marked so.

    Raises:
        CheckpointError: the weights are of another network, or the optimizer is of other parameters.
    """
    held = {key: shape for key, (_, shape) in reader.tensors(group).items()}
    wanted = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    faults = [f"`{key}` is missing" for key in wanted if key not in held]
    faults += [f"`{key}` is not in the config's" for key in held if key not in wanted]
    faults += [
        f"`{key}` has shape {list(held[key])}, the config's {list(wanted[key])}"
        for key in wanted
        if key in held and held[key] != wanted[key]
    ]
    where = str(reader.path)
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(
            f"`{group}` is of another network than the config's: {'; '.join(faults[:_SHOWN])}{more}", where=where
        )
    states = (parse_state_key(key) for key in reader.tensors(optimizer))
    numbers = {state[0] for state in states if state is not None}
    trained = sum(1 for _ in named_trainable(network))
    if len(numbers) != trained:
        raise CheckpointError(
            f"`{optimizer}` is of {len(numbers)} parameters, this training has {trained}: `freeze_layers` differs",
            where=where,
            hint=f"--from-pretrained {reader.path} takes the weights and begins anew",
        )
