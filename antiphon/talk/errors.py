"""Why a call could not be made or heard. Each has an exit status of its own."""

from __future__ import annotations

from protocol.errors import AntiphonError, ErrorKind


class TalkError(AntiphonError):
    """The root of what `antiphon talk` reports in one line.

    `exit_status` is what the command ends with.
    """

    exit_status = 1


class NoAnswer(TalkError):
    """The call was made, and no answer was heard."""

    code = "no_answer"
    kind = ErrorKind.SERVER
    exit_status = 1


class UnusableSound(TalkError):
    """The sound to send cannot be read, or the answer cannot be written."""

    code = "unusable_sound"
    kind = ErrorKind.CLIENT
    exit_status = 2


class NoAudioDevice(TalkError):
    """There is no microphone, or no library to reach one."""

    code = "no_audio_device"
    kind = ErrorKind.CLIENT
    exit_status = 2


class CannotConnect(TalkError):
    """Nothing answers at the address, or what answers is not a Realtime server."""

    code = "cannot_connect"
    kind = ErrorKind.SERVER
    exit_status = 3


class CallRefused(TalkError):
    """The server refused the connection, by HTTP status or by a close code."""

    code = "refused"
    kind = ErrorKind.CLIENT
    exit_status = 3


class ConnectionEnded(TalkError):
    """The connection ended before the answer did."""

    code = "connection_ended"
    kind = ErrorKind.SERVER
    exit_status = 3
