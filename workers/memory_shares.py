"""How the memory of this machine is shared: parked state, budgets, and the rest."""

from __future__ import annotations

from protocol.config import Config, ParkingConfig
from protocol.device_bytes import HOST, binary_size
from protocol.errors import ConfigError
from workers.host_memory import host_memory_bytes

_MOST_FOR_PARKING_BYTES = 1 << 30
"""What parked state may take of the host's memory where nobody says."""


def parking_bytes(parking: ParkingConfig) -> int:
    """How much of the host's memory parked state may take."""
    if parking.memory is not None:
        return int(parking.memory)
    return min(_MOST_FOR_PARKING_BYTES, host_memory_bytes() // 8)


def share_of_memory(config: Config) -> int:
    """The bytes of host memory for each worker whose budget the config does not name.

    Raises ConfigError when the budgets it does name are more than there is.
    """
    memory = host_memory_bytes()
    rest = memory - parking_bytes(config.parking)
    if rest < 0:
        field = "parking.memory"
        raise ConfigError(
            f"{field}: more than this machine has ({binary_size(memory)})", field=field
        )
    sharing = 0
    for stage, section in config.stages.items():
        if (budget := section.budget.get(HOST)) is None:
            sharing += section.replicas
            continue
        rest -= budget * section.replicas
        if rest < 0:
            field = f"stages.{stage}.budget.{HOST}"
            raise ConfigError(
                f"{field}: the budgets are more than this machine has ({binary_size(memory)})",
                field=field,
            )
    return rest // max(1, sharing)
