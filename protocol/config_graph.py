"""The graph of a pipeline in a config: which stages and edges contradict each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from protocol.config_source import Location
from protocol.edges import ConnectorKind, edge_name
from protocol.payloads import PayloadType

if TYPE_CHECKING:
    from protocol.config import EdgeConfig, PipelineConfig

Contradiction = tuple[Location, str]
"""Where something is wrong, and what."""


def graph_contradictions(
    location: Location, pipeline: PipelineConfig, stages: Collection[str]
) -> Iterator[Contradiction]:
    """What contradicts itself in the graph of the pipeline at `location`; `stages` exist."""
    yield from _connector_contradictions(location, pipeline)
    sound = True
    for index, edge in enumerate(pipeline.edges):
        for end, stage in (("from", edge.source), ("to", edge.target)):
            if stage not in stages:
                sound = False
                yield (*location, "edges", index, end), f"there is no stage {stage}"
        if any((edge.source, edge.target) == (e.source, e.target) for e in pipeline.edges[:index]):
            sound = False
            reason = f"{edge.source} and {edge.target} are already joined by an edge"
            yield (*location, "edges", index), reason
    for modality, stage in pipeline.outputs.items():
        if stage not in stages:
            sound = False
            yield (*location, "outputs", modality.value), f"there is no stage {stage}"
    if not pipeline.outputs:
        yield (*location, "outputs"), "name at least one output stage"
        return
    if not sound:
        return
    cycle = _find_cycle(pipeline.edges)
    if cycle:
        yield (*location, "edges"), f"the edges form a cycle: {' -> '.join(cycle)}"
        return
    yield from _reachability_contradictions(location, pipeline)
    yield from _input_contradictions(location, pipeline)
    yield from _join_contradictions(location, pipeline)


def _connector_contradictions(
    location: Location, pipeline: PipelineConfig
) -> Iterator[Contradiction]:
    known = pipeline.edge_connectors
    for name in pipeline.connectors:
        if name not in known:
            reason = f"no edge is called {name}; there are {', '.join(sorted(known))}"
            yield (*location, "connectors", name), reason
    for edge in pipeline.edges:
        name = edge_name(edge.source, edge.target)
        if known[name] is not ConnectorKind.SHM:
            continue
        if edge.payload is PayloadType.TEXT:
            reason = "text between stages is cut into clauses on its way: it goes inline"
            yield (*location, "connectors", name), reason
        elif edge.whole:
            reason = "an arena's window does not hold a whole payload: a full edge is inline"
            yield (*location, "connectors", name), reason


def _reachability_contradictions(
    location: Location, pipeline: PipelineConfig
) -> Iterator[Contradiction]:
    targets = {edge.target for edge in pipeline.edges}
    entries = [stage for stage in pipeline.stages if stage not in targets]
    if len(entries) > 1:
        reason = f"input can enter at one stage only; no edge leads to {' and '.join(entries)}"
        yield (*location, "edges"), reason
        return
    useful = set(pipeline.outputs.values())
    for stage in reversed(pipeline.stages):
        if any(edge.source == stage and edge.target in useful for edge in pipeline.edges):
            useful.add(stage)
    for index, edge in enumerate(pipeline.edges):
        if edge.target not in useful:
            yield (*location, "edges", index, "to"), f"{edge.target} leads to no output"


def _input_contradictions(location: Location, pipeline: PipelineConfig) -> Iterator[Contradiction]:
    """An engine gets the payloads of all edges in one stream, and knows them by their type."""
    for index, edge in enumerate(pipeline.edges):
        for other in pipeline.edges[:index]:
            if (other.target, other.payload) == (edge.target, edge.payload):
                reason = (
                    f"{edge.target} could not tell the {edge.payload} of {_called(edge)} from "
                    f"that of {_called(other)}: only one edge may bring it {edge.payload}"
                )
                yield (*location, "edges", index, "payload"), reason
                break


def _join_contradictions(location: Location, pipeline: PipelineConfig) -> Iterator[Contradiction]:
    """A stage that joins edges must not keep waiting for a stage that waits for it.

    It does where one way to it has an edge that delivers in full, so that a stage at the
    beginning must end first, while another way from there hands on piece by piece through
    a window: the join empties it too late, and the window stops all that is before it.
    Text stops nobody: its clauses wait at the gateway.
    """
    connectors = pipeline.edge_connectors
    streaming = [e for e in pipeline.edges if not e.whole and e.payload is not PayloadType.TEXT]
    for index, window in enumerate(pipeline.edges):
        if window not in streaming or connectors[_called(window)] is not ConnectorKind.SHM:
            continue
        stopped = {edge.source for edge in _way_to(window, streaming)}
        for last in streaming:
            if window not in _way_to(last, streaming):
                continue
            full = _awaited_beside(last, pipeline.edges, stopped)
            if full is not None:
                reason = (
                    f"{last.target} waits for all of {_called(full)}, which is delivered in full, "
                    f"while the window of {_called(window)} may not hold all that comes "
                    "meanwhile: neither would go on. Deliver both in full"
                )
                yield (*location, "edges", index), reason
                break


def _awaited_beside(
    last: EdgeConfig, edges: Sequence[EdgeConfig], stopped: Collection[str]
) -> EdgeConfig | None:
    """The first edge delivered in full, on a way beside `last` to the same stage, that carries
    nothing before a `stopped` stage has ended; None without one."""
    for entering in edges:
        if entering.target != last.target or entering == last:
            continue
        for full in _way_to(entering, edges):
            if full.whole and any(edge.source in stopped for edge in _way_to(full, edges)):
                return full
    return None


def _way_to(last: EdgeConfig, edges: Sequence[EdgeConfig]) -> list[EdgeConfig]:
    """`last` and all of `edges` that lead to it over `edges`."""
    way = [last]  # Grows while it is walked along.
    for edge in way:
        way += [e for e in edges if e.target == edge.source and e not in way]
    return way


def _called(edge: EdgeConfig) -> str:
    return edge_name(edge.source, edge.target)


def _find_cycle(edges: Sequence[EdgeConfig]) -> list[str]:
    """The stages of one cycle, the first repeated at the end; empty if there is none."""
    remaining = list(edges)
    while True:
        targets = {edge.target for edge in remaining}
        kept = [edge for edge in remaining if edge.source in targets]
        if len(kept) == len(remaining):
            break
        remaining = kept
    if not remaining:
        return []
    # Every source that is left is also a target, so walking backwards must come round.
    incoming = {edge.target: edge.source for edge in remaining}
    path = [remaining[0].source]
    while path[-1] not in path[:-1]:
        path.append(incoming[path[-1]])
    cycle = path[path.index(path[-1]) :][:0:-1]
    start = min(range(len(cycle)), key=lambda i: [e.source for e in edges].index(cycle[i]))
    return [*cycle[start:], *cycle[:start], cycle[start]]
