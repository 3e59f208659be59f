"""Whether a robot is held still: an emergency stop from here, or one that the gateway tells of."""

from __future__ import annotations


class Halt:
    """Who holds the robot. It goes on when nobody does any more."""

    def __init__(self) -> None:
        self._here = False
        """Whether it was stopped from here."""
        self._known = False
        """Whether the gateway has answered to that."""
        self._held = False
        """Whether the gateway holds the session still, whoever asked for it."""
        self._by_client = False
        """Whether a reset ends that, which the gateway tells behind the reset."""
        self._by_refusal = False
        """Whether only a refused step has told that, which has no place among the outputs."""

    @property
    def stopped(self) -> bool:
        """Whether nothing but the safe action is taken."""
        return self._here or self._held

    @property
    def held(self) -> bool:
        """Whether the gateway holds the session."""
        return self._held

    def stop(self) -> None:
        """It is stopped from here."""
        self._here, self._known = True, False

    def stop_known(self) -> None:
        """The gateway has answered to the stop: a release that it tells of from now on is one of
        this stop."""
        self._known = True

    def release(self) -> None:
        """The stop from here is over; where the gateway held the session it tells that itself."""
        self._here = False

    def hold(self, *, by_client: bool = False) -> None:
        """The gateway holds the session."""
        self._held, self._by_client, self._by_refusal = True, by_client, False

    def step_refused(self) -> None:
        """A step was refused since the session is held."""
        if not self.stopped:
            self.hold()
            self._by_refusal = True

    def step_answered(self) -> None:
        """The policy has answered: the release may have been told before a refusal was known
        here. What was asked since has an answer, and who is held still gives none."""
        if self._by_refusal:
            self._held = self._by_refusal = False

    def was_reset(self) -> None:
        """A reset has come about, which ends what a client asked for."""
        self._here = False
        self._held = self._held and not self._by_client

    def released(self) -> None:
        """The gateway holds the session no more."""
        self._held = self._by_refusal = False
        if self._known:
            self._here = False
