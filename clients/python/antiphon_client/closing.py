"""What is closed by leaving its context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class ClosedOnLeaving(ABC):
    """An asynchronous context that is itself, and closes on the way out."""

    @abstractmethod
    async def close(self) -> None:
        """End it; idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
