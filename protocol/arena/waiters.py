"""Tasks that wait for something to become true, each for its own key."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")


class Waiters(Generic[KeyT]):
    """Futures by key. Who waits is bounded by its own tasks; none is left when they end."""

    def __init__(self) -> None:
        self._futures: dict[KeyT, dict[asyncio.Future[None], None]] = {}

    def __len__(self) -> int:
        return len({future for futures in self._futures.values() for future in futures})

    @property
    def any(self) -> bool:
        """Whether anyone waits."""
        return bool(self._futures)

    async def wait(self, *keys: KeyT) -> None:
        """Wait until one of `keys` is woken, or raise what it failed with."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for key in keys:
            self._futures.setdefault(key, {})[future] = None
        try:
            await future
        finally:
            for key in keys:
                futures = self._futures.get(key, {})
                futures.pop(future, None)
                if not futures:
                    self._futures.pop(key, None)

    def wake(self, key: KeyT) -> None:
        """Let everyone who waits for `key` go on."""
        if self._futures:
            for future in self._futures.pop(key, {}):
                if not future.done():
                    future.set_result(None)

    def fail_all(self, error: Exception) -> None:
        """Let everyone who waits raise `error`."""
        waiting, self._futures = self._futures, {}
        for futures in waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
