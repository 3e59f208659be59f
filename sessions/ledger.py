"""The ledger of a worker's devices: bytes are reserved before they are used.

A session reserves, on all devices at once or on none, what its engine declares for its
settings; output reserves what is kept of it. Nothing that does not fit into the budget is
reserved. What an engine then measures corrects the account: a session counts with the
larger of what it declared and what it holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from protocol.device_bytes import HOST, DeviceBytes, binary_size
from protocol.errors import CapacityExceeded, SessionTooLarge, TenantShareExceeded


class OutOfBytes(CapacityExceeded):
    """The budget has no room; `shortage` is what others would have to free, by device.

    With a `tenant` only its own sessions can: it has all that it may have.
    """

    def __init__(self, message: str, shortage: Mapping[str, int], tenant: str | None) -> None:
        code = CapacityExceeded.code if tenant is None else TenantShareExceeded.code
        super().__init__(message, code=code)
        self.shortage = shortage
        self.tenant = tenant


@dataclass(frozen=True)
class Budget:
    """What a worker may reserve of one device.

    `head_room` is the share (0 to 1) of it that no session may reserve, and `tenant_share`
    the share that one tenant's sessions may have of what sessions can.
    """

    total_bytes: int
    head_room: float = 0.0
    tenant_share: float = 1.0

    @property
    def head_room_bytes(self) -> int:
        """What sessions have to leave."""
        return int(self.total_bytes * self.head_room)


@dataclass
class _Held:
    """What is reserved of one device, by all sessions together and by others."""

    engine: int = 0
    pool: int = 0
    sessions: int = 0
    undeclared: int = 0
    kept: int = 0
    arena: int = 0


@dataclass
class _Account:
    """One session's bytes by device: `earlier` holds until `settle` while they change."""

    tenant: str
    declared: Mapping[str, int]
    earlier: Mapping[str, int] | None = None
    measured: Mapping[str, int] = field(default_factory=dict)

    def reserved(self, device: str) -> int:
        """What was reserved for it before it was used."""
        return max(self.declared.get(device, 0), (self.earlier or {}).get(device, 0))

    def charge(self, device: str) -> int:
        """What it counts with."""
        return max(self.reserved(device), self.measured.get(device, 0))

    @property
    def devices(self) -> set[str]:
        """Where it holds anything."""
        return {*self.declared, *(self.earlier or ()), *self.measured}


