"""What can go wrong with a payload on its way to another process."""

from __future__ import annotations

from protocol.errors import AntiphonError, CapacityExceeded, ErrorKind, InvalidRequest


class NoCredit(CapacityExceeded):
    """There is no room now.

    Either the turn has used its window, or (`shared`) what it needs is taken by others.
    """

    code = "no_credit"

    def __init__(self, message: str, *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared


class PayloadTooLarge(InvalidRequest):
    """The payload could never be handed over with these limits."""

    code = "payload_too_large"


class PayloadClaimed(AntiphonError):
    """A consumer may be reading the payload: it cannot be replaced."""

    code = "payload_claimed"


class DescriptorRefused(AntiphonError):
    """The descriptor names nothing that its holder may read or release.

    It is stale (released, replaced), or it was not made by the arena that it names.
    """

    code = "descriptor_refused"


class NotAttached(AntiphonError):
    """The bytes of the payload are not within reach yet."""

    code = "not_attached"


class TransferTimeout(AntiphonError):
    """The deadline passed before the payload, or room for it, was there."""

    code = "transfer_timeout"


class TurnVoid(AntiphonError):
    """The turn's content is no longer wanted; its credits are void."""

    code = "turn_void"
    kind = ErrorKind.FENCED


class PeerLost(AntiphonError):
    """The process at the other end is gone, and with it what it held."""

    code = "peer_lost"
    kind = ErrorKind.LOST
