"""What an open may lack, who has it, and how much of it is free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from protocol.errors import AntiphonError, TenantShareExceeded
from sessions.admission import Admission
from sessions.forecast import Holder
from sessions.pipeline import Pipeline


class Lack(NamedTuple):
    """A place of pipeline `name`, one of those that `tenant` may have of it ("tenant"), or room
    on stage `name`: of all of it, or of what `tenant` may have there."""

    kind: str
    name: str
    tenant: str = ""

    def holders(self, admission: Admission, now_ms: float) -> list[Holder]:
        """Who has what is lacking."""
        tenant = self.tenant or None
        if self.kind == "stage":
            return admission.holders(now_ms, stage=self.name, tenant=tenant)
        return admission.holders(now_ms, pipeline=self.name, tenant=tenant)


def of_pipeline(pipeline: Pipeline) -> Lack:
    """A place."""
    return Lack("pipeline", pipeline.name)


def of_tenant(pipeline: Pipeline, tenant: str) -> Lack:
    """A place of the tenant's."""
    return Lack("tenant", pipeline.name, tenant)


def of_stage(stage: str, tenant: str, error: AntiphonError) -> Lack:
    """What the refusal of a stage says is lacking there."""
    return Lack("stage", stage, tenant if error.code == TenantShareExceeded.code else "")


def of_stages(pipeline: Pipeline, tenant: str) -> Iterator[Lack]:
    """All that may be lacking on its stages, in the order in which they are asked."""
    for stage in pipeline.opening_order or pipeline.stages:
        yield Lack("stage", stage)
        yield Lack("stage", stage, tenant)


def of_all(pipeline: Pipeline, tenant: str) -> Iterator[Lack]:
    """All that may be lacking."""
    yield of_pipeline(pipeline)
    yield of_tenant(pipeline, tenant)
    yield from of_stages(pipeline, tenant)