class Ledger:
    """The bytes of every device of one worker; a device without a budget is not bounded."""

    def __init__(self, budgets: Mapping[str, Budget] | None = None) -> None:
        self._budgets = dict(budgets or {})
        self._held = defaultdict(_Held, {device: _Held() for device in (HOST, *self._budgets)})
        self._accounts: dict[str, _Account] = {}
        self._tenants: defaultdict[tuple[str, str], int] = defaultdict(int)

    # The worker itself

    def bound(self, device: str, budget: Budget) -> None:
        """The budget of a device that turned up with the engine, where none was given."""
        self._budgets.setdefault(device, budget)
        self._held.setdefault(device, _Held())

    def raise_to(self, device: str, total_bytes: int) -> None:
        """Let a budget be this much at least."""
        budget = self._budgets[device]
        if budget.total_bytes < total_bytes:
            self._budgets[device] = replace(budget, total_bytes=total_bytes)

    def load(self, device: str, *, engine: int = 0, pool: int = 0, arena: int = 0) -> None:
        """What the worker holds of `device` now that its engine is loaded.

        Raises CapacityExceeded when that leaves nothing of the budget for sessions.
        """
        held = self._held[device]
        held.engine, held.pool, held.arena = engine, pool, arena
        budget = self._budgets.get(device)
        if budget is None:
            return
        most = budget.total_bytes - budget.head_room_bytes
        if (taken := engine + pool + arena) > most:
            raise CapacityExceeded(
                f"the engine takes {binary_size(taken)} of {device} once it is loaded, and its "
                f"budget without the head-room is {binary_size(most)}",
                field=f"budget.{device}",
            )

    # Sessions

    def reserve(self, session: str, tenant: str, declared: Mapping[str, int]) -> None:
        """Reserve what a session declares, on every device; what it had stays until `settle`.

        Raises OutOfBytes, or SessionTooLarge where no other session could make room, and
        then nothing has changed.
        """
        before = self._accounts.get(session)
        earlier = None if before is None else before.declared
        measured = {} if before is None else before.measured
        account = _Account(tenant, dict(declared), earlier, measured)
        shortage: dict[str, int] = {}
        reasons: list[str] = []
        own_only = False
        for device in sorted(account.devices):
            more = account.charge(device) - (0 if before is None else before.charge(device))
            if (room := self._room(device)) is None or more <= 0:
                continue
            most, free = room
            share = self._share(device)
            if more > (most if share is None else share):
                raise SessionTooLarge(_reason(device, more, room, share))
            lacking = more - free
            if share is not None:
                beyond = self._tenants.get((tenant, device), 0) + more - share
                own_only = own_only or beyond > 0
                lacking = max(lacking, beyond)
            if lacking > 0:
                shortage[device] = lacking
                reasons.append(_reason(device, more, room, share))
        if shortage:
            raise OutOfBytes("; ".join(reasons), shortage, tenant if own_only else None)
        self._replace(session, account)

    def settle(self, session: str, *, taken: bool) -> None:
        """The engine has taken the settings that bytes were reserved for, or kept its old."""
        account = self._accounts.get(session)
        if account is None or account.earlier is None:
            return
        declared = account.declared if taken else account.earlier
        self._replace(session, _Account(account.tenant, declared, None, account.measured))

    def measure(self, session: str, measured: Mapping[str, int]) -> None:
        """The engine has measured what a session holds now."""
        if (account := self._accounts.get(session)) is not None:
            now = _Account(account.tenant, account.declared, account.earlier, dict(measured))
            self._replace(session, now)

    def measures(self, session: str, measured: Mapping[str, int]) -> bool:
        """Whether this is what was measured last of a session."""
        account = self._accounts.get(session)
        return account is not None and account.measured == measured

    def release(self, session: str) -> None:
        """The session holds nothing any more."""
        self._replace(session, None)

    def of(self, session: str) -> dict[str, int]:
        """What a session counts with, by device."""
        account = self._accounts.get(session)
        return {} if account is None else {d: account.charge(d) for d in sorted(account.devices)}

    # Output

    @property
    def kept_bytes(self) -> int:
        """Output that is kept until its consumer has acknowledged it."""
        return self._held[HOST].kept

    def has_room(self, size: int) -> bool:
        """Whether a piece of output of `size` bytes can be kept."""
        budget = self._budgets.get(HOST)
        return budget is None or self._reserved(HOST) + size <= budget.total_bytes

    def keep(self, size: int) -> None:
        """A piece of output is kept, for which there is room."""
        self._held[HOST].kept += size

    def drop(self, size: int) -> None:
        """That much output is kept no longer."""
        self._held[HOST].kept -= size

    # Views

    def devices(self) -> dict[str, DeviceBytes]:
        """Every device, as it stands."""
        found = {}
        for device, held in sorted(self._held.items()):
            budget = self._budgets.get(device)
            found[device] = DeviceBytes(
                None if budget is None else budget.total_bytes,
                0 if budget is None else budget.head_room_bytes,
                held.engine,
                held.pool,
                held.sessions,
                held.kept,
                held.arena,
                held.undeclared,
            )
        return found

    def freeze(self) -> tuple[object, ...]:
        """The canonical state."""
        return (
            tuple((name, tuple(self.of(name).items())) for name in sorted(self._accounts)),
            self.kept_bytes,
        )

    # Inside

    def _reserved(self, device: str) -> int:
        held = self._held[device]
        return held.engine + max(held.pool, held.sessions) + held.kept + held.arena

    def _room(self, device: str) -> tuple[int, int] | None:
        """What sessions may have of a device, and what of that is free; None: any amount."""
        budget, held = self._budgets.get(device), self._held[device]
        if held.pool:
            return held.pool, held.pool - held.sessions
        if budget is None:
            return None
        most = budget.total_bytes - budget.head_room_bytes - held.engine - held.arena
        unkept = budget.total_bytes - held.engine - held.arena - held.kept
        return most, min(most, unkept) - held.sessions

    def _share(self, device: str) -> int | None:
        """What the sessions of one tenant may have of a device together; None: all there is."""
        budget, room = self._budgets.get(device), self._room(device)
        if budget is None or room is None or budget.tenant_share == 1:
            return None
        return int(room[0] * budget.tenant_share)

    def _replace(self, session: str, account: _Account | None) -> None:
        before = self._accounts.pop(session, None)
        for known, sign in ((before, -1), (account, 1)):
            if known is None:
                continue
            for device in known.devices:
                charge = sign * known.charge(device)
                self._held[device].sessions += charge
                self._held[device].undeclared += charge - sign * known.reserved(device)
                key = (known.tenant, device)
                self._tenants[key] += charge
                if not self._tenants[key]:
                    del self._tenants[key]
        if account is not None:
            self._accounts[session] = account


def _reason(device: str, more: int, room: tuple[int, int], share: int | None) -> str:
    most, free = room
    reason = (
        f"{binary_size(more)} of {device} are needed, and {binary_size(max(free, 0))} of "
        f"{binary_size(most)} for sessions are free"
    )
    if share is not None:
        reason += f", of which those of one tenant may have {binary_size(share)} together"
    return reason
