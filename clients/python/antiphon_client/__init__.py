"""The client of the Antiphon gateway: sessions that survive their connection, robots,
and worlds."""

from antiphon_client.actions import Action, Source
from antiphon_client.control import Counts
from antiphon_client.errors import (
    AntiphonError,
    ConnectionLost,
    ControlLost,
    NoAnswer,
    NoRoom,
    NotReachable,
    OutputsLost,
    ProtocolError,
    Refused,
    ServerFailed,
    SessionEnded,
)
from antiphon_client.options import ControlOptions
from antiphon_client.robot import AsyncRobotLoop, RobotLoop
from antiphon_client.session import Gateway, Session
from antiphon_client.stepped_world import SteppedWorld
from antiphon_client.stream import Output, Token
from antiphon_client.world import Picture, World

__all__ = [
    "Action",
    "AntiphonError",
    "AsyncRobotLoop",
    "ConnectionLost",
    "ControlLost",
    "ControlOptions",
    "Counts",
    "Gateway",
    "NoAnswer",
    "NoRoom",
    "NotReachable",
    "Output",
    "OutputsLost",
    "Picture",
    "ProtocolError",
    "Refused",
    "RobotLoop",
    "ServerFailed",
    "Session",
    "SessionEnded",
    "Source",
    "SteppedWorld",
    "Token",
    "World",
]
