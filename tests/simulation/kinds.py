"""The client for each kind of session."""

from __future__ import annotations

from sessions.pipeline import Kind
from tests.simulation.client import Client
from tests.simulation.deployment import Deployment
from tests.simulation.requester import Requester
from tests.simulation.rollout import Rollout
from tests.simulation.talker import Talker

CLIENTS: dict[Kind, type[Client]] = {
    Kind.DUPLEX: Talker,
    Kind.WORLD: Rollout,
    Kind.ROBOT: Rollout,
    Kind.ONE_SHOT: Requester,
}


def client_of(deployment: Deployment, gateway_place: str, name: str) -> Client:
    """A client for the sessions of this deployment."""
    return CLIENTS[deployment.profile.pipeline.kind](deployment, gateway_place, name)
